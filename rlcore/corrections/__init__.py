"""Corrections of the mismatch between the policy that sampled and the one that learns.

One method a file, each on the five hooks of `rlcore.interfaces.Correction`; `build` makes a run's pipeline out of names
and plain arguments. The formulas themselves are in `rlcore.corrections.functional`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlcore.corrections.base import BaseCorrection
from rlcore.corrections.pipeline import Pipeline
from rlcore.corrections.tis import Tis
from rlcore.errors import UserError

REGISTRY: dict[str, Callable[..., BaseCorrection]] = {
    "tis": Tis,
}


def build(names_and_args: Mapping[str, dict[str, Any]], run_seed: int, keep_best: int | None = None) -> Pipeline:
    """The pipeline of a run.

    Args: name -> keyword arguments, in the order in which they apply; the run's seed (Jackpot's draws derive from it);
    how many samples of each group are kept (None keeps all).
    Raises UserError for an unknown name or a combination that contradicts itself.
    """
    for name in names_and_args:
        if name not in REGISTRY:
            raise UserError.choice("correction", name, ("none", *REGISTRY))
    return Pipeline([REGISTRY[name](**args) for name, args in names_and_args.items()])


__all__ = ["REGISTRY", "BaseCorrection", "Pipeline", "build"]
