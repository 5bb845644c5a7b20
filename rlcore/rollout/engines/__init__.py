"""Rollout engines, one package each. They are listed in `rollout/registry.py`."""
