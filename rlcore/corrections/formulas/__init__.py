"""The methods' formulas as pure functions of tensors. The public import path is
`rlcore.corrections.functional`."""
