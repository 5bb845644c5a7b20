"""The loss of a micro-batch as a sum with global coefficients, and the sums that its metrics are
made of."""

from __future__ import annotations

from torch import Tensor

from rlcore.learner.sums import LOSS, Declared
from rlcore.objectives.policy_loss import policy_loss
from rlcore.objectives.protocols import LossTensors
from rlcore.objectives.registry import make_loss
from rlcore.objectives.specs import ObjectiveSpec


class StepLoss:
    """loss = sum over tokens of coefficient * (policy + kl_coef * KL - entropy_coef * entropy)."""

    def __init__(self, spec: ObjectiveSpec, *, short_circuit: bool) -> None:
        """`short_circuit`: PPO's ratio is p_new / SG(p_new), so that its clip never binds."""
        self.spec = spec
        self._policy = make_loss(spec)
        self._short_circuit = short_circuit

    @property
    def needs_base_logp(self) -> bool:
        """Whether log-probs under the frozen starting policy are needed."""
        return self.spec.kl_coef > 0 and self.spec.kl_estimator != "full"

    @property
    def needs_full_kl(self) -> bool:
        """Whether the KL over the whole vocabulary is needed."""
        return self.spec.kl_coef > 0 and self.spec.kl_estimator == "full"

    @property
    def indicators(self) -> tuple[str, ...]:
        """Names of the indicators that the policy loss returns, beside its ratio."""
        return tuple(self._policy.indicators)

    @property
    def sums(self) -> dict[str, Declared]:
        """Every sum that `__call__` may return."""
        declared = {"loss/policy": LOSS}
        if self.spec.kl_coef:
            declared["loss/kl"] = LOSS
        kept = Declared("kept tokens")
        return declared | {f"policy/{name}": kept for name in ("ratio", *self.indicators)}

    def __call__(
        self, tokens: LossTensors, coefficients: Tensor, entropy: Tensor, kl: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss (scalar) of whole episodes, and sums over their tokens, by metric name.

        coefficients, entropy, kl: [b, T]; kl is each token's KL to the frozen policy, or None.
        """
        per_token, indicators = policy_loss(self._policy, tokens, short_circuit=self._short_circuit)
        loss = policy = (per_token * coefficients).sum()
        sums = {"loss/policy": policy}
        if kl is not None:
            kl_mean = (kl * coefficients).sum()
            loss = loss + self.spec.kl_coef * kl_mean
            sums["loss/kl"] = kl_mean
        if self.spec.entropy_coef:
            loss = loss - self.spec.entropy_coef * (entropy * coefficients).sum()
        sums |= {f"policy/{name}": values.sum() for name, values in indicators.items()}
        return loss, sums
