"""The reinforcement-learning step of one rank: reference passes, corrections, the backward pass of
every micro-batch.

Two ways lead to the same gradient. Where corrections need the whole batch first and it takes
several micro-batches, p_ref (and p_new) is computed by a pass of its own. Where one micro-batch is
the whole share, or each episode is corrected by its own tokens, or all passes are kept for their
backward passes (`kept_passes.py`), both come from what is differentiated (p_ref only if the phase
is one step).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlcore.corrections.pipeline import Pipeline
from rlcore.corrections.reduction import ONE_RANK
from rlcore.interfaces import Corrected, Reduce
from rlcore.learner.batch import Scored, StepBatch, observed, rows_of
from rlcore.learner.head_spec import HeadSpec
from rlcore.learner.kept_passes import KeptPasses
from rlcore.learner.loss import StepLoss
from rlcore.learner.packing import MicroBatch
from rlcore.learner.policy import FrozenPolicy
from rlcore.learner.protocols import TrainEngine
from rlcore.learner.specs import LearnerJob
from rlcore.learner.sums import Sums
from rlcore.learner.task_advantages import TaskAdvantages
from rlcore.objectives.aggregate import coefficients, counts
from rlcore.objectives.kl import kl_penalty
from rlcore.objectives.protocols import LossTensors
from rlcore.objectives.shaping import overlong_penalty
from rlcore.types import TokenScores

Forward = tuple[TokenScores, Tensor | None]  # a differentiated pass: scores, full KL [N]


@dataclass(frozen=True, slots=True)
class StepGradient:
    """What is known when the backward passes of a step are done."""

    sums: Sums
    kept: int  # tokens in the loss, over all ranks
    metrics: dict[str, float]  # of the mismatch and the corrections
    step_scale: float  # multiplies the learning rate of this step


@dataclass(frozen=True, slots=True)
class _Shared:
    """What the micro-batches of a step have in common."""

    batch: StepBatch
    advantages: Tensor  # [B, T]
    coefficients: Tensor  # [B, T]
    first: bool  # of the step's phase: p_ref is p_new detached
    sums: Sums


class Update:
    """Everything a step's gradient depends on, besides the batch."""

    def __init__(
        self,
        job: LearnerJob,
        engine: TrainEngine,
        frozen: FrozenPolicy | None,
        pipeline: Pipeline,
        reduce: Reduce,
    ) -> None:
        """`frozen`: the starting policy, required where the objective has a KL term."""
        self.engine = engine
        self.frozen = frozen
        self.pipeline = pipeline
        self.reduce = reduce
        self.loss = StepLoss(job.objective, short_circuit=pipeline.needs.short_circuit)
        self.head = HeadSpec(
            job.sampling.temperature,
            job.learner.head_chunk_tokens,
            safe_set_rho=pipeline.needs.safe_set_rho,
            entropy_grad=job.objective.entropy_coef != 0.0,
            fp32=job.learner.fp32_head,
        )
        #: own top entries of p_ref, for the mismatch metrics and for corrections; 0: none
        self.topk = max(job.sampling.logprobs_k, 0)
        self.advantages = TaskAdvantages(job)
        self._objective = job.objective
        self._max_len = job.sampling.max_new_tokens
        self._ref_pass = job.learner.ref_pass
        self._kept = KeptPasses(job.learner)

    def prepare(self, phase: Sequence[StepBatch], *, first: bool, steps: int | None = None) -> None:
        """Shape a phase's rewards; compute p_ref where it needs its own pass, and the frozen
        policy's log-probs.

        `first`: the phase holds its first step. The rest of a resumed phase does not: its p_ref is
        not p_new. `steps`: that train on these batches; None: one on each.
        """
        # Several steps on one batch: a resume must compute the p_ref that the first of them had.
        alone = first and (len(phase) if steps is None else steps) == 1
        one_pass = alone and self._one_pass_suffices(phase[0])
        for batch in phase:
            batch.sent.rewards = self._shaped_rewards(batch)
            if not one_pass and batch.ref is None:
                batch.ref = self.score_ref(batch)
            if self.loss.needs_base_logp and self.frozen is not None:
                batch.base = self._score(batch, self.frozen, 0)

    def score_ref(self, batch: StepBatch) -> Scored:
        """A batch's scores under the policy as it is now."""
        return self._score(batch, self.engine, self.topk)

    def _one_pass_suffices(self, batch: StepBatch) -> bool:
        """Whether the p_ref of a step alone may be taken from the pass that is differentiated."""
        if self._ref_pass == "always":
            return False
        return self._apart or self._together(batch)

    @property
    def _apart(self) -> bool:
        """Whether corrections may see one micro-batch at a time. p_new is p_ref, so `needs.new`
        asks for no pass of its own."""
        return self.pipeline.sequence_wise and not self.pipeline.needs.batch_stats

    def _together(self, batch: StepBatch) -> bool:
        """Whether all differentiated passes may be held at once, as far as is known."""
        return _one_forward(batch) or self._kept.fit(batch.micro)

    def run(self, batch: StepBatch, step: int, *, first: bool) -> StepGradient:
        """All backward passes of a step, `first` of its phase or not."""
        advantages = self.group_advantages(batch)
        if batch.ref is None and self._apart and not _one_forward(batch):
            return self._correct_each(batch, step, advantages)
        ref, new, ready = self._observe(batch, first=first)
        tensors = observed(batch.sent, step, advantages, ref, new)
        tensors.advantages = self.pipeline.advantages(tensors, self.reduce)
        corrected = self.pipeline.correct(tensors, self.reduce)
        coefs, kept = self._coefficients(corrected.mask)
        sums = Sums.of_step(self.loss.sums, batch.episodes, self.engine.device)
        shared = _Shared(batch, tensors.advantages, coefs, first, sums)
        for i, mb in enumerate(batch.micro):
            mine = Corrected(corrected.weight[mb.episodes], corrected.mask[mb.episodes], {})
            # taken out, so that its memory is free after its backward pass
            forward = ready.pop(0) if ready else self._forward(batch, mb, 0)
            self._backward(shared, i, forward, mine)
        return StepGradient(sums, kept, corrected.metrics, corrected.step_scale)

    def _observe(self, batch: StepBatch, *, first: bool) -> tuple[Scored, Scored, list[Forward]]:
        """Scores under p_ref and p_new as corrections look at them, and the differentiated passes
        where they were taken from them."""
        needs = self.pipeline.needs
        # at the first step p_new is p_ref; later it is looked at only where a correction asks
        if batch.ref is not None and (first or not needs.new):
            return batch.ref, batch.ref, []
        topk = self.topk if batch.ref is None or needs.topk else 0
        ready = self._passes(batch, topk) if self._ref_pass == "auto" else []
        if ready:
            parts = [(mb, _detached(scores)) for mb, (scores, _) in zip(batch.micro, ready)]
            mask = batch.sent.mask
            new = Scored.collect(mask.shape, parts, mask.device)
        else:
            new = self._score(batch, self.engine, topk)
        batch.ref = batch.ref or new
        return batch.ref, new, ready

    def _passes(self, batch: StepBatch, topk: int) -> list[Forward]:
        """The differentiated pass of every micro-batch, which can be looked at before its backward
        pass; none where they do not fit together."""
        if not self._together(batch):
            return []
        first, *others = batch.micro
        if not others:
            return [self._forward(batch, first, topk)]
        with self._kept.measured(first, self.engine.policy.parameters()):
            one = self._forward(batch, first, topk)
        if not self._together(batch):
            return []
        return [one, *(self._forward(batch, mb, topk) for mb in others)]

    def _correct_each(self, batch: StepBatch, step: int, advantages: Tensor) -> StepGradient:
        """A step whose corrections see one micro-batch at a time, from the differentiated pass."""
        usable = self.pipeline.usable(batch.sent)
        coefs, kept = self._coefficients(usable)
        sums = Sums.of_step(self.loss.sums, batch.episodes, self.engine.device)
        shared = _Shared(batch, advantages, coefs, True, sums)
        parts = []
        for i, mb in enumerate(batch.micro):
            scores, kl = self._forward(batch, mb, self.topk)
            alone = Scored.of(mb, scores, usable.shape[1])
            mine = rows_of(batch.sent, mb.episodes)
            part = observed(mine, step, advantages[mb.episodes], alone, alone)
            corrected = self.pipeline.correct(part, ONE_RANK, measure=False)
            self._backward(shared, i, (scores, kl), corrected)
            parts.append((mb, _detached(scores)))
        # once more over the whole batch, for metrics and step scale: the gradient is there already
        batch.ref = whole = Scored.collect(usable.shape, parts, usable.device)
        tensors = observed(batch.sent, step, advantages, whole, whole)
        corrected = self.pipeline.correct(tensors, self.reduce)
        if not torch.equal(corrected.mask, usable):
            raise RuntimeError("a correction declared as sequence_wise rejected tokens")
        return StepGradient(sums, kept, corrected.metrics, corrected.step_scale)

    def _forward(self, batch: StepBatch, mb: MicroBatch, topk: int) -> Forward:
        """The pass that is differentiated."""
        needs_base = self.frozen is not None and self.loss.needs_full_kl
        base = self.frozen.base(mb) if needs_base else None  # type: ignore[union-attr]
        ids = _actor_ids(batch, mb, topk)
        return self.engine.forward_with_kl(mb, ids, replace(self.head, topk=topk), base)

    def _backward(
        self, shared: _Shared, index: int, forward: Forward, corrected: Corrected
    ) -> None:
        """Loss and backward of a micro-batch; `corrected` holds its rows."""
        mb, (scores, kl) = shared.batch.micro[index], forward
        if len(mb.episodes):
            rows, width = mb.episodes, shared.batch.sent.mask.shape[1]
            tokens = _loss_tensors(shared, mb, scores, corrected)
            entropy = mb.dense(scores.entropy, width)
            distance = self._kl(shared, mb, forward, tokens)
            loss, values = self.loss(tokens, shared.coefficients[rows], entropy, distance)
            values["entropy"] = scores.entropy.detach().sum()
            values["nonfinite_logp"] = (~torch.isfinite(scores.logp)).sum()
            shared.sums.add(values)
        else:
            # Nothing of this rank's, but it must still join the others' collectives. Every output
            # that they differentiate must be in this graph too: ZeRO-3 gathers once for each, and
            # the ranks would otherwise wait for each other until the deadline.
            outputs = [
                t for t in (scores.logp, scores.entropy, kl) if t is not None and t.requires_grad
            ]
            loss = 0.0 * torch.stack([t.sum() for t in outputs]).sum()
        self.engine.backward(loss, last=index == len(shared.batch.micro) - 1)

    def _kl(
        self, shared: _Shared, mb: MicroBatch, forward: Forward, tokens: LossTensors
    ) -> Tensor | None:
        """KL to the frozen policy [b, T] as the loss takes it, or None where it has no such term.

        A token that the corrections dropped or weighed 0 has no KL either. The full KL sums over
        the vocabulary and carries no ratio to p_new; the sampled estimators' tokens are the
        actor's, so they carry it.
        """
        (scores, kl), rows, base = forward, mb.episodes, shared.batch.base
        width = tokens.mask.shape[1]
        corrected = Corrected(tokens.weight, tokens.mask, {})
        if kl is not None:
            return mb.dense(kl, width) * self.pipeline.state_weight(corrected)
        estimator = self._objective.kl_estimator
        if base is None or estimator == "full":
            return None
        logp_inf = shared.batch.sent.logp_inf[rows]
        cap = self._objective.kl_ratio_cap
        weight = self.pipeline.penalty_weight(
            corrected, tokens.logp_new, tokens.logp_ref, logp_inf, cap
        )
        if base.inside is not None and scores.inside is not None:
            # under a safe set, a token outside either set has a filler for one of the log-probs
            inside = mb.dense(scores.inside, width) & base.inside[rows]
            weight = torch.where(inside, weight, 0.0)
        return kl_penalty(estimator, tokens.logp_new, base.logp[rows], weight)

    def group_advantages(self, batch: StepBatch) -> Tensor:
        """[B, T], before any correction replaces them."""
        return self.advantages.over_tokens(batch, self.reduce)

    def _shaped_rewards(self, batch: StepBatch) -> Tensor:
        """[B]: what advantages and RAPID's baseline are taken of."""
        return batch.sent.rewards + overlong_penalty(
            batch.sent.mask.sum(dim=1),
            max_len=self._max_len,
            buffer=self._objective.overlong_buffer(self._max_len),
            penalty=self._objective.overlong_penalty,
        )

    def _coefficients(self, mask: Tensor) -> tuple[Tensor, int]:
        """Coefficients [B, T] of the tokens in the loss, and their number over all ranks."""
        tokens, sequences = counts(mask, self.reduce)
        mode = self._objective.aggregation
        return coefficients(mode, mask, tokens, sequences, self._max_len), tokens

    @torch.no_grad()
    def _score(self, batch: StepBatch, policy: TrainEngine | FrozenPolicy, topk: int) -> Scored:
        """A pass without gradients over the whole batch."""
        spec = replace(self.head, topk=topk, entropy_grad=False)
        parts = [(mb, policy.forward(mb, _actor_ids(batch, mb, topk), spec)) for mb in batch.micro]
        return Scored.collect(batch.sent.mask.shape, parts, batch.sent.mask.device)


