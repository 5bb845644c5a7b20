"""Targets of a critic, and advantages from its values: GAE(lambda), off policy V-trace.

A state is what precedes a sampled token, or a turn (`algorithm.credit`). An episode has K of them,
with rewards r_t and values V_t, t = 1..K, and r the ratio p_ref/p_inf of what was sampled there.
With discount gamma

    delta_t = r_t + gamma V_{t+1} - V_t
    v_t = V_t + rho_t delta_t + gamma c_t (v_{t+1} - V_{t+1})
    A_t = delta_t + gamma lambda (v_{t+1} - V_{t+1})
    rho_t = min(rho_cap, r),  c_t = lambda min(c_cap, r)

(IMPALA, arXiv 1802.01561, section 4.1, with remark 2's lambda.) v_t is what the critic learns. A_t
does not contain its action's ratio, since the corrections of the run weigh by it; lambda = 1 is
IMPALA's `r + gamma v_{t+1} - V_t`. With p_ref = p_inf and caps of at least 1, A_t is GAE(gamma,
lambda) (arXiv 1506.02438, eq. 16) and v_t = V_t + A_t.

With caps that do not bind and lambda = 1, v_t and A_t + V_t are unbiased for the value and the
action value under p_ref, whatever V is. A cap of rho leads V to the policy between p_inf and p_ref
that IMPALA describes; lambda below 1 and the cap of c leave V's error in A_t.

No torch at import.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlcore.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from rlcore.objectives.specs import ValueSpec


@dataclass(frozen=True, slots=True)
class States:
    """The states of some episodes, in order.

    Example, an episode of two turns and three tokens, by turn: States(tensor([[0, 0, 1]]),
    tensor([[True, False, True]]), tensor([2]), 3)
    """

    of_token: Tensor  # [B, T] int64: the state that sampled each token; 0 where there is none
    first: Tensor  # [B, T] bool: tokens that are the first after their state
    count: Tensor  # [B] int64: at most K
    width: int  # K

    @classmethod
    def by_token(cls, mask: Tensor) -> States:
        """One state before each token of a mask [B, T] bool, tokens at the left."""
        columns = torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)
        return cls(torch.where(mask, columns, 0), mask, mask.sum(dim=1), mask.shape[1])

    @classmethod
    def by_turn(cls, of_turn: Tensor, mask: Tensor) -> States:
        """One state before each turn that has tokens. of_turn [B, T] int64: of each token."""
        before = torch.cat([of_turn.new_full((len(of_turn), 1), -1), of_turn[:, :-1]], dim=1)
        first = mask & (of_turn != before)
        numbers = (first.cumsum(dim=1) - 1).clamp(min=0)
        return cls(torch.where(mask, numbers, 0), first, first.sum(dim=1), mask.shape[1])

    @property
    def present(self) -> Tensor:
        """[B, K] bool: an episode has that many states."""
        return torch.arange(self.width, device=self.count.device) < self.count[:, None]

    def sums(self, values: Tensor) -> Tensor:
        """[B, K] float64: sums over the tokens of each state; values [B, T], 0 where no token."""
        out = torch.zeros(len(values), self.width, dtype=torch.float64, device=values.device)
        return out.scatter_add(1, self.of_token, values.double())

    def firsts(self, values: Tensor) -> Tensor:
        """[B, K] float64: of `values` [B, T], each state's first token's."""
        return self.sums(torch.where(self.first, values.double(), 0.0))

    def spread(self, values: Tensor, mask: Tensor) -> Tensor:
        """[B, T] float32: values [B, K] at each state's tokens, 0 elsewhere."""
        return values.gather(1, self.of_token).float() * mask


@dataclass(frozen=True, slots=True)
class Estimates:
    """Targets and advantages of some states, [B, K] each, float64. Example: Estimates(v, a, on)"""

    targets: Tensor  # v_t
    advantages: Tensor  # A_t; 0 where not `known`
    known: Tensor  # bool: the state has a target


def estimates(
    rewards: Tensor,
    values: Tensor,
    log_ratio: Tensor,
    count: Tensor,
    cut: Tensor,
    spec: ValueSpec,
) -> Estimates:
    """Targets and advantages of the K states of each episode.

    rewards, values [B, K] float64, 0 behind an episode's last state. log_ratio [B, K]: log of
    p_ref/p_inf of what was sampled after each state, 0 on policy, -inf for what p_ref cannot
    sample. count [B] int64: states. cut [B] bool: the episode did not end after its last state,
    whose value then stands for all later rewards, and which has no target itself.
    """
    width = rewards.shape[1]
    numbers = torch.arange(width, device=rewards.device)
    known = numbers < (count - cut.long())[:, None]
    ratio = log_ratio.double().exp()
    rho, c = ratio.clamp(max=spec.rho_cap), spec.lam * ratio.clamp(max=spec.c_cap)
    following = torch.cat([values[:, 1:], values.new_zeros(len(values), 1)], dim=1)
    delta = torch.where(known, rewards + spec.discount * following - values, 0.0)
    advantages = torch.zeros_like(values)
    error = values.new_zeros(len(values))  # v_{t+1} - V_{t+1}
    targets = values.clone()
    for t in range(width - 1, -1, -1):
        advantages[:, t] = delta[:, t] + spec.discount * spec.lam * error
        error = rho[:, t] * delta[:, t] + spec.discount * c[:, t] * error
        error = torch.where(known[:, t], error, 0.0)
        targets[:, t] += error
    return Estimates(targets, torch.where(known, advantages, 0.0), known)


def value_loss(
    values: Tensor, old: Tensor, targets: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Half the squared error of each value, any shape, and which of them the clip has cut off.

    With a clip the larger of two errors counts (PPO's value clipping). One is the value's, the
    other the error of the value kept within `clip` of `old`, its value as the phase began. `values`
    carries the gradient.
    """
    error = (values - targets).square()
    if clip is None:
        return 0.5 * error, torch.zeros_like(error, dtype=torch.bool)
    near = (old + (values - old).clamp(-clip, clip) - targets).square()
    return 0.5 * torch.maximum(error, near), near > error
