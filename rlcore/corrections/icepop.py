"""IcePop: masked importance sampling per token, with its own usual bounds."""

from __future__ import annotations

from rlcore.corrections.mis import Mis


class IcePop(Mis):
    """Weight `p_ref/p_inf` of a token where it lies in `[low, high]`, else 0 (DistillSparse 2.1)."""

    name = "icepop"

    def __init__(self, *, low: float = 0.5, high: float = 5.0) -> None:
        super().__init__(low=low, high=high, level="token")
