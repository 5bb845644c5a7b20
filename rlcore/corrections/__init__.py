"""Corrections of the mismatch between the policy that sampled and the one that learns.

One method a file, each on the four hooks of `rlcore.interfaces.Correction`; `build` makes a run's pipeline out of names
and plain arguments. The formulas themselves are in `rlcore.corrections.functional`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlcore.corrections.ais import Ais
from rlcore.corrections.base import BaseCorrection
from rlcore.corrections.dvp import Dvp
from rlcore.corrections.icepop import IcePop
from rlcore.corrections.jackpot import Jackpot
from rlcore.corrections.mis import Mis
from rlcore.corrections.pipeline import Pipeline
from rlcore.corrections.rapid import Rapid
from rlcore.corrections.tis import Tis
from rlcore.corrections.veto import Veto
from rlcore.errors import UserError

REGISTRY: dict[str, Callable[..., BaseCorrection]] = {
    "tis": Tis,
    "mis": Mis,
    "icepop": IcePop,
    "veto": Veto,
    "jackpot": Jackpot,
    "ais": Ais,
    "dvp": Dvp,
    "rapid": Rapid,
}
SEEDED = frozenset({"jackpot"})  # draw random numbers, so they get the run's seed


def build(names_and_args: Mapping[str, Mapping[str, Any]], run_seed: int) -> Pipeline:
    """The pipeline of a run.

    Args: name -> keyword arguments, in the order in which they apply; the run's seed (Jackpot's draws derive from it).
    Raises UserError for an unknown name or a combination that contradicts itself.
    """
    corrections = []
    for name, args in names_and_args.items():
        if name not in REGISTRY:
            raise UserError.choice("correction", name, ("none", *REGISTRY))
        seed = {"run_seed": run_seed} if name in SEEDED else {}
        corrections.append(REGISTRY[name](**args, **seed))
    return Pipeline(corrections)


__all__ = ["REGISTRY", "BaseCorrection", "Pipeline", "build"]
