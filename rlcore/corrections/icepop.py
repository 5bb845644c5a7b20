"""IcePop: masked importance sampling per token, with its own usual bounds."""

from __future__ import annotations

from rlcore.corrections.mis import Mis
from rlcore.corrections.specs import IcePopSpec, MisSpec


class IcePop(Mis):
    """Weight `p_ref/p_inf` of a token where it lies in `[low, high]`, else 0 (DistillSparse
    2.1)."""

    def __init__(self, spec: IcePopSpec, run_seed: int) -> None:
        super().__init__(MisSpec(low=spec.low, high=spec.high, level="token"), run_seed)
