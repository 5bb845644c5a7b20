"""The reinforcement-learning step of one rank: reference passes, corrections, the backward pass of
every micro-batch.

Two ways lead to the same gradient. Where corrections need the whole batch first and it takes
several micro-batches, p_ref (and p_new) is computed by a separate pass. Where one micro-batch is
the whole share, or each episode is corrected by its own tokens, both come from what is
differentiated. So they do where all passes are kept for their backward passes (`KeptPasses`): both
come from what is differentiated (p_ref only if the phase is one step).

Where no advantage of any rank differs from 0, the backward passes whose loss has slope 0 at every
score are left out. The optimizer step is taken all the same: moments and weight decay still move
the weights.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlcore.corrections.centre import Centred
from rlcore.corrections.numerics import ONE_RANK, first_occurrence, total
from rlcore.corrections.pipeline import Pipeline
from rlcore.files import replace_file
from rlcore.interfaces import Corrected, Reduce
from rlcore.learner.batch import PolicyScores, StepBatch, TokenTrace, kept_set_metrics, observed
from rlcore.learner.lm_head import HeadSpec, KlTarget
from rlcore.learner.metric_sums import Declared, Sums
from rlcore.learner.packing import KeptPasses, MicroBatch, dummy
from rlcore.learner.policy import FrozenPolicy
from rlcore.learner.protocols import TrainEngine
from rlcore.learner.specs import LearnerJob
from rlcore.learner.state_files import Schedule
from rlcore.learner.step_loss import StepLoss
from rlcore.learner.task_advantages import TaskAdvantages
from rlcore.objectives.advantages import overlong_penalty
from rlcore.objectives.kl import KlController, kl_penalty, kl_to_go
from rlcore.objectives.losses import coefficients, counts
from rlcore.objectives.protocols import LossTensors, snapped
from rlcore.types import StepTensors, TokenScores

if TYPE_CHECKING:
    from rlcore.learner.parts.critic import Critic
    from rlcore.learner.parts.teacher import Teacher

FILE = "update.json"  # of a saved state
FLAT = "train/flat_positions"  # whose backward pass was left out

# a differentiated pass: scores, and the full KL [N] or what is known of the distance to a teacher
# [N, 2]
Forward = tuple[TokenScores, Tensor | None]


@dataclass(frozen=True, slots=True)
class StepGradient:
    """The result of the backward passes of a step."""

    sums: Sums
    kept: int  # tokens in the loss, over all ranks
    advantages: Tensor  # [B, T], before any correction replaced them
    metrics: dict[str, float]  # of the mismatch, the corrections and a KL in the reward
    step_scale: float  # multiplies the learning rate of this step


@dataclass(frozen=True, slots=True)
class _Shared:
    """The inputs that the micro-batches of a step have in common."""

    batch: StepBatch
    advantages: Tensor  # [B, T]
    coefficients: Tensor  # [B, T]
    first: bool  # of the step's phase: p_ref is p_new detached
    sums: Sums
    still: bool  # no advantage of a token in the loss differs from 0, on any rank


class Update:
    """Everything a step's gradient depends on, besides the batch."""

    def __init__(
        self,
        job: LearnerJob,
        engine: TrainEngine,
        frozen: FrozenPolicy | None,
        pipeline: Pipeline,
        reduce: Reduce,
        shadows: Mapping[str, Pipeline] | None = None,
        critic: Critic | None = None,
        teacher: Teacher | None = None,
    ) -> None:
        """`frozen`: the starting policy, required where the objective has a KL term. `shadows`:
        lists whose weights are only measured. `critic`: the source of advantages where they are
        computed from values. `teacher`: has scored each batch before `prepare`."""
        self.critic = critic
        self.teacher = teacher
        self.engine = engine
        self.frozen = frozen
        self.pipeline = pipeline
        self.reduce = reduce
        self.loss = StepLoss(
            job.objective,
            short_circuit=pipeline.needs.short_circuit,
            teacher=job.teacher if teacher else None,
        )
        self.head = HeadSpec(
            job.sampling.temperature,
            job.learner.head_chunk_tokens,
            safe_set_rho=pipeline.needs.safe_set_rho,
            # DVP's min-p has the learner's own safe set beside it
            kept_sets=job.sampling.truncates and pipeline.needs.safe_set_rho is None,
            entropy_grad=job.objective.entropy_coef != 0.0,
            ids_grad=pipeline.centres,
            fp32=job.learner.exact_head,
            fused=job.learner.fused_head,
            invariant=job.bitwise_positions > 0,
        )
        #: own top entries of p_ref, for the mismatch metrics and for corrections; 0: none
        self.topk = max(job.sampling.logprobs_k, 0)
        self.advantages = TaskAdvantages(job)
        self.kl = KlController(job.objective)
        #: the loss's ratio is to p_inf: p_ref is the policy as each step begins
        self._to_inf = job.objective.ratio_to == "p_inf"
        self._objective = job.objective
        self._sampling = job.sampling
        self._max_len = job.sampling.max_new_tokens
        self._ref_pass = job.learner.ref_pass
        self._shadows = shadows or {}
        self._shadow_every, self._kinds = job.shadow.every, job.kinds
        self._kept = KeptPasses(job.learner, reduce)
        #: version of p_ref, that of the first step of the phase
        self.ref_version = 0
        #: filled by each step where it is not None
        self.trace: list[TokenTrace] | None = None

    def prepare(self, phase: Sequence[StepBatch], *, first: bool, steps: int | None = None) -> None:
        """Shape a phase's rewards; compute p_ref where it needs its own pass, and the frozen
        policy's log-probs.

        `first`: the phase holds its first step. The rest of a resumed phase does not: its p_ref is
        not p_new. `steps`: that train on these batches; None: one on each.
        """
        # Several steps on one batch: a resume must compute the p_ref of the first of them.
        alone = first and (len(phase) if steps is None else steps) == 1
        one_pass = self._to_inf or (alone and self._one_pass_suffices(phase[0]))
        for batch in phase:
            if self.head.kept_sets:
                batch.metrics |= kept_set_metrics(batch, self._sampling, self.reduce)
            self._shape_rewards(batch)
            if not one_pass and batch.ref is None:
                batch.ref = self.score_ref(batch)
            if self.loss.needs_base_logp and self.frozen is not None:
                batch.base = self._score(batch, self.frozen, None)
            if self.critic is not None:
                batch.values = self.critic.values(batch)

    def save(self, folder: Path, schedule: Schedule) -> None:
        """Write all that later steps depend on besides the weights; by one rank."""
        state: dict[str, Any] = {
            "ref_version": self.ref_version,
            "corrections": self.pipeline.state(),
            "shadows": {label: pipeline.state() for label, pipeline in self._shadows.items()},
        }
        if self._objective.kl_in_reward:
            state["kl_coef"] = self.kl.value
        schedule(partial(replace_file, folder / FILE, json.dumps(state)))

    def load(self, folder: Path) -> None:
        """Continue from `save`; older checkpoints have no such file."""
        if not (folder / FILE).is_file():
            return
        state = json.loads((folder / FILE).read_text())
        self.ref_version = int(state["ref_version"])
        self.pipeline.restore(state.get("corrections", {}))
        for label, pipeline in self._shadows.items():
            pipeline.restore(state.get("shadows", {}).get(label, {}))
        if "kl_coef" in state and self._objective.kl_target is not None:
            self.kl.value = float(state["kl_coef"])

    def score_ref(self, batch: StepBatch) -> PolicyScores:
        """A batch's scores under the policy as it is now."""
        return self._score(batch, self.engine, self.topk)

    def _one_pass_suffices(self, batch: StepBatch) -> bool:
        """Return whether the p_ref of a step may be taken from the differentiated pass alone."""
        if self._ref_pass == "always":
            return False
        return self._apart or self._together(batch)

    @property
    def _apart(self) -> bool:
        """True if corrections may see one micro-batch at a time. p_new is p_ref, so `needs.new`
        needs no further pass."""
        alone = self.pipeline.sequence_wise and not self.pipeline.needs.batch_stats
        return alone and not self._objective.kl_in_reward and self.critic is None

    def _together(self, batch: StepBatch) -> bool:
        """Return whether all differentiated passes may be held at once, as far as is known."""
        return _one_forward(batch) or self._kept.fit(batch.micro)

    def run(self, batch: StepBatch, step: int, *, first: bool) -> StepGradient:
        """All backward passes of a step, `first` of its phase or not."""
        if self._to_inf and not first:
            batch.ref, first = None, True
        if first:
            self.ref_version = step
        if batch.ref is None and self._apart and not _one_forward(batch):
            return self._correct_each(batch, step, self.group_advantages(batch))
        ref, new, ready = self._observe(batch, first=first)
        advantages = self.group_advantages(batch)
        tensors = observed(batch.sent, (step, self.ref_version), advantages, ref, new)
        replaced = self.pipeline.advantages(tensors, self.reduce)
        if replaced is not tensors.advantages:
            tensors.advantages = self._snapped(replaced)
        corrected = self.pipeline.correct(tensors, self.reduce)
        shadowed = self._shadowed(tensors, corrected)
        coefs, kept = self._coefficients(corrected.mask)
        waits = self.critic is not None and step < self.critic.warmup_steps
        if waits:  # the critic learns alone: no gradient, and no step of the policy
            coefs = torch.zeros_like(coefs)
        sums = self._sums(batch)
        still = self._still(tensors.advantages, coefs)
        shared = _Shared(batch, tensors.advantages, coefs, first, sums, still)
        for i, mb in enumerate(batch.micro):
            mine = corrected.rows(mb.episodes)
            # taken out, so that its memory is free after its backward pass
            forward = ready.pop(0) if ready else self._forward(batch, mb, None)
            self._backward(shared, i, forward, mine)
        metrics = corrected.metrics | shadowed | self._followed_kl(batch)
        scale = 0.0 if waits else corrected.step_scale
        return StepGradient(sums, kept, advantages, metrics, scale)

    def _observe(
        self, batch: StepBatch, *, first: bool
    ) -> tuple[PolicyScores, PolicyScores, list[Forward]]:
        """Scores under p_ref and p_new that corrections see, and the differentiated passes where
        the scores were taken from them."""
        needs = self.pipeline.needs
        # at the first step p_new is p_ref; later it is looked at only where a correction asks
        if batch.ref is not None and (first or not needs.new):
            return batch.ref, batch.ref, []
        topk = self.topk if batch.ref is None or needs.topk else 0
        ready = self._passes(batch, topk) if self._ref_pass == "auto" else []
        if ready:
            parts = [(mb, _detached(scores)) for mb, (scores, _) in zip(batch.micro, ready)]
            mask = batch.sent.mask
            new = PolicyScores.collect(mask.shape, parts, mask.device)
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
        sums = self._sums(batch)
        shared = _Shared(batch, advantages, coefs, True, sums, self._still(advantages, coefs))
        parts = []
        for i, mb in enumerate(batch.micro):
            scores, kl = self._forward(batch, mb, self.topk)
            alone = PolicyScores.of(mb, scores, usable.shape[1])
            mine = batch.sent.rows(mb.episodes)
            part = observed(mine, (step, step), advantages[mb.episodes], alone, alone)
            corrected = self.pipeline.correct(part, ONE_RANK, measure=False)
            self._backward(shared, i, (scores, kl), corrected)
            parts.append((mb, _detached(scores)))
        # once more over the whole batch, for metrics and step scale: the gradient is there already
        batch.ref = whole = PolicyScores.collect(usable.shape, parts, usable.device)
        tensors = observed(batch.sent, (step, step), advantages, whole, whole)
        corrected = self.pipeline.correct(tensors, self.reduce)
        if not torch.equal(corrected.mask, usable):
            raise RuntimeError("a correction declared as sequence_wise rejected tokens")
        metrics = corrected.metrics | self._shadowed(tensors, corrected)
        return StepGradient(sums, kept, advantages, metrics, corrected.step_scale)

    def _shadowed(self, tensors: StepTensors, executed: Corrected) -> dict[str, float]:
        """Metrics of other lists of corrections on each n-th batch. Collective."""
        if not self._shadows or (tensors.step + 1) % self._shadow_every:
            return {}
        from rlcore.corrections.shadow import shadow_metrics

        start = time.monotonic()
        found = shadow_metrics(self._shadows, tensors, executed, self.reduce, self._kinds)
        return found | {"time/shadow_s": time.monotonic() - start}

    def _forward(self, batch: StepBatch, mb: MicroBatch, topk: int | None) -> Forward:
        """The pass that is differentiated. `topk`: None where no correction sees its scores."""
        needs_base = self.frozen is not None and self.loss.needs_full_kl
        base: KlTarget | None = None
        if self.teacher is not None:
            base = self.teacher.target(batch, mb)
        elif needs_base:
            base = self.frozen.base(mb)  # type: ignore[union-attr]
        spec = replace(self.head, topk=topk or 0, sketch=topk is not None)
        return self.engine.forward_with_kl(mb, _actor_ids(batch, mb, spec), spec, base)

    def _backward(
        self, shared: _Shared, index: int, forward: Forward, corrected: Corrected
    ) -> None:
        """Loss and backward of a micro-batch; `corrected` holds its rows."""
        mb, last = shared.batch.micro[index], index == len(shared.batch.micro) - 1
        if len(mb.episodes):
            loss, values, tokens = self._loss_of(shared, mb, forward, corrected)
            shared.sums.add(values)
        else:
            loss, tokens = _nothing(forward), None
        if shared.still and self._flat(shared, mb, forward, corrected):
            shared.sums.add({FLAT: torch.tensor(float(mb.tokens), device=self.engine.device)})
            if not last:
                return
            # ends the accumulation on every rank, at the cost of one position
            loss = _nothing(self._forward(shared.batch, dummy(device=self.engine.device), None))
        if self.trace is not None and tokens is not None:
            tokens.logp_new.retain_grad()
        self.engine.backward(loss, last=last)
        if self.trace is not None and tokens is not None:
            slope = tokens.logp_new.grad
            assert slope is not None
            parts = (slope, tokens.weight, tokens.mask, tokens.advantages)
            self.trace.append(TokenTrace(mb.episodes, *(p.detach().clone() for p in parts)))

    def _loss_of(
        self, shared: _Shared, mb: MicroBatch, forward: Forward, corrected: Corrected
    ) -> tuple[Tensor, dict[str, Tensor], LossTensors]:
        """Loss (scalar) of a micro-batch, sums by metric name, and the tensors of the loss."""
        scores, rows, width = forward[0], mb.episodes, shared.batch.sent.mask.shape[1]
        tokens = self._loss_tensors(shared, mb, scores, corrected)
        # like the full KL: a token that the corrections dropped or weighed 0 has none
        entropy = mb.dense(scores.entropy, width) * self.pipeline.state_weight(corrected)
        penalty = self._kl(shared, mb, forward, tokens, corrected)
        distance = self._distance(shared, mb, forward, tokens, corrected)
        coefs = shared.coefficients[rows]
        term = self._centred(shared, mb, scores, corrected)
        loss, values = self.loss(tokens, coefs, entropy, penalty, distance, term)
        values["entropy"] = scores.entropy.detach().sum()
        values["nonfinite_logp"] = (~torch.isfinite(scores.logp)).sum()
        return loss, values, tokens

    def _centred(
        self, shared: _Shared, mb: MicroBatch, scores: TokenScores, corrected: Corrected
    ) -> Centred | None:
        """The inputs of the term that centres the scores, if a correction does."""
        sent, ref, width = shared.batch.sent, shared.batch.ref, shared.batch.sent.mask.shape[1]
        if corrected.centre is None or scores.logp_at_ids is None or sent.topk_ids_inf is None:
            return None
        rows = mb.episodes
        anchor = sent.topk_logp_inf if self._to_inf else None
        if not (self._to_inf or shared.first or self.pipeline.leads_to_new):
            anchor = None if ref is None else ref.logp_at_ids
        valid = first_occurrence(sent.topk_ids_inf[rows])
        logp_at = mb.dense(scores.logp_at_ids, width)
        return Centred(corrected.centre, valid, logp_at, None if anchor is None else anchor[rows])

    def _sums(self, batch: StepBatch) -> Sums:
        declared = self.loss.sums | {FLAT: Declared()}
        return Sums.of_step(declared, batch.episodes, self.engine.device)

    def _still(self, advantages: Tensor, coefs: Tensor) -> bool:
        """Return whether no token's advantage in the loss differs from 0, on any rank. Collective.

        False where a trace asks for every slope, and with a teacher, whose distances are counted as
        they are computed.
        """
        if self.trace is not None or self.teacher is not None:
            return False
        moves = (advantages * coefs != 0).any()  # also where one is not finite
        return not bool(self.reduce.max(moves.float()))

    def _flat(
        self, shared: _Shared, mb: MicroBatch, forward: Forward, corrected: Corrected
    ) -> bool:
        """Return whether the loss has slope 0 at every score of this micro-batch, and of other
        ranks': its gradient is then 0. Collective."""
        moves = torch.zeros((), device=self.engine.device)
        if len(mb.episodes):
            scores, kl = forward
            # copies: to differentiate by the engine's own outputs would call its hooks
            outputs = (scores.logp, scores.entropy, scores.logp_at_ids, kl)
            leaves = [None if t is None else _leaf(t) for t in outputs]
            logp, entropy, at, kl = leaves
            assert logp is not None and entropy is not None
            copied = replace(scores, logp=logp, entropy=entropy, logp_at_ids=at), kl
            loss = self._loss_of(shared, mb, copied, corrected)[0]
            by = [t for t in leaves if t is not None and t.requires_grad]
            slopes = torch.autograd.grad(loss, by, allow_unused=True)
            moves = torch.stack([(s != 0).any() for s in slopes if s is not None]).any().float()
        return not bool(self.reduce.max(moves))

    def _kl(
        self,
        shared: _Shared,
        mb: MicroBatch,
        forward: Forward,
        tokens: LossTensors,
        corrected: Corrected,
    ) -> Tensor | None:
        """KL to the frozen policy [b, T] in the loss, or None where the loss has no such term.

        A token that the corrections dropped or weighed 0 has no KL either. The full KL sums over
        the vocabulary and carries no ratio to p_new; the sampled estimators' tokens are the
        actor's, so they carry it.
        """
        (scores, kl), rows, base = forward, mb.episodes, shared.batch.base
        width = tokens.mask.shape[1]
        if kl is not None and self.teacher is None:
            return mb.dense(kl, width) * self.pipeline.state_weight(corrected)
        estimator = self._objective.kl_estimator
        if base is None or estimator == "full" or not self._objective.kl_in_loss:
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

    def _distance(
        self,
        shared: _Shared,
        mb: MicroBatch,
        forward: Forward,
        tokens: LossTensors,
        corrected: Corrected,
    ) -> Tensor | None:
        """Distance to the teacher [b, T] as the loss takes it: a state's distance like the full KL,
        an estimate from the sampled token by the token's ratio."""
        (_, pair), teacher = forward, self.teacher
        if teacher is None or pair is None:
            return None
        logp_inf = shared.batch.sent.logp_inf[mb.episodes]
        ratio = self.pipeline.penalty_weight(
            corrected, tokens.logp_new, tokens.logp_ref, logp_inf, teacher.spec.ratio_cap
        )
        states = self.pipeline.state_weight(corrected)
        return teacher.distance(shared.batch, mb, pair, tokens, states, ratio)

    def _loss_tensors(
        self, shared: _Shared, mb: MicroBatch, scores: TokenScores, corrected: Corrected
    ) -> LossTensors:
        batch, rows = shared.batch, mb.episodes
        width = batch.sent.mask.shape[1]
        logp_new = mb.dense(scores.logp, width)
        ref = None if shared.first else batch.ref
        sampled = batch.sent.mask[rows]
        anchor = batch.sent.logp_inf if self._to_inf else None if ref is None else ref.logp
        if scores.inside is not None:
            sampled = sampled & mb.dense(scores.inside, width)
        # a loss that is anchored at p_new has no ratio to p_ref
        if ref is not None and ref.inside is not None and not self.pipeline.leads_to_new:
            sampled = sampled & ref.inside[rows]
        return LossTensors(
            logp_new=logp_new,
            logp_ref=logp_new.detach() if anchor is None else anchor[rows],
            advantages=shared.advantages[rows],
            weight=corrected.weight,
            mask=corrected.mask,
            sampled=sampled,
            score=corrected.score,
            widen=corrected.widen,
        )

    def group_advantages(self, batch: StepBatch) -> Tensor:
        """[B, T], before any correction replaces them; with a KL in the reward, or a critic, p_ref
        is known. Collective."""
        penalty = None
        if self._objective.kl_in_reward:
            penalty = self.kl.value * self._kl_to_go(batch)
        if self.critic is not None:
            turns = batch.turns if penalty is None else batch.turns.less(penalty)
            by_token = self._objective.credit == "token"
            return self._snapped(self.critic.advantages(batch, turns, by_token))
        return self._snapped(self.advantages.over_tokens(batch, self.reduce, penalty))

    def _snapped(self, advantages: Tensor) -> Tensor:
        """Advantages that are 0 up to rounding, relative to the largest of the step, as 0:
        corrections ask for their sign. Collective."""
        largest = advantages.abs().amax() if advantages.numel() else advantages.new_zeros(())
        return snapped(advantages, float(self.reduce.max(largest)))

    def _kl_to_go(self, batch: StepBatch) -> Tensor:
        """[B, T] float64: the KL of p_ref to the frozen policy from each token on. A token outside
        the safe set of either has no KL."""
        ref, base, on = batch.ref, batch.base, batch.sent.mask
        if ref is None or base is None:
            raise RuntimeError("a KL in the reward before p_ref and the frozen policy are known")
        if ref.inside is not None and base.inside is not None:
            on = on & ref.inside & base.inside
        return kl_to_go(ref.logp, base.logp, on)

    def _followed_kl(self, batch: StepBatch) -> dict[str, float]:
        """Metrics of a KL in the reward, if the objective has one; adapts its coefficient.
        Collective."""
        if not self._objective.kl_in_reward:
            return {}
        summed, answers = total([self._kl_to_go(batch)[:, 0], batch.sent.mask[:, 0]], self.reduce)
        found = {"train/answer_kl": summed / max(answers, 1.0), "train/kl_coef": self.kl.value}
        self.kl.follow(found["train/answer_kl"], answers)
        return found

    def _shape_rewards(self, batch: StepBatch) -> None:
        """Add the overlong penalty to the rewards of which advantages and RAPID's baseline are
        computed: of each episode, and of its last turn and token."""
        tokens = batch.sent.mask.sum(dim=1)
        penalty = overlong_penalty(
            tokens,
            max_len=self._max_len,
            buffer=self._objective.overlong_buffer(self._max_len),
            penalty=self._objective.overlong_penalty,
        )
        batch.sent.rewards = batch.sent.rewards + penalty
        batch.turns = batch.turns.ending_with(penalty, tokens)

    def _coefficients(self, mask: Tensor) -> tuple[Tensor, int]:
        """Coefficients [B, T] of the tokens in the loss, and their number over all ranks."""
        tokens, sequences = counts(mask, self.reduce)
        mode = self._objective.aggregation
        return coefficients(mode, mask, tokens, sequences, self._max_len), tokens

    @torch.no_grad()
    def _score(
        self, batch: StepBatch, policy: TrainEngine | FrozenPolicy, topk: int | None
    ) -> PolicyScores:
        """A pass without gradients over the whole batch."""
        seen = topk is not None
        spec = replace(self.head, topk=topk or 0, sketch=seen, entropy_grad=False)
        parts = [(mb, policy.forward(mb, _actor_ids(batch, mb, spec), spec)) for mb in batch.micro]
        return PolicyScores.collect(batch.sent.mask.shape, parts, batch.sent.mask.device)


