"""rlcore: asynchronous actor-learner reinforcement learning of language models.

`train`, `evaluate`, `export`, `draw`, `load_run` and `Callback` come from `rlcore/api.py`,
`diagnose` from `rlcore/dumps/diagnose.py`; nothing is imported before one is used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlcore.api import RunResult, draw, evaluate, export, load_run, train
    from rlcore.dumps.diagnose import diagnose
    from rlcore.interfaces import Callback

__all__ = ["Callback", "RunResult", "diagnose", "draw", "evaluate", "export", "load_run", "train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module rlcore has no attribute {name}")
    if name == "diagnose":  # needs none of what trains
        from rlcore.dumps.diagnose import diagnose

        return diagnose
    from rlcore import api

    return getattr(api, name)
