"""RAPID: sequence importance weights, in the gradient and in the group's baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from rlcore.corrections.numerics import (
    at_least_one,
    log_difference,
    ratio,
    require,
    same_shape,
    total,
)
from rlcore.corrections.specs import CorrectionSpec, Statistics
from rlcore.interfaces import Corrected, Correction, Needs, Reduce
from rlcore.lazy import torch
from rlcore.objectives.protocols import WIDE, Bias
from rlcore.spec import setting
from rlcore.types import StepTensors

if TYPE_CHECKING:
    from torch import Tensor


class RapidSpec(CorrectionSpec):
    """RAPID's sequence weights and weighted baseline (papers/rapid.txt).

    Biased by the truncation at `eta`; with advantages taken as random, also by each sample's own
    term in its baseline, which `leave_one_out` removes."""

    method: ClassVar[str] = "rlcore.corrections.rapid:Rapid"
    statistics: ClassVar[Statistics] = {
        "weight_mean": ("1", "mean weight"),
        "log_weight_mean": ("nats", "mean log weight of a sequence"),
        "clipped_share": ("share", "sequences whose weight is clipped"),
    }
    weighs: ClassVar[bool] = True
    leads_to_new: ClassVar[bool] = True
    replaces_advantage: ClassVar[str] = "group_mean"

    eta: float = setting(2.0, "cap of the sequence weight", ge=1)
    leave_one_out: bool = setting(False, "exclude a sample from its baseline")

    @property
    def corrects(self) -> Literal["token", "sequence"]:
        return "sequence"

    @property
    def biases(self) -> tuple[Bias, ...]:
        return (Bias("truncation", {"eta": WIDE}),)


_RAPID = RapidSpec()


# Sequence-level formulas over groups of samples of one prompt: RAPID's advantage, and keeping the
# best.
#
# Group sums are taken on the sorted ids, in buffers as long as the batch: how many groups there are
# is never asked of the device.


def sequence_log_ratio(logp_new: Tensor, logp_mu: Tensor, mask: Tensor) -> Tensor:
    """`sum_t (log p_new - log mu)` [B] float64 over the tokens that count; 0 for an empty
    sequence."""
    difference, _ = log_difference(logp_new, logp_mu, mask)
    return difference.double().clamp(-1e6, 1e6).sum(-1)


def rapid_advantages(
    logp_new: Tensor,
    logp_mu: Tensor,
    mask: Tensor,
    rewards: Tensor,
    group_ids: Tensor,
    *,
    eta: float = _RAPID.eta,
    leave_one_out: bool = _RAPID.leave_one_out,
) -> tuple[Tensor, Tensor]:
    """RAPID's importance-weighted group advantage and sequence weight (RAPID eq. 3 to 5).

    `W = min(exp(sum_t log p_new - log mu), eta)`; `A_n = R_n - (1/|K|) sum_{n' in K} W_n' R_n'`.
    With `leave_one_out` n leaves its own sum and the divisor stays |K|: the gradient estimate `W_n
    A_n grad log p_new` is then unbiased where nothing is clipped. Eq. 5 of the paper prints
    `max{W, eta}`, but its text describes a clip from above, which is what is built.

    Args: log-probs [B, T], mask [B, T], rewards [B], group_ids [B]; groups are whole on the
    caller's rank. Returns (advantage [B] float32, weight [B] float32). A group of one on policy has
    advantage 0 (its reward with `leave_one_out`, having no baseline). The sequence weight of an
    empty sequence is 1.
    """
    at_least_one("eta", eta)
    same_shape(logp_new=logp_new, logp_mu=logp_mu, mask=mask)
    same_shape(rewards=rewards, group_ids=group_ids)
    require(
        len(rewards) == len(logp_new),
        f"rewards has {len(rewards)} entries, and logp_new {len(logp_new)} rows: one a sequence.",
    )
    weight = ratio(sequence_log_ratio(logp_new, logp_mu, mask)).clamp(max=eta)
    rewards = rewards.detach().double()
    index = _group_index(group_ids)
    weighted = weight * rewards
    baseline = _group_sum(weighted, index)
    size = _group_sum(torch.ones_like(rewards), index)
    if leave_one_out:
        # the divisor stays the group's size, as printed
        baseline = baseline - weighted
    dtype = torch.float64 if logp_new.dtype == torch.float64 else torch.float32
    return (rewards - baseline / size).to(dtype), weight.to(dtype)


def best_of_group(rewards: Tensor, group_ids: Tensor, *, keep: int) -> Tensor:
    """Mark the `keep` samples of highest reward in each group (DistillSparse 4.3).

    Args: rewards [B], group_ids [B]. Returns keep [B] bool. Ties go to the earlier sample; a NaN
    reward comes last; a group of `keep` or fewer stays whole.
    """
    require(keep >= 1, f"keep={keep} is not accepted: at least one sample of a group must stay.")
    same_shape(rewards=rewards, group_ids=group_ids)
    values = torch.nan_to_num(
        rewards.detach().double(), nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf
    )
    by_reward = values.argsort(descending=True, stable=True)
    order = by_reward[group_ids[by_reward].argsort(stable=True)]
    position = torch.arange(len(values), device=values.device)
    starts = torch.where(_begins(group_ids[order]), position, 0)
    rank = position - starts.cummax(0).values if len(values) else position
    kept = torch.zeros(len(values), dtype=torch.bool, device=values.device)
    return kept.scatter(0, order, rank < keep)


def _begins(ordered: Tensor) -> Tensor:
    """[B] bool: where a new group begins in sorted ids."""
    begins = torch.ones(ordered.shape, dtype=torch.bool, device=ordered.device)
    begins[1:] = ordered[1:] != ordered[:-1]
    return begins


def _group_index(group_ids: Tensor) -> Tensor:
    """[B] int64: a number below B for each sequence's group."""
    order = group_ids.argsort(stable=True)
    numbers = _begins(group_ids[order]).long().cumsum(0) - 1
    return torch.zeros_like(numbers).scatter(0, order, numbers)