def _nothing(forward: Forward) -> Tensor:
    """The loss 0 of a dummy: it adds nothing, but must join the other ranks' collectives. Every
    output that they differentiate must be in this graph too: ZeRO-3 gathers once for each, and the
    ranks would otherwise wait for each other until the deadline."""
    scores, kl = forward
    every = (scores.logp, scores.entropy, scores.logp_at_ids, kl)
    outputs = [t for t in every if t is not None and t.requires_grad]
    return 0.0 * torch.stack([t.sum() for t in outputs]).sum()


def _leaf(scores: Tensor) -> Tensor:
    return scores.detach().requires_grad_(scores.requires_grad)


def _one_forward(batch: StepBatch) -> bool:
    """Return whether one forward pass sees this rank's whole share, and so every rank's: all ranks
    have equally many micro-batches."""
    return len(batch.micro) == 1


def _actor_ids(batch: StepBatch, mb: MicroBatch, spec: HeadSpec) -> Tensor | None:
    """The actor's top ids [N, k] where the pass takes the learner's top k, probabilities on the
    sets that sampling kept or gradients at these ids, else None."""
    ids = batch.sent.topk_ids_inf
    if ids is None or not (spec.topk or spec.kept_sets or spec.ids_grad):
        return None
    return mb.flat(ids) if len(mb.episodes) else ids.new_full((len(mb.targets), ids.shape[2]), -1)


def _detached(scores: TokenScores) -> TokenScores:
    at = None if scores.logp_at_ids is None else scores.logp_at_ids.detach()
    logp, entropy = scores.logp.detach(), scores.entropy.detach()
    return replace(scores, logp=logp, entropy=entropy, logp_at_ids=at)
