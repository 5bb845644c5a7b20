"""Rollout engines, one package each. They are listed in `rollout/specs.py`."""
