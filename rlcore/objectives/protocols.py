"""Base classes of advantages and policy losses, and the tensors that they take. No torch at import,
so that the configuration can read class attributes.

One class, and one line in `objectives/specs.py`, make a new one:

    class Reinforce(PolicyLoss):
        carries_ratio = False

        def __call__(self, log_ratio, advantages, sampled):
            return log_ratio.exp() * advantages, {}
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rlcore.interfaces import Reduce
from rlcore.lazy import torch
from rlcore.spec import Spec

if TYPE_CHECKING:
    from torch import Tensor

WIDE = 1e9  # a threshold that never binds


# What a method declares of its expected gradient: the ways in which it departs from its reference.
#
# The reference of a token-level method is the gradient with prefix and continuation of a token as
# the actor draws them, and the token itself from the policy that is differentiated. The reference
# of a sequence-level method has the whole sequence from the policy that its weights lead to.
# Advantages are fixed, and denominators count the batch before any rejection. A method without a
# declared bias is exact; the tests enumerate every combination of methods and hold each to its
# declarations (docs/corrections-grid.md). No torch.


@dataclass(frozen=True, slots=True)
class Bias:
    """One named departure, and when it is gone; the method's docstring uses the name.

    Example: Bias("truncation", {"cap": WIDE})
    """

    name: str
    #: settings of the method under which it is gone; empty: none
    opened: Mapping[str, Any] = field(default_factory=dict)
    #: what else it needs to be gone: nothing; the actor's policy equal to the one that weights lead
    #: to; or sequences of a single token
    where: Literal["", "matched", "one token"] = ""


#: of a run whose list of corrections weighs nothing (`corrections/pipeline.py: Pipeline`)
UNCORRECTED = Bias("no correction", where="matched")


# The rewards of a step, and the statistics that advantages are made of.
#
# Rewards [B] and group_ids [B] int64 are of one rank. Groups are whole on a rank, so group
# statistics need no reduction; batch statistics do. All are float64, and a group of one, a group of
# equal rewards or a batch of equal rewards is centred to exactly 0, never NaN.


ROUNDING = 1e-12  # of the largest: a smaller difference is that of a sum's rounding


def snapped(values: Tensor, largest: Tensor | float) -> Tensor:
    """`values` with 0 for those below 1e-12 of `largest`: zero up to rounding has no sign."""
    return values.masked_fill(values.abs() <= ROUNDING * largest, 0.0)


class Rewards:
    """One rank's share of a step, one reward per episode.

    The `batch_*` statistics are of the global batch: every rank must read the same ones in the same
    order."""

    def __init__(
        self,
        rewards: Tensor,
        group_ids: Tensor,
        reduce: Reduce,
        tokens: Tensor | None = None,
    ) -> None:
        """`tokens` [B]: sampled tokens of each episode, where an advantage asks for them."""
        self.values = rewards.detach().double()
        self.group_ids = group_ids
        self._tokens = tokens
        self._reduce = reduce  # group statistics never use it: ranks may differ in their groups

    @cached_property
    def _groups(self) -> tuple[int, Tensor]:
        """Number of groups, and the group [B] of each episode."""
        unique, index = torch.unique(self.group_ids, return_inverse=True)
        return len(unique), index

    def group_sum(self, values: Tensor) -> Tensor:
        """[B] float64: the sum of `values` [B] over each episode's group."""
        count, index = self._groups
        sums = torch.zeros(count, dtype=torch.float64, device=values.device)
        return sums.index_add(0, index, values)[index]

    @cached_property
    def group_size(self) -> Tensor:
        """[B] float64: episodes in each episode's group."""
        return self.group_sum(torch.ones_like(self.values))

    @cached_property
    def group_centred(self) -> Tensor:
        """[B]: rewards less the mean of their group."""
        count, index = self._groups
        high = torch.full((count,), -torch.inf, dtype=torch.float64, device=self.values.device)
        low = -high
        high = high.scatter_reduce(0, index, self.values, "amax")
        low = low.scatter_reduce(0, index, self.values, "amin")
        # compared, not subtracted: the rounded mean of equal rewards need not be that reward
        flat = (high == low)[index]
        mean = self.group_sum(self.values) / self.group_size
        largest = torch.maximum(high.abs(), low.abs())[index]
        return torch.where(flat, 0.0, snapped(self.values - mean, largest))

    @cached_property
    def group_std(self) -> Tensor:
        """[B]: sample standard deviation of each episode's group, 0 in a group of one."""
        squares = self.group_sum(self.group_centred**2)
        return (squares / (self.group_size - 1).clamp(min=1)).sqrt()

    @property
    def tokens(self) -> Tensor:
        """[B] float64: sampled tokens of each episode. Raises ValueError if they were not given."""
        if self._tokens is None:
            raise ValueError("the numbers of sampled tokens were not given")
        return self._tokens.double()

    def centred_in_batch(self, values: Tensor, weight: Tensor) -> tuple[Tensor, float]:
        """`values` [B] less their global mean, each counted `weight` [B] times, and the sum of all
        weights.

        Exactly 0 where all counted values of the global batch are equal.
        """
        count, summed = self._reduce(torch.stack([weight.sum(), (weight * values).sum()])).tolist()
        counted = values[weight > 0]
        # an empty share takes part with the neutral element: every rank makes the same reductions
        lowest = counted.min().neg() if len(counted) else values.new_tensor(-torch.inf)
        highest = counted.max() if len(counted) else values.new_tensor(-torch.inf)
        extremes = self._reduce.max(torch.stack([highest, lowest])).tolist()
        if extremes[0] == -extremes[1]:
            return torch.zeros_like(values), count
        largest = max(map(abs, extremes))
        return snapped(values - summed / max(count, 1.0), largest), count

    def batch_squares(self, centred: Tensor, weight: Tensor) -> float:
        """Sum of the squares of `centred` [B] over the global batch, each `weight` [B] times."""
        return float(self._reduce((weight * centred**2).sum()[None]).item())

    def batch_sum(self, values: Tensor) -> float:
        """Sum of `values` [B] over the global batch."""
        return float(self._reduce(values.double().sum()[None]).item())

    @cached_property
    def _batch(self) -> tuple[Tensor, float]:
        """Rewards less the global mean, and the number of episodes of the global batch."""
        return self.centred_in_batch(self.values, torch.ones_like(self.values))

    @property
    def batch_centred(self) -> Tensor:
        """[B]: rewards less the mean of the global batch."""
        return self._batch[0]

    @cached_property
    def batch_std(self) -> float:
        """Sample standard deviation over the global batch's episodes."""
        centred, count = self._batch
        squares = self.batch_squares(centred, torch.ones_like(centred))
        return float((squares / max(count - 1.0, 1.0)) ** 0.5)


