"""The commands of `rlcore`, one file each: the composition root.

Only here and in `cli` is configuration read; every part of a run is built from it in `session.py`
and given whole specifications.
"""