def _group_sum(values: Tensor, index: Tensor) -> Tensor:
    """[B] float64: the sum over each sequence's group."""
    return torch.zeros_like(values).index_add(0, index, values)[index]


class Rapid(Correction):
    """Gradient `SG(min(W, eta)) A grad log p_new`, `W = prod_t p_new/p_inf`, A weighted the same
    way (RAPID eq. 3 to 5).

    Replaces the algorithm's advantage, and needs a loss that carries no ratio. RAPID's mean over
    samples of the sum over tokens is `seq-mean-token-sum-norm`, up to its constant divisor.
    """

    needs = Needs(new=True)

    def __init__(self, spec: RapidSpec, run_seed: int) -> None:
        self.spec = spec

    # called by both hooks, on the same p_new: it costs nothing beside a forward pass
    def _formula(self, step: StepTensors) -> tuple[torch.Tensor, torch.Tensor]:
        # advantages come before the pipeline has taken unusable tokens off the mask
        mask = step.mask & torch.isfinite(step.logp_inf)
        return rapid_advantages(
            step.logp_new,
            step.logp_inf,
            mask,
            step.rewards,
            step.group_ids,
            eta=self.spec.eta,
            leave_one_out=self.spec.leave_one_out,
        )

    def advantages(self, step: StepTensors, reduce: Reduce) -> torch.Tensor | None:
        return self._formula(step)[0][:, None] * step.mask

    def correct(self, step: StepTensors, current: Corrected, reduce: Reduce) -> Corrected:
        weight = self._formula(step)[1]
        present = step.mask.any(-1)
        log_ratio = sequence_log_ratio(step.logp_new, step.logp_inf, step.mask)
        logs = torch.where(present, weight.log(), 0.0)
        clipped = (log_ratio.exp() > self.spec.eta) & present
        over, log_sum, weight_sum, count = total([clipped, logs, weight * present, present], reduce)
        count = max(count, 1.0)
        metrics = {
            "clipped_share": over / count,
            "log_weight_mean": log_sum / count,
            "weight_mean": weight_sum / count,
        }
        return Corrected(current.weight * weight[:, None], current.mask, metrics)