class Advantage(ABC):
    """Computes one number per episode from the rewards of a step. Built as Class(spec).

    With `turn_share` it is also called with turns instead of episodes. It gets the rewards to go of
    turns, where a group is the turns of equal number in a group of episodes.
    """

    #: whether it compares the episodes of a group, so that a group of one gives no signal
    compares_group: ClassVar[bool] = False
    #: whether it is of a critic's values, by token: it is then not called with rewards
    needs_values: ClassVar[bool] = False
    #: settings of `ObjectiveSpec` that not every advantage reads, and this one does
    own_settings: ClassVar[tuple[str, ...]] = ()
    #: how its mean over samples departs from the reward less the expected reward
    biases: ClassVar[tuple[Bias, ...]] = ()

    def __init__(self, spec: Spec) -> None:
        """spec: an `ObjectiveSpec`, which an advantage without settings ignores."""

    @abstractmethod
    def __call__(self, rewards: Rewards) -> Tensor:
        """[B] advantages of this rank's episodes. Every rank makes the same reductions."""

    def of_tokens(self, rewards: Rewards, penalty: Tensor, mask: Tensor) -> Tensor:
        """Optional. [B, T] float64 advantages where each token's reward to go is its episode's
        reward less `penalty` [B, T] float64 (a KL in the reward). By default the episode's
        advantage less the penalty. mask [B, T] bool: the tokens."""
        return (self(rewards).double()[:, None] - penalty) * mask


class PolicyLoss(ABC):
    """The objective of each token, before weights and aggregation. Built as Class(spec)."""

    #: whether the objective carries p_new/p_ref. One that does not is anchored at SG(p_new), and
    #: the corrections' weights must lead to p_new instead of p_ref.
    carries_ratio: ClassVar[bool] = True
    #: whether it has PPO's clip per token, which a correction may switch off
    inner_clip: ClassVar[bool] = False
    #: whether it clips p_new/p_ref, per token or sequence: while that is 1, nothing is clipped
    clips: ClassVar[bool] = False
    #: whether a token's objective is a function of its own ratio and advantage alone
    token_wise: ClassVar[bool] = False
    #: settings of `ObjectiveSpec` that not every loss reads, and this one does: set under another
    #: loss they are refused
    own_settings: ClassVar[tuple[str, ...]] = ()
    #: how its expected gradient departs from that of the objective with the whole ratio
    biases: ClassVar[tuple[Bias, ...]] = ()
    #: names of the per-token indicators that it returns; an instance may have more
    indicators: tuple[str, ...] = ()

    def __init__(self, spec: Spec) -> None:
        """spec: an `ObjectiveSpec`, which a loss without settings ignores."""

    @abstractmethod
    def __call__(
        self, log_ratio: Tensor, advantages: Tensor, sampled: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Objective [B, T], to be maximised, and indicators [B, T] by name.

        log_ratio [B, T]: log of p_new/p_ref, or of p_new/SG(p_new) where the ratio is not carried.
        It has the gradient, and is finite; 0 outside `sampled` [B, T] bool (every sampled token,
        kept or not). advantages [B, T], detached, of every sampled token, too; what is returned
        where a correction rejected counts nowhere.
        """


@dataclass(frozen=True, slots=True)
class LossTensors:
    """Inputs of a policy loss for some whole episodes, [B, T] each, float32 or float64.

    Example: LossTensors(logp_new, logp_ref, advantages, torch.ones(2, 3), mask, mask)
    """

    logp_new: Tensor  # carries the gradient; everything else is detached
    logp_ref: Tensor
    advantages: Tensor
    weight: Tensor  # of the corrections
    mask: Tensor  # tokens that stay in the loss, bool or 0/1
    # all sampled tokens, kept or rejected, less those outside the safe set of p_new or, where the
    # loss carries p_new/p_ref, of p_ref
    sampled: Tensor
    score: Tensor | None = None  # of the corrections: coefficient of log p_new in the loss
    widen: Tensor | None = None  # of the corrections: factor of the clip's upper bound where A > 0
