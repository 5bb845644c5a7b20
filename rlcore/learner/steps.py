"""The end of an optimizer step: checks, update, metrics."""

from __future__ import annotations

import math

from rlcore.errors import StageError
from rlcore.interfaces import Reduce
from rlcore.learner.protocols import TrainEngine
from rlcore.learner.sums import Sums


def take_step(
    engine: TrainEngine,
    sums: Sums,
    reduce: Reduce,
    *,
    what: str,
    kept: int = 0,
    step_scale: float = 1.0,
) -> dict[str, float]:
    """Update the weights from the accumulated gradient; global metrics of the step.

    `kept`: tokens in the loss over all ranks, where a sum is declared per kept token;
    `step_scale` multiplies the learning rate, which is reported as it was used. Raises
    StageError that names `what`, before anything is updated, when a loss or the gradient is not
    finite.
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
    return metrics | {"grad_norm": norm, "lr": engine.step(step_scale)}
