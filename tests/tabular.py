"""A policy that is a table of logits, behind the learner's protocols, in float64. It is small
enough to enumerate every sequence, so that an expected gradient is a sum and not an estimate."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from math import log
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlcore.corrections.dvp import OUTSIDE_LOGP
from rlcore.learner.lm_head import HeadSpec, KlTarget, TeacherTarget, TopkTarget, to_teacher
from rlcore.learner.packing import MicroBatch
from rlcore.learner.protocols import TrainEngine
from rlcore.learner.state_files import Part, Schedule, Source
from rlcore.objectives.kl import entropy, full_kl
from rlcore.types import TokenScores


class TabularPolicy(nn.Module):
    """Replaces `learner.policy.Policy`: the next token's logits depend on the last token alone.

    `logits` [S, V] float64: row i follows input token i. Ids of V and above are observations only.
    """

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits.detach().double().clone())
        self.head = nn.Module()
        self.head.weight = torch.eye(logits.shape[1], dtype=torch.float64)

    def hidden(self, mb: MicroBatch) -> Tensor:
        """[N, V]: the logits of each sampled token, which stand for its hidden state."""
        logits = self.logits[mb.input_ids.flatten()[mb.predict]]
        return logits if mb.sharper is None else logits * mb.sharper[:, None]

    def forward(
        self, mb: MicroBatch, ids: Tensor | None, spec: HeadSpec, base: KlTarget | None = None
    ) -> tuple[Any, ...]:
        """KL to `base` or None, then the fields of TokenScores, as `Policy.forward`."""
        hidden = self.hidden(mb)
        kl = None if base is None else _full_kl(hidden, base, spec)
        z = hidden / spec.temperature
        safe = _safe(z.detach(), spec, ids)
        logp = _log_probs(z, safe)
        top = logp.detach().topk(min(spec.topk, z.shape[1]), -1) if spec.topk else None
        inside = coverage = at = None
        if spec.safe_set_rho is not None or spec.kept_sets:
            inside = safe.gather(1, mb.targets[:, None])[:, 0]
            coverage = z.detach().softmax(-1).where(safe, 0.0).sum(-1)
        if ids is not None:
            at = logp if spec.ids_grad else logp.detach()
            at = at.gather(1, ids.clamp(min=0)).masked_fill(ids < 0, 0.0)
        h = entropy(logp.masked_fill(~safe, -torch.inf))
        return (
            kl,
            logp.gather(1, mb.targets[:, None])[:, 0],
            h if spec.entropy_grad else h.detach(),
            None if top is None else top.indices,
            None if top is None else top.values,
            at,
            inside,
            coverage,
        )


class StepEngine(TrainEngine):
    """A training engine for tests of a step; methods that such tests do not need raise."""

    def as_base(self, mb: MicroBatch) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("as_base")

    def grad_norm(self) -> float:
        raise NotImplementedError("grad_norm")

    def step(self, scale: float = 1.0) -> float:
        raise NotImplementedError("step")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        raise NotImplementedError("shapes")

    def weights(
        self,
        only: Collection[str] | None = None,
        *,
        on_device: bool = False,
        wanted: bool = True,
    ) -> Iterator[tuple[str, Tensor]]:
        raise NotImplementedError("weights")

    def trained_weights(self, *, wanted: bool = True) -> Iterator[tuple[str, Tensor]]:
        raise NotImplementedError("trained_weights")

    def held_weights(self) -> dict[str, Part]:
        raise NotImplementedError("held_weights")

    def load_weights(self, sources: Mapping[str, Source]) -> None:
        raise NotImplementedError("load_weights")

    def save(self, folder: Path, run: Schedule | None = None) -> None:
        raise NotImplementedError("save")

    def load(self, folder: Path) -> None:
        raise NotImplementedError("load")


class TabularEngine(StepEngine):
    """One rank's table: forward and backward passes, no optimizer. `move` stands for its step."""

    device = torch.device("cpu")

    def __init__(self, logits: Tensor) -> None:
        self.policy: Any = TabularPolicy(logits)

    def forward(self, mb: MicroBatch, ids: Tensor | None, spec: HeadSpec) -> TokenScores:
        return self.forward_with_kl(mb, ids, spec, None)[0]

    def forward_with_kl(
        self, mb: MicroBatch, ids: Tensor | None, spec: HeadSpec, base: KlTarget | None
    ) -> tuple[TokenScores, Tensor | None]:
        kl, *scores = self.policy(mb, ids, spec, base)
        return TokenScores(*scores), kl

    def backward(self, loss: Tensor, *, last: bool) -> None:
        loss.backward()

    @torch.no_grad()
    def move(self, logits: Tensor) -> None:
        """Replace the weights, as an optimizer step does."""
        self.policy.logits.copy_(logits)

    def gradient(self) -> Tensor:
        """[S, V] float64, accumulated by this rank."""
        grad = self.policy.logits.grad
        return torch.zeros_like(self.policy.logits) if grad is None else grad


def _safe(z: Tensor, spec: HeadSpec, ids: Tensor | None) -> Tensor:
    """[N, V] bool: the tokens that probabilities are conditioned on."""
    safe = torch.ones_like(z, dtype=torch.bool)
    if spec.safe_set_rho is not None:
        safe = z >= z.amax(-1, keepdim=True) + log(spec.safe_set_rho)
    if spec.kept_sets and ids is not None:
        columns = torch.arange(z.shape[1])
        listed = (ids[..., None] == columns).any(1)
        safe = safe & (listed | ~listed.any(-1, keepdim=True))
    return safe


def _log_probs(z: Tensor, safe: Tensor) -> Tensor:
    """Log-probs [N, V] over the safe tokens, OUTSIDE_LOGP without a gradient for others."""
    if safe.all():
        return z.log_softmax(-1)
    constrained = z.masked_fill(~safe, -torch.inf).log_softmax(-1)
    return torch.where(safe, constrained, OUTSIDE_LOGP)


def _full_kl(hidden: Tensor, base: KlTarget, spec: HeadSpec) -> Tensor:
    """[N]: over the whole vocabulary, also under a safe set; [N, 2] of a teacher."""
    if isinstance(base, TopkTarget):
        raise NotImplementedError("a tabular policy has no KL to stored top log-probs")
    if isinstance(base, TeacherTarget):
        new = (hidden / spec.temperature).log_softmax(-1)
        if isinstance(base.policy, TopkTarget):
            return to_teacher(new, base.policy, base.spec)
        states, head = base.policy
        whole = (states @ head.T / spec.temperature).log_softmax(-1)
        return to_teacher(new, whole, base.spec)
    new, other = hidden / spec.temperature, base[0] @ base[1].T / spec.temperature
    return full_kl(new.log_softmax(-1), other.log_softmax(-1))
