"""Drift: how far a mismatch moves the policy where nothing is learned, relative to what is learned.

A state whose answers do better or worse than their group moves the logits by E[A | state](q - p), q
the actors' and p the learner's probabilities (`corrections.centre`). Products of different groups
of answers keep its squared length without the noise of a plain square, which grows with the
answers' own. The gradient is taken in the states' logits. States count as equal by the signs of
random projections, and tokens by the sketch of `corrections.break_even`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlcore.corrections.break_even import SIZE, places_of, varied
from rlcore.corrections.centre import centre, with_tail
from rlcore.corrections.numerics import SumReduce, first_occurrence, same_shape, total
from rlcore.lazy import torch
from rlcore.seeding import derive_seed
from rlcore.types import StepTensors

if TYPE_CHECKING:
    from torch import Tensor

DECAY = 1 - 1 / 8  # of the sums, for each step
SIGNS = 16  # of a state


def policy_distance(
    topk_ids: Tensor, topk_logp_inf: Tensor, logp_at: Tensor
) -> tuple[Tensor, Tensor]:
    """Total variation of actor and learner [...] float64, at least and at most, from the actor's
    stored tokens [..., k] (-1 pads), one bin for all others, and the learner's log-probs.

    What is known of the others is their mass, so that the true value lies between the two.
    """
    valid = first_occurrence(topk_ids.long())
    q, p = with_tail(topk_logp_inf, valid), with_tail(logp_at, valid)
    least = 0.5 * (q - p).abs().sum(-1)
    return least, least + torch.minimum(q[..., -1], p[..., -1])


def unbiased_square(summed: Tensor, squares: Tensor, count: Tensor) -> Tensor:
    """|mean x|^2 from the sum of n independent vectors x [..., D], the sum of their squared lengths
    [...] and n: (|sum x|^2 - sum |x|^2)/(n (n - 1)), which the vectors' own noise does not bias."""
    pairs = (count * (count - 1)).clamp(min=1.0)
    return (summed.square().sum(-1) - squares) / pairs


def policy_drift_accumulate(
    topk_ids: Tensor,
    topk_logp_inf: Tensor,
    logp_at: Tensor,
    *,
    token_ids: Tensor,
    sketch: Tensor,
    advantages: Tensor,
    mask: Tensor,
    group_ids: Tensor,
    step: int = 0,
) -> Tensor:
    """Statistics [2 * 257 + 1] float64 of whole groups of answers, to be summed over ranks and
    micro-batches: over groups, the sketched drift X, the centred gradient Y and their squared
    lengths, and n.

    The actor's stored ids [B, T, k] (-1 pads) and their log-probs, the learner's there; sampled ids
    [B, T]; `last_layer_sketch` [B, T, 32] under the learner; advantages [B, T]; mask [B, T] bool;
    group_ids [B]. `step`: another one asks for other projections. Tokens of groups without an
    advantage do not count.
    """
    same_shape(topk_ids=topk_ids, topk_logp_inf=topk_logp_inf, logp_at=logp_at)
    same_shape(token_ids=token_ids, advantages=advantages, mask=mask)
    moving = varied(group_ids, advantages, mask != 0)
    groups, place = torch.unique(group_ids, return_inverse=True)
    states, residuals = sketch.double().split(SIZE, -1)
    ids = topk_ids.long()
    c, s = centre(ids, topk_logp_inf, logp_at)
    p = _placed(token_ids[..., None], torch.ones_like(s)[..., None]) - residuals
    drift = _placed(ids.clamp_min(0), c) - s[..., None] * p
    signs = torch.sign(states @ _projection(step).to(states))
    gain = advantages.double().where(moving, 0.0)[..., None]
    parts = []
    for each in (drift, residuals - drift):
        kept = torch.where(moving[..., None], each, 0.0) * gain
        answers = (torch.where(moving[..., None], signs, 0.0).transpose(1, 2) @ kept).flatten(1)
        found = torch.zeros(len(groups), SIGNS * SIZE, dtype=torch.float64, device=kept.device)
        found.index_add_(0, place, answers)
        parts += [found.sum(0), found.square().sum()[None]]
    used = torch.bincount(place, moving.any(-1).double(), minlength=len(groups)) > 0
    return torch.cat([*parts, used.sum().double()[None]])


def policy_drift(statistics: Tensor) -> tuple[float, float]:
    """Squared lengths of the drift and of the centred gradient, from `policy_drift_accumulate` of a
    whole batch; (0, 0) where fewer than two groups have advantages. Noise may make either negative:
    the drift is the root of the ratio of sums over some eight batches. Waits for the device."""
    both, count = statistics[:-1].view(2, -1), statistics[-1]
    if count <= 1 or not bool(torch.isfinite(both).all()):
        return 0.0, 0.0
    drift, gradient = unbiased_square(both[:, :-1], both[:, -1], count).tolist()
    return drift, gradient


def _placed(ids: Tensor, values: Tensor) -> Tensor:
    """[..., 16]: the sketch of values [..., k] at tokens [..., k]."""
    place, sign = places_of(ids)
    out = values.new_zeros(*values.shape[:-1], SIZE)
    return out.scatter_add(-1, place, values * sign.to(values))


def _projection(step: int) -> Tensor:
    """[16, 16] float64, another in every step: signs of its products stand for a state."""
    generator = torch.Generator().manual_seed(derive_seed(0, "drift", step))
    return torch.randn(SIZE, SIGNS, generator=generator, dtype=torch.float64)


class DriftEstimate:
    """The estimate of one stream of steps: sums that decay over some eight, kept in checkpoints."""

    def __init__(self) -> None:
        self._squares = (0.0, 0.0)  # of the drift, and of the centred gradient

    def follow(
        self, step: StepTensors, on: Tensor, reduce: SumReduce | None = None
    ) -> dict[str, float]:
        """Add a step, and return "drift", "tv" and "tv_bound"; {} for one without the top k of both
        sides. "drift" is left out until a gradient is seen. Collective."""
        at = (step.topk_ids_inf, step.topk_logp_inf, step.ref_logp_at_inf_ids)
        if any(tensor is None for tensor in (*at, step.sketch, step.token_ids)):
            return {}
        least, most = policy_distance(*at)  # type: ignore[arg-type]
        summed, bound, tokens = total([least.where(on, 0.0), most.where(on, 0.0), on], reduce)
        found = {"tv": summed / max(tokens, 1.0), "tv_bound": bound / max(tokens, 1.0)}
        statistics = policy_drift_accumulate(
            *at,  # type: ignore[arg-type]
            token_ids=step.token_ids,  # type: ignore[arg-type]
            sketch=step.sketch,  # type: ignore[arg-type]
            advantages=step.advantages,
            mask=on,
            group_ids=step.group_ids,
            step=step.step,
        )
        now = policy_drift(statistics if reduce is None else reduce(statistics))
        if any(now):
            drift, gradient = (DECAY * kept + own for kept, own in zip(self._squares, now))
            self._squares = drift, gradient
        drift, gradient = self._squares
        return found | ({"drift": (max(drift, 0.0) / gradient) ** 0.5} if gradient > 0 else {})

    def state(self) -> dict[str, Any]:
        """All that later steps depend on, as JSON holds it."""
        return {"squares": list(self._squares)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        drift, gradient = state["squares"]
        self._squares = float(drift), float(gradient)
