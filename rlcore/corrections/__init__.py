"""Corrections of the mismatch between the policy that sampled and the one that learns.

One correction a file: settings, formula, and a method on the hooks of
`rlcore.interfaces.Correction`; `specs.py` has the registry. `pipeline.build` composes the
corrections of a run, and `functional.py` exports the formulas.
"""
