"""The loss of a micro-batch as a sum with global coefficients, and the sums that its metrics are made of."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlcore.errors import UserError
from rlcore.interfaces import Corrected, Reduce
from rlcore.objectives.aggregate import Aggregation
from rlcore.objectives.kl import Estimator, sampled_kl
from rlcore.objectives.policy_loss import Loss, policy_loss


@dataclass(frozen=True, slots=True)
class Objective:
    """loss = sum over tokens of coefficient * (policy + kl_coef * KL - entropy_coef * entropy)."""

    loss: Loss
    eps_low: float
    eps_high: float
    short_circuit: bool
    aggregation: Aggregation
    kl_coef: float
    kl_estimator: Estimator | str  # or "full"
    entropy_coef: float

    def __post_init__(self) -> None:
        if self.kl_coef and self.kl_estimator not in ("k1", "k2", "k3", "full"):
            raise UserError.choice("algorithm.kl_estimator", self.kl_estimator, ("k1", "k2", "k3", "full"))

    @property
    def needs_base_logp(self) -> bool:
        """Whether log-probs under the frozen starting policy are needed."""
        return self.kl_coef > 0 and self.kl_estimator != "full"

    @property
    def needs_full_kl(self) -> bool:
        return self.kl_coef > 0 and self.kl_estimator == "full"

    @property
    def sum_names(self) -> tuple[str, ...]:
        """Every sum that a step of this objective may add."""
        clips = ("policy/clip_low_share", "policy/clip_high_share") if self.loss != "reinforce" else ()
        kl = ("loss/kl",) if self.kl_coef else ()
        return ("loss/policy", *kl, "policy/ratio", *clips)

    def __call__(
        self,
        logp_new: Tensor,
        logp_ref: Tensor,
        advantages: Tensor,
        corrected: Corrected,
        coefficients: Tensor,
        entropy: Tensor,
        kl: Tensor | None,
        base: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss (scalar) of whole sequences, all [b, T]; and sums over their tokens, by metric name.

        `kl` is the full KL; `base` what the sampled estimators need: the frozen policy's log-probs, and the mask of the
        tokens that both policies give a log-prob. Sums under "loss/" add up to the global value; the others are to be
        divided by the number of kept tokens.
        """
        per_token, indicators = policy_loss(
            self.loss,
            logp_new,
            logp_ref,
            advantages,
            corrected.mask,
            corrected.weight,
            eps_low=self.eps_low,
            eps_high=self.eps_high,
            short_circuit=self.short_circuit,
        )
        loss = policy = (per_token * coefficients).sum()
        sums = {"loss/policy": policy.detach()}
        if base is not None:
            kl = sampled_kl(self.kl_estimator, logp_new, *base)  # type: ignore[arg-type]
        if kl is not None:
            kl_mean = (kl * coefficients).sum()
            loss = loss + self.kl_coef * kl_mean
            sums["loss/kl"] = kl_mean.detach()
        if self.entropy_coef:
            loss = loss - self.entropy_coef * (entropy * coefficients).sum()
        sums |= {f"policy/{name}": (v * corrected.mask).sum() for name, v in indicators.items()}
        return loss, {name: v.double() for name, v in sums.items()}


class Sums:
    """Running sums by name. A rank that added nothing still reduces: the caller of `over_ranks` lists the names."""

    def __init__(self) -> None:
        self._values: dict[str, Tensor] = {}

    def add(self, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            self._values[name] = self._values[name] + value if name in self._values else value

    def over_ranks(self, names: tuple[str, ...], reduce: Reduce, device: torch.device) -> dict[str, float]:
        """Global sums by name, in one reduction; 0 where no rank added any. Raises KeyError for an unlisted name."""
        unlisted = set(self._values) - set(names)
        if unlisted:
            raise KeyError(f"sums {sorted(unlisted)} are not listed")
        zero = torch.zeros((), dtype=torch.float64, device=device)
        vector = torch.stack([self._values.get(name, zero).double() for name in names])
        return dict(zip(names, reduce(vector).tolist()))
