"""The loss of a step of reinforcement learning, and its parts by name."""

from __future__ import annotations

from torch import Tensor

from rlcore.corrections.centre import Centred, centring
from rlcore.learner.metric_sums import LOSS, Declared
from rlcore.objectives.losses import policy_loss
from rlcore.objectives.protocols import LossTensors
from rlcore.objectives.specs import ObjectiveSpec, TeacherSpec, make_loss


class StepLoss:
    """loss = sum over tokens of coefficient * (reward_weight * policy + kl_coef * KL - entropy_coef
    * entropy + teacher.weight * distance)."""

    def __init__(
        self, spec: ObjectiveSpec, *, short_circuit: bool, teacher: TeacherSpec | None = None
    ) -> None:
        """`short_circuit`: PPO's ratio is p_new / SG(p_new), so that its clip never binds.
        `teacher`: that distances are to, if there is one."""
        self.spec = spec
        self._teacher = teacher
        self._policy = make_loss(spec)
        self._short_circuit = short_circuit

    @property
    def needs_base_logp(self) -> bool:
        """True if log-probs under the frozen starting policy are needed."""
        return self.spec.kl_in_reward or (self.spec.kl_in_loss and not self.needs_full_kl)

    @property
    def needs_full_kl(self) -> bool:
        """True if the KL over the whole vocabulary is needed."""
        return self.spec.kl_in_loss and self.spec.kl_estimator == "full"

    @property
    def indicators(self) -> tuple[str, ...]:
        """Names of the indicators that the policy loss returns with its ratio."""
        return tuple(self._policy.indicators)

    @property
    def sums(self) -> dict[str, Declared]:
        """Every sum that `__call__` may return."""
        declared = {"loss/policy": LOSS}
        if self.spec.kl_in_loss:
            declared["loss/kl"] = LOSS
        if self._teacher is not None:
            declared["loss/teacher"] = LOSS
        kept = Declared("kept tokens")
        return declared | {f"policy/{name}": kept for name in ("ratio", *self.indicators)}

    def __call__(
        self,
        tokens: LossTensors,
        coefficients: Tensor,
        entropy: Tensor,
        kl: Tensor | None,
        distance: Tensor | None = None,
        term: Centred | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss (scalar) of whole episodes, and sums over their tokens, by metric name.

        coefficients, entropy, kl, distance: [b, T]; kl is each token's KL to the frozen policy,
        distance its distance to the teacher, or None. `term`: what the policy's part gains where a
        correction centres it.
        """
        per_token, indicators = policy_loss(self._policy, tokens, short_circuit=self._short_circuit)
        if term is not None:
            per_token = per_token + centring(self._policy, term, tokens.advantages, tokens.mask)
        policy = (per_token * coefficients).sum()
        loss = self.spec.reward_weight * policy
        sums = {"loss/policy": policy}
        if distance is not None and self._teacher is not None:
            sums["loss/teacher"] = mean = (distance * coefficients).sum()
            loss = loss + self._teacher.weight * mean
        if kl is not None:
            kl_mean = (kl * coefficients).sum()
            loss = loss + self.spec.kl_coef * kl_mean
            sums["loss/kl"] = kl_mean
        if self.spec.entropy_coef:
            loss = loss - self.spec.entropy_coef * (entropy * coefficients).sum()
        sums |= {f"policy/{name}": values.sum() for name, values in indicators.items()}
        return loss, sums