def _one_forward(batch: StepBatch) -> bool:
    """Whether one forward pass sees this rank's whole share, and so every rank's: their counts of
    micro-batches are the same."""
    return len(batch.micro) == 1


def _actor_ids(batch: StepBatch, mb: MicroBatch, topk: int) -> Tensor | None:
    """The actor's top ids [N, k] where the pass takes the learner's top k, else None."""
    ids = batch.sent.topk_ids_inf
    if not topk or ids is None:
        return None
    return mb.flat(ids) if len(mb.episodes) else ids.new_full((len(mb.targets), ids.shape[2]), -1)


def _detached(scores: TokenScores) -> TokenScores:
    return replace(scores, logp=scores.logp.detach(), entropy=scores.entropy.detach())


def _loss_tensors(
    shared: _Shared, mb: MicroBatch, scores: TokenScores, corrected: Corrected
) -> LossTensors:
    batch, rows = shared.batch, mb.episodes
    width = batch.sent.mask.shape[1]
    logp_new = mb.dense(scores.logp, width)
    ref = None if shared.first else batch.ref
    sampled = batch.sent.mask[rows]
    if scores.inside is not None:
        sampled = sampled & mb.dense(scores.inside, width)
    if ref is not None and ref.inside is not None:
        sampled = sampled & ref.inside[rows]
    return LossTensors(
        logp_new=logp_new,
        logp_ref=logp_new.detach() if ref is None else ref.logp[rows],
        advantages=shared.advantages[rows],
        weight=corrected.weight,
        mask=corrected.mask,
        sampled=sampled,
    )
