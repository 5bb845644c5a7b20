"""Corrections of the mismatch between the policy that sampled and the one that learns.

One method a file, on the hooks of `rlcore.interfaces.Correction`; its settings are in `specs.py`,
its name in `registry.py`. `pipeline.build` composes a run's. The formulas themselves are in
`rlcore.corrections.functional`.
"""
