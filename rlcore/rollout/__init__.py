"""Rollout actors: requests, the thread that owns an engine, and the engines in `engines/`.

This package imports neither torch nor an engine.
"""
