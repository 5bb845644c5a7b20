"""The commands of `rlcore`, one file each: the composition root.

Only this package and `cli` read the configuration; `processes.py` builds every part of a run from
it, with whole specifications as arguments.
"""
