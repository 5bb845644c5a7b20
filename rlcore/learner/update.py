"""The reinforcement-learning step of one rank: reference passes, corrections, the backward pass of every micro-batch.

Two ways lead to the same gradient. Where corrections need the whole batch first and it takes several micro-batches,
p_ref (and p_new) is computed by a pass of its own. Where one micro-batch is the whole share, or each sequence is
corrected by its own tokens, both come from the pass that is differentiated (p_ref only if the phase is one step).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from rlcore.corrections import Pipeline
from rlcore.corrections.reduction import ONE_RANK
from rlcore.interfaces import Corrected, Reduce
from rlcore.learner.batch import Scored, StepBatch, observed, rows_of
from rlcore.learner.deepspeed_engine import ZeroEngine
from rlcore.learner.head import HeadSpec
from rlcore.learner.loss import Objective, Sums
from rlcore.learner.packing import MicroBatch
from rlcore.learner.policy import FrozenPolicy
from rlcore.objectives.advantages import Advantage, over_tokens, sequence_advantages
from rlcore.objectives.aggregate import coefficients, counts
from rlcore.objectives.shaping import overlong_penalty
from rlcore.types import TokenScores

# Corrections that weigh a sequence by its own tokens and reject none: a micro-batch is all they need to see.
_SEQUENCE_WISE = frozenset({"tis", "mis", "icepop", "dvp"})


@dataclass(slots=True)
class Update:
    """Everything a step's gradient depends on, besides the batch."""

    engine: ZeroEngine
    frozen: FrozenPolicy | None  # the starting policy, when there is a KL term
    pipeline: Pipeline
    objective: Objective
    spec: HeadSpec  # of the differentiated pass
    topk: int  # own top entries of p_ref, for the mismatch metrics and for corrections; 0: none
    reduce: Reduce
    advantage: Advantage
    max_response_len: int
    overlong: tuple[int, float]  # DAPO's buffer in tokens (0: off) and penalty
    ref_pass: Literal["auto", "always"]
    keep_topk: bool = False  # p_ref at the actor's top k is wanted after the step too (distillation)

    def one_pass(self, phase: Sequence[StepBatch], *, first: bool) -> bool:
        """Whether p_ref may be taken from the pass that is differentiated."""
        if len(phase) > 1 or not first or self.ref_pass == "always":
            return False
        needs = self.pipeline.needs
        alone = not (needs.new or needs.batch_stats or self.keep_topk)
        alone = alone and all(c.name in _SEQUENCE_WISE for c in self.pipeline.corrections)
        return alone or _one_forward(phase[0])

    def prepare(self, phase: Sequence[StepBatch], *, first: bool) -> None:
        """Shape a phase's rewards; compute p_ref where it needs its own pass, and the frozen policy's log-probs.

        `first`: the phase holds its first step. The rest of a resumed phase does not: its p_ref is not p_new.
        """
        one_pass = self.one_pass(phase, first=first)
        for batch in phase:
            batch.sent.rewards = self._shaped_rewards(batch)
            if not one_pass:
                batch.ref = self._score(batch, self.engine, self.topk)
            if self.objective.needs_base_logp and self.frozen is not None:
                batch.base = self._score(batch, self.frozen, 0)

    def run(self, batch: StepBatch, step: int, *, first: bool) -> tuple[Sums, int, dict[str, float]]:
        """All backward passes of a step, `first` of its phase or not: (sums for the metrics, kept tokens, metrics)."""
        advantages = self.group_advantages(batch)
        if batch.ref is None and not _one_forward(batch):
            return self._one_pass(batch, step, advantages)
        needs = self.pipeline.needs
        ready = None  # the differentiated pass, made before the corrections because it is what they look at
        new = batch.ref
        if batch.ref is None or (needs.new and not first):
            topk = self.topk if batch.ref is None or needs.topk else 0
            if _one_forward(batch) and self.ref_pass == "auto":
                ready = self._forward(batch, batch.micro[0], topk)
                new = Scored.collect(batch.sent.mask.shape, [(batch.micro[0], ready[0])], batch.sent.mask.device)
            else:
                new = self._score(batch, self.engine, topk)
            batch.ref = batch.ref or new
        assert new is not None and batch.ref is not None
        tensors = observed(batch.sent, step, advantages, batch.ref, new)
        tensors.advantages = advantages = self.pipeline.advantages(tensors, self.reduce)
        corrected = self.pipeline.correct(tensors, self.reduce)
        coefs, kept = self._coefficients(corrected.mask)
        sums = Sums()
        for i, mb in enumerate(batch.micro):
            scores, kl = ready or self._forward(batch, mb, 0)
            mine = Corrected(corrected.weight[mb.sequences], corrected.mask[mb.sequences], {})
            logp_ref = None if first else batch.ref.logp[mb.sequences]
            self._backward(batch, i, scores, kl, logp_ref, advantages, mine, coefs, sums)
        return sums, kept, corrected.metrics

    def _one_pass(self, batch: StepBatch, step: int, advantages: Tensor) -> tuple[Sums, int, dict[str, float]]:
        usable = batch.sent.mask & torch.isfinite(batch.sent.logp_inf)
        coefs, kept = self._coefficients(usable)
        sums, parts = Sums(), []
        for i, mb in enumerate(batch.micro):
            scores, kl = self._forward(batch, mb, self.topk)
            alone = Scored.of(mb, scores, usable.shape[1])
            part = observed(rows_of(batch.sent, mb.sequences), step, advantages[mb.sequences], alone, alone)
            corrected = self.pipeline.correct(part, ONE_RANK, measure=False)
            self._backward(batch, i, scores, kl, None, advantages, corrected, coefs, sums)
            parts.append((mb, _detached(scores)))
        whole = Scored.collect(usable.shape, parts, usable.device)
        batch.ref = whole
        corrected = self.pipeline.correct(observed(batch.sent, step, advantages, whole, whole), self.reduce)
        if not torch.equal(corrected.mask, usable):
            raise RuntimeError("a correction rejected tokens without asking to see the whole batch first")
        return sums, kept, corrected.metrics

    def _forward(self, batch: StepBatch, mb: MicroBatch, topk: int) -> tuple[TokenScores, Tensor | None]:
        """The pass that is differentiated."""
        base = self.frozen.base(mb) if self.frozen is not None and self.objective.needs_full_kl else None
        return self.engine.forward_with_kl(mb, _actor_ids(batch, mb, topk), replace(self.spec, topk=topk), base)

    def _backward(
        self,
        batch: StepBatch,
        index: int,
        scores: TokenScores,
        kl: Tensor | None,
        logp_ref: Tensor | None,
        advantages: Tensor,
        corrected: Corrected,
        coefs: Tensor,
        sums: Sums,
    ) -> None:
        """Loss and backward of a micro-batch, logp_ref [b, T] and corrected its rows. None: p_ref is p_new detached."""
        mb, width = batch.micro[index], batch.sent.mask.shape[1]
        rows = mb.sequences
        if len(rows):
            logp_new = mb.dense(scores.logp, width)
            base = batch.base
            kl_mask = corrected.mask
            if base is not None and base.inside is not None and scores.inside is not None:
                # under a safe set, a token outside either set has a filler for one of the KL's two log-probs
                kl_mask = kl_mask & mb.dense(scores.inside, width) & base.inside[rows]
            loss, values = self.objective(
                logp_new,
                logp_new.detach() if logp_ref is None else logp_ref,
                advantages[rows],
                corrected,
                coefs[rows],
                mb.dense(scores.entropy, width),
                None if kl is None else mb.dense(kl, width),
                None if base is None else (base.logp[rows], kl_mask),
            )
            values["entropy"] = scores.entropy.detach().sum().double()
            values["nonfinite_logp"] = (~torch.isfinite(scores.logp)).sum().double()
            sums.add(values)
        else:
            # Nothing of this rank's, but the others' collectives want company. Every output that they differentiate
            # must be in this graph too: ZeRO-3 gathers once for each, else the ranks wait for each other for ever.
            outputs = [t for t in (scores.logp, scores.entropy, kl) if t is not None and t.requires_grad]
            loss = 0.0 * torch.stack([t.sum() for t in outputs]).sum()
        self.engine.backward(loss, last=index == len(batch.micro) - 1)

    def group_advantages(self, batch: StepBatch) -> Tensor:
        """[B, T], before any correction replaces them."""
        sent = batch.sent
        return over_tokens(sequence_advantages(self.advantage, sent.rewards, sent.group_ids, self.reduce), sent.mask)

    def _shaped_rewards(self, batch: StepBatch) -> Tensor:
        """[B]: what advantages and RAPID's baseline are taken of."""
        buffer, penalty = self.overlong
        lengths = batch.sent.mask.sum(dim=1)
        return batch.sent.rewards + overlong_penalty(
            lengths, max_len=self.max_response_len, buffer=buffer, penalty=penalty
        )

    def _coefficients(self, mask: Tensor) -> tuple[Tensor, int]:
        tokens, sequences = counts(mask, self.reduce)
        return coefficients(self.objective.aggregation, mask, tokens, sequences, self.max_response_len), tokens

    @torch.no_grad()
    def _score(self, batch: StepBatch, policy: ZeroEngine | FrozenPolicy, topk: int) -> Scored:
        """A pass without gradients over the whole batch."""
        spec = replace(self.spec, topk=topk, entropy_grad=False)
        parts = [(mb, policy.forward(mb, _actor_ids(batch, mb, topk), spec)) for mb in batch.micro]
        return Scored.collect(batch.sent.mask.shape, parts, batch.sent.mask.device)


def _one_forward(batch: StepBatch) -> bool:
    """Whether one forward pass sees the whole share of this rank, and so of every rank: their counts are the same."""
    return len(batch.micro) == 1


def _actor_ids(batch: StepBatch, mb: MicroBatch, topk: int) -> Tensor | None:
    """The actor's top ids [N, k] where the pass takes the learner's top k, else None."""
    ids = batch.sent.topk_ids_inf
    if not topk or ids is None:
        return None
    return mb.flat(ids) if len(mb.sequences) else ids.new_full((len(mb.targets), ids.shape[2]), -1)


def _detached(scores: TokenScores) -> TokenScores:
    return replace(scores, logp=scores.logp.detach(), entropy=scores.entropy.detach())
