"""Adaptive importance sampling."""

from __future__ import annotations

from rlcore.corrections.base import BaseCorrection, at_least_one
from rlcore.corrections.functional import ais
from rlcore.interfaces import Corrected, Needs, Reduce
from rlcore.types import StepTensors


class Ais(BaseCorrection):
    """Weight `1 + alpha (min(p_ref/p_inf, cap) - 1)`, alpha estimated from the step (AIS eq. 12 to 18).

    The paper's mini-batch is here the step's global batch: the tokens still in the loss when AIS's turn comes.
    """

    name = "ais"
    weighs = True
    needs = Needs(batch_stats=True)

    def __init__(
        self, *, cap: float = 5.0, delta: float = 0.02, gamma: float = 1.2, beta: float = 1.0, eps: float = 1e-6
    ) -> None:
        at_least_one("correction.ais.cap", cap)
        self.settings = {"cap": cap, "delta": delta, "gamma": gamma, "beta": beta, "eps": eps}

    def correct(self, step: StepTensors, current: Corrected, reduce: Reduce) -> Corrected:
        weight, metrics = ais(
            step.logp_ref, step.logp_inf, step.advantages, current.mask, **self.settings, reduce=reduce
        )
        return Corrected(current.weight * weight, current.mask, metrics)
