"""Sums over a step's tokens that become metrics, each declared with its divisor; and the optimizer
step that reports them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rlcore.errors import StageError
from rlcore.interfaces import Reduce
from rlcore.learner.packing import EpisodeTokens
from rlcore.learner.protocols import TrainEngine

# what a global sum is divided by: nothing, the tokens that stayed in the loss, all sampled tokens
Denominator = Literal["none", "kept tokens", "sampled tokens"]


@dataclass(frozen=True, slots=True)
class Declared:
    """How a sum becomes a metric. Example: Declared("kept tokens")"""

    per: Denominator = "none"
    loss: bool = False  # part of a loss: a step where it is not finite is not taken


LOSS = Declared(loss=True)
#: what every training step counts, beside its losses
TRAINED = {
    "entropy": Declared("sampled tokens"),
    "nonfinite_logp": Declared(),
    "train/tokens": Declared(),
    "train/sequences": Declared(),
}


class Sums:
    """Running sums by name, of one rank. A rank that added nothing takes part in reductions,
    too."""

    def __init__(self, declared: Mapping[str, Declared]) -> None:
        self.declared = dict(declared)
        self._values: dict[str, Tensor] = {}

    @classmethod
    def of_step(
        cls, losses: Mapping[str, Declared], episodes: Sequence[EpisodeTokens], device: torch.device
    ) -> Sums:
        """Sums of a training step: `losses` and TRAINED; `sizes` are added at once."""
        sums = cls({**losses, **TRAINED})
        tokens = sum(s.scored for parts in episodes for s in parts)
        sizes = {"train/tokens": tokens, "train/sequences": len(episodes)}
        sums.add({name: torch.tensor(float(n), device=device) for name, n in sizes.items()})
        return sums

    def add(self, values: Mapping[str, Tensor]) -> None:
        """Add to the sums. Raises KeyError for an undeclared name."""
        for name, value in values.items():
            if name not in self.declared:
                raise KeyError(f"sum {name} is not declared")
            value = value.detach().double()
            self._values[name] = self._values[name] + value if name in self._values else value

    def over_ranks(self, reduce: Reduce, device: torch.device) -> dict[str, float]:
        """Global sums by name, in one reduction; 0 where no rank added any."""
        zero = torch.zeros((), dtype=torch.float64, device=device)
        vector = torch.stack([self._values.get(name, zero) for name in self.declared])
        return dict(zip(self.declared, reduce(vector).tolist()))

    def losses(self, totals: Mapping[str, float]) -> dict[str, float]:
        """The global sums that are declared as parts of a loss."""
        return {name: v for name, v in totals.items() if self.declared[name].loss}

    def divided(
        self, totals: Mapping[str, float], counts: Mapping[Denominator, float]
    ) -> dict[str, float]:
        """Metrics of the global sums, each by its denominator."""
        by = {"none": 1.0, **{name: max(count, 1) for name, count in counts.items()}}
        return {name: v / by[self.declared[name].per] for name, v in totals.items()}


def take_step(
    engine: TrainEngine,
    sums: Sums,
    reduce: Reduce,
    *,
    what: str,
    kept: int = 0,
    step_scale: float = 1.0,
    held: bool = False,
) -> dict[str, float]:
    """Update the weights from the accumulated gradient; global metrics of the step.

    `kept`: tokens in the loss over all ranks, where a sum is declared per kept token;
    `step_scale` multiplies the learning rate, which is reported as it was used. `held`: the weights
    are not updated, and the gradient is cleared. Raises StageError that names `what`, before
    anything is updated, when a loss or the gradient is not finite.
    """
    totals = sums.over_ranks(reduce, engine.device)
    # before clipping, and on every rank alike, so that all of them refuse the step or none does
    norm = engine.grad_norm()
    nonfinite = totals.pop("nonfinite_logp")
    losses = sums.losses(totals)
    if not all(map(math.isfinite, [norm, *losses.values()])):
        values = ", ".join(f"{name} {v:.4g}" for name, v in losses.items())
        raise StageError(
            f"{what} was not taken: {values}, gradient norm {norm:.4g}, {nonfinite:.0f} of "
            f"{totals['train/tokens']:.0f} log-probs of the learner not finite."
        )
    metrics = sums.divided(totals, {"kept tokens": kept, "sampled tokens": totals["train/tokens"]})
    if held:
        engine.hold()
    return metrics | {"grad_norm": norm, "lr": 0.0 if held else engine.step(step_scale)}
