"""Base classes of advantages and policy losses. No torch at import, so that the configuration can
read their traits.

One class and one line in `registry.py` make a new one:

    class Reinforce(PolicyLoss):
        carries_ratio = False

        def __call__(self, log_ratio, advantages, sampled):
            return log_ratio.exp() * advantages, {}
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from rlcore.objectives.advantages import Rewards
    from rlcore.objectives.specs import ObjectiveSpec

WIDE = 1e9  # a threshold that never binds


# What a method declares of its expected gradient: the ways in which it departs from its reference.
#
# The reference of a token-level method: prefix and continuation of a token as the actor draws them,
# the token itself from the policy that is differentiated. Of a sequence-level method: all of the
# sequence from the policy that its weights lead to. Advantages are fixed, and denominators count
# the batch before any rejection. A method without a declared bias is exact; the tests enumerate
# every combination of methods and hold each to its declarations (docs/corrections-grid.md). No
# torch.


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


class Advantage(ABC):
    """Computes one number per episode from the rewards of a step. Built as Class(spec).

    With `turn_share` it is besides called with turns in the place of episodes: their rewards to go,
    and as group the turns of the same number of a group.
    """

    #: whether it compares the episodes of a group, so that a group of one gives no signal
    compares_group: ClassVar[bool] = False
    #: whether it is of a critic's values, by token: it is then not called with rewards
    needs_values: ClassVar[bool] = False
    #: settings of `ObjectiveSpec` that not every advantage reads, and this one does
    own_settings: ClassVar[tuple[str, ...]] = ()
    #: how its mean over samples departs from the reward less the expected reward
    biases: ClassVar[tuple[Bias, ...]] = ()

    def __init__(self, spec: ObjectiveSpec) -> None:
        """An advantage without settings ignores the specification."""

    @abstractmethod
    def __call__(self, rewards: Rewards) -> Tensor:
        """[B] advantages of this rank's episodes. Every rank makes the same reductions."""

    def of_tokens(self, rewards: Rewards, penalty: Tensor, mask: Tensor) -> Tensor:
        """Optional. [B, T] float64 advantages where each token's reward to go is its episode's
        reward less `penalty` [B, T] float64 (a KL in the reward): by default the episode's
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
    #: settings of `ObjectiveSpec` that not every loss reads, and this one does: set under another
    #: loss they are refused
    own_settings: ClassVar[tuple[str, ...]] = ()
    #: how its expected gradient departs from that of the objective with the whole ratio
    biases: ClassVar[tuple[Bias, ...]] = ()
    #: names of the per-token indicators that it returns; an instance may have more
    indicators: tuple[str, ...] = ()

    def __init__(self, spec: ObjectiveSpec) -> None:
        """A loss without settings ignores the specification."""

    @abstractmethod
    def __call__(
        self, log_ratio: Tensor, advantages: Tensor, sampled: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Objective [B, T], to be maximised, and indicators [B, T] by name.

        log_ratio [B, T]: log of p_new/p_ref, or of p_new/SG(p_new) where the ratio is not carried,
        with the gradient, finite, 0 outside `sampled` [B, T] bool (every sampled token, kept or
        not). advantages [B, T], detached.
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
