"""One rank of the learner: update phases, optimizer steps, supervised steps.

p_ref is the policy as an update phase began. The phase trains on its batches in order, each in an
optimizer step, and in several epochs if it has more steps than batches.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor

from rlcore.corrections.numerics import total
from rlcore.corrections.obrs import obrs_acceptance
from rlcore.corrections.rapid import best_of_group
from rlcore.interfaces import Reduce
from rlcore.learner.batch import (
    PolicyScores,
    StepBatch,
    TokenTrace,
    build_batch,
    positions,
    recorded_scores,
    sample_details,
    sample_of,
    staleness_split,
)
from rlcore.learner.build import build_parts
from rlcore.learner.lm_head import HeadSpec
from rlcore.learner.metric_sums import LOSS, Sums, take_step
from rlcore.learner.packing import EpisodeTokens, MicroBatch, dummy, pack
from rlcore.learner.parts.part import LearnerPart
from rlcore.learner.protocols import TrainEngine
from rlcore.learner.sequences import ScoredSequence
from rlcore.learner.specs import LearnerJob, RankPlace
from rlcore.learner.state import RankState
from rlcore.learner.state_files import Schedule
from rlcore.learner.step_bound import BoundedSteps
from rlcore.seeding import derive_seed
from rlcore.types import POLICY, Group

# Plain cross-entropy is the log-likelihood of the untempered model.
TEMPERATURE = 1.0


def cross_entropy(
    engine: TrainEngine,
    examples: Sequence[EpisodeTokens],
    micro: Sequence[MicroBatch],
    reduce: Reduce,
    head: HeadSpec,
) -> Sums:
    """All backward passes of a step: the mean over the scored tokens of all ranks.

    `micro`: this rank's `examples`, filled up to the count of the other ranks with dummies. `head`:
    how the policy's head is computed; the temperature is 1.
    """
    sums = Sums.of_step({"loss/sft": LOSS}, examples, engine.device)
    tokens = sum(s.scored for parts in examples for s in parts)
    count = max(float(reduce(torch.tensor(float(tokens)))), 1.0)
    spec = HeadSpec(TEMPERATURE, head.chunk, fp32=head.fp32)
    for i, mb in enumerate(micro):
        scores = engine.forward(mb, None, spec)
        # a dummy adds nothing, but its backward joins the other ranks' collectives
        loss = -scores.logp.sum() / count * (1.0 if len(mb.episodes) else 0.0)
        engine.backward(loss, last=i == len(micro) - 1)
        if len(mb.episodes):
            nonfinite = (~torch.isfinite(scores.logp)).sum()
            entropy = scores.entropy.sum()
            sums.add({"loss/sft": loss, "entropy": entropy, "nonfinite_logp": nonfinite})
    return sums


def dense_acceptance(logp_ref: Tensor, logp_inf: Tensor, mask: Tensor) -> Tensor:
    """Mean of `min(1, p_ref/p_inf)` over each response's tokens, [B]: the share of them that
    rejection sampling towards the learner's policy would accept (DistillSparse, figure 4).

    Log-probs and mask [B, T]. A token without a usable log-prob counts as rejected, a response
    without tokens as accepted.
    """
    accepted = torch.where(mask, obrs_acceptance(logp_ref, logp_inf), 0.0).sum(-1)
    count = mask.sum(-1)
    return torch.where(count > 0, accepted / count.clamp(min=1), 1.0)


def keep_accepted(
    groups: Sequence[Group], batch: StepBatch, ref: PolicyScores, keep: int
) -> tuple[list[Group], Tensor]:
    """The groups with the `keep` responses of highest dense acceptance each, and the rows of
    `batch` [B] bool of these responses. `batch` was built from `groups`, `ref` are its scores. Ties
    go to the earlier sample. The kept responses do not follow the actor's policy any more, and
    nothing corrects for that. Advantages are normalised over them, and the gradient is biased
    towards what the learner finds likely.
    """
    acceptance = dense_acceptance(ref.logp, batch.sent.logp_inf, batch.sent.mask)
    kept = best_of_group(acceptance, batch.sent.group_ids, keep=keep)
    rows = iter(kept.tolist())
    return [replace(g, episodes=[e for e in g.episodes if next(rows)]) for g in groups], kept


def selection_metrics(
    batch: StepBatch, ref: PolicyScores, kept: Tensor, reduce: Reduce
) -> dict[str, float]:
    """Means over the responses of all ranks, before the selection and after it."""
    acceptance = dense_acceptance(ref.logp, batch.sent.logp_inf, batch.sent.mask)
    rewards = batch.sent.rewards
    everything = torch.ones_like(kept)
    values = [acceptance, acceptance.where(kept, 0.0), rewards.where(kept, 0.0), kept, everything]
    before, after, reward, count, all_count = total(values, reduce)
    return {
        "train/acceptance_mean": before / max(all_count, 1.0),
        "train/acceptance_kept_mean": after / max(count, 1.0),
        "train/reward_selected_mean": reward / max(count, 1.0),
    }


class LearnerRank(RankState):
    """This rank's share of the learner: training of the policy and its companions.

    Every method is collective: all ranks call it, in the same order.
    """

    def __init__(self, job: LearnerJob, place: RankPlace) -> None:
        """Joins the other ranks and loads the models. Raises UserError for a model that cannot be
        trained as the job asks."""
        parts = build_parts(job, place)
        super().__init__(job, place.rank, parts.engine, parts.companions)
        self._update = parts.update
        self._reduce = parts.reduce
        self._layout = parts.layout
        self.verdicts = parts.verdicts
        self._costs, self._tight = parts.costs, parts.tight
        self._most = parts.most
        self._read = parts.read
        self._estimator = parts.estimator
        #: which share of each batch is this rank's; others may hold parts of the same
        self._share = place.rank // job.learner.parts
        self._sharper = {
            task: job.sampling.temperature / own for task, own in job.task_temperatures.items()
        }
        follows = job.objective.ratio_to == "p_inf"
        first = job.learner.lr / (job.in_flight + 1) if job.in_flight else None
        bound = job.learner.step_bound
        self._bounded = BoundedSteps(bound, job.kinds, follows=follows, first=first)
        self._parts: tuple[LearnerPart, ...] = (*parts.others, *parts.companions, self._bounded)
        self._phase: list[StepBatch] = []  # its batches, from their p_ref pass on
        self._taken = 0  # steps of the phase
        self._steps = 0  # that it has in all
        self._fresh = True  # no step of the phase has been taken: p_new is p_ref
        self._ref_seconds = 0.0
        self._gradient_folder: Path | None = None  # of a traced step
        self._gradient: dict[str, float] = {}

    # ----- reinforcement learning -----

    def begin_phase(
        self,
        groups_per_step: Sequence[Sequence[Group]],
        *,
        steps: int | None = None,
        first: bool = True,
    ) -> None:
        """Take this rank's whole groups for each batch of an update phase, and compute what
        precedes its first step.

        `steps` of the phase; None: as many as batches. Further steps train on the batches again in
        the same order, with the same p_ref. Ranks may have unequal shares, also empty ones, but the
        same number of batches. `first=False`: the rest of a phase whose first step was taken before
        a checkpoint, so p_new is no longer p_ref.
        """
        start = time.monotonic()
        self._phase = [self._batch(groups) for groups in groups_per_step]
        self._taken = 0
        self._steps = len(self._phase) if steps is None else steps
        self._fresh = first
        for part in self._parts:
            part.begin(self._phase, self._micro_batches)
        self._update.prepare(self._phase, first=first, steps=self._steps)
        self._ref_seconds = time.monotonic() - start

    def _batch(self, groups: Sequence[Group]) -> StepBatch:
        """The batch of some groups, in micro-batches, with the responses that are trained on."""
        batch = self._built(groups)
        batch.micro = self._micro_batches(batch.episodes)
        if self._estimator is not None:
            batch.twice = self._estimator.twice(groups)
        if self.job.keep_by_acceptance is None:
            return batch
        ref = self._update.score_ref(batch)
        chosen, rows = keep_accepted(groups, batch, ref, self.job.keep_by_acceptance)
        kept = self._built(chosen)
        kept.micro = self._micro_batches(kept.episodes)
        kept.ref = ref.rows(rows, kept.sent.mask.shape[1])  # p_ref's pass is not made twice
        kept.metrics = selection_metrics(batch, ref, rows, self._reduce)
        return kept

    def _built(self, groups: Sequence[Group]) -> StepBatch:
        """Their tensors, with the scores that records have of a teacher's engine."""
        batch = build_batch(
            groups,
            with_topk=self._update.topk > 0,
            kept_sets=self._update.head.kept_sets,
            device=self.engine.device,
            sharper=self._sharper,
            read=self._read,
            kinds=self.job.kinds,
            by_position=self.job.by_position,
        )
        teacher = self.job.teacher
        if teacher.kind == "engine" and teacher.top_k is not None:
            batch.teacher = recorded_scores(groups, batch.sent.mask, teacher.top_k)
        return batch

    def train_step(self, step: int) -> dict[str, float]:
        """The optimizer step that turns version `step` into `step + 1`, on the phase's next batch.

        Returns global metrics, the same on every rank (times are this rank's). Raises StageError,
        before anything is updated, when a loss or a gradient is not finite.
        """
        start = time.monotonic()
        self._seed(step)
        if self._taken == self._steps:
            raise RuntimeError(f"optimizer step {step} is beyond the phase of {self._steps} steps")
        batch, first = self._phase[self._taken % len(self._phase)], self._fresh
        batch.ref_is_old = not first
        self._fresh = False
        self._taken += 1
        estimates = self._estimate_variance(batch)
        gradient = self._update.run(batch, step, first=first)
        batch.advantages = gradient.advantages
        bound = self._bounded.scale(
            batch, step, self.engine, self._reduce, first=first, wanted=gradient.step_scale
        )
        if self._gradient_folder is not None:
            self._gradient = self._looked_at(self._gradient_folder)
        what = f"optimizer step {step}"
        metrics = (
            batch.metrics
            | estimates
            | gradient.metrics
            | bound.metrics
            | take_step(
                self.engine,
                gradient.sums,
                self._reduce,
                what=what,
                kept=gradient.kept,
                step_scale=gradient.step_scale * bound.scale,
                held=bound.held,
            )
        )
        self._bounded.took(step, metrics["lr"])
        metrics |= staleness_split(batch, step, self._reduce, self.job.kinds)
        metrics |= positions(batch, self._reduce)
        for part in self._parts:
            metrics |= part.metrics(self._reduce)
        metrics |= self._update.advantages.metrics(batch, self._reduce)
        metrics["time/learner_update_s"] = time.monotonic() - start
        # after the policy's own step, so that shared tensors are up to date
        for companion in self.companions:
            metrics |= companion.step(batch, step, gradient.advantages)
        metrics["time/learner_ref_s"] = self._ref_seconds if first else 0.0
        return metrics

    def sample_details(
        self, samples: Sequence[tuple[int, int]]
    ) -> dict[tuple[int, int], dict[str, Any]]:
        """`batch.sample_details` of those samples that this rank trains on in the current phase,
        after its first step. Not collective."""
        found: dict[tuple[int, int], dict[str, Any]] = {}
        for batch in self._phase:
            found |= sample_details(batch, samples)
        return found

    def traced_step(
        self, step: int, folder: str | None = None
    ) -> tuple[dict[str, float], dict[tuple[int, int], dict[str, list[float]]], dict[str, float]]:
        """`train_step`, and the part of each sampled token in its loss by (group id, sample): the
        derivative "slope" of the loss by log p_new, and "weight", "kept" and "advantage".

        `folder`: the gradient of the parameters is written there, or compared with the one that is
        there already: the third part of the result. The samples are this rank's, all else is
        global. Collective.
        """
        trace: list[TokenTrace] = []
        self._update.trace = trace
        self._gradient_folder = None if folder is None else Path(folder)
        batch = self._phase[self._taken % len(self._phase)]
        metrics = self.train_step(step)
        self._update.trace, self._gradient_folder = None, None
        found: dict[tuple[int, int], dict[str, list[float]]] = {}
        for part in trace:
            for at, row in enumerate(part.rows.tolist()):
                on = batch.sent.mask[row]
                columns = {
                    "slope": part.slope[at],
                    "weight": part.weight[at],
                    "kept": part.mask[at],
                    "advantage": part.advantages[at],
                }
                values = {name: column[on].double().tolist() for name, column in columns.items()}
                found[sample_of(batch.sent, row)] = values
        return metrics, found, self._gradient

    def _looked_at(self, folder: Path) -> dict[str, float]:
        """Write the accumulated gradient, or compare it with the one written: their cosine and
        norms, on rank 0. One tensor is in memory at a time. Collective."""
        exists, sums = folder.exists(), np.zeros(3)
        if self.rank == 0:
            folder.mkdir(exist_ok=True)
        for number, (_, gradient) in enumerate(self.engine.full_gradients()):
            if self.rank == 0:
                own, file = gradient.cpu().numpy(), folder / f"{number:06d}.safetensors"
                if not exists:
                    save_file({"gradient": own}, file)
                else:
                    a, b = (
                        g.astype(np.float64).ravel() for g in (load_file(file)["gradient"], own)
                    )
                    sums += (a @ b, a @ a, b @ b)
        if not exists or self.rank:
            return {}
        dot, squares, others = sums.tolist()
        found = {"executed_norm": squares**0.5, "norm": others**0.5}
        return found | ({"cosine": dot / (squares * others) ** 0.5} if squares * others else {})

    def save(self, folder: str | Path, run: Schedule | None = None) -> None:
        """Also what the update has seen, and the state of every part."""
        schedule = run or (lambda write: write())
        if self.rank == 0:
            schedule(partial(Path(folder).mkdir, parents=True, exist_ok=True))
            self._update.save(Path(folder), schedule)
            for part in self._parts:
                part.save(Path(folder), schedule)
        super().save(folder, run)

    def load(self, folder: str | Path, *, keep_phase: bool = False) -> None:
        """Continue from `save`.

        `keep_phase`: the phase that was just begun stays (its p_ref was computed before the weights
        are loaded); without it, a phase must be begun again.
        """
        super().load(folder)
        self._update.load(Path(folder))
        for part in self._parts:
            part.load(Path(folder))
        if not keep_phase:
            self._phase = []
            self._steps = self._taken

    def release(self) -> tuple[int, int]:
        """Also the batches of a phase that is over."""
        if self._taken == self._steps:
            self._phase = []
        return super().release()

    def load_frozen(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace some weights of the frozen policy that KL is taken to (Hugging Face names)."""
        if self._update.frozen is None:
            raise RuntimeError("this learner has no frozen policy")
        self._update.frozen.load(tensors)

    # ----- supervised learning and scoring -----

    def sft_step(self, step: int, examples: Sequence[ScoredSequence]) -> dict[str, float]:
        """One optimizer step of cross-entropy on this rank's examples.

        The loss is the mean over the scored tokens of all ranks, at temperature 1. Returns global
        metrics; raises StageError as `train_step` does.
        """
        start = time.monotonic()
        self._seed(step)
        episodes = [(example,) for example in examples]
        micro = self._micro_batches(episodes)
        sums = cross_entropy(self.engine, episodes, micro, self._reduce, self._update.head)
        metrics = take_step(self.engine, sums, self._reduce, what=f"optimizer step {step}")
        return metrics | {"time/learner_update_s": time.monotonic() - start}

    @torch.no_grad()
    def score(self, sequences: Sequence[ScoredSequence], *, of: str = POLICY) -> list[np.ndarray]:
        """Log-probs [S] float32 of each sequence's sampled tokens, as training takes them.

        `of`: the policy, or a companion by its name.
        """
        engine = self.engine_of(of)
        out = [np.zeros(s.scored, dtype=np.float32) for s in sequences]
        for mb in self._micro_batches([(s,) for s in sequences]):
            logp = engine.forward(mb, None, self._update.head).logp
            for row, index in enumerate(mb.episodes.tolist()):
                out[index] = logp[mb.row == row].cpu().numpy()
        return out

    def _estimate_variance(self, batch: StepBatch) -> dict[str, float]:
        """Return the `estimate/*` metrics; none where log-probs are exact. Collective."""
        if self._estimator is None:
            return {}
        one, two = (self.score(sequences) for sequences in batch.twice)
        return self._estimator.metrics(list(zip(one, two)), self._reduce)

    def _seed(self, step: int) -> None:
        """A step's randomness depends on its number, so no state needs saving."""
        torch.manual_seed(derive_seed(self.job.run_seed, "learner", step, self._share))

    def _micro_batches(self, episodes: Sequence[EpisodeTokens]) -> list[MicroBatch]:
        """This rank's micro-batches, filled up with dummies to the largest count of any rank (at
        least one)."""
        pad, device = self.job.pad_id, self.engine.device
        offers = {"costs": self._costs, "tight": self._tight}
        micro = pack(episodes, self._most, self._layout, pad, device, **offers)
        wanted = int(self._reduce.max(torch.tensor(max(1, len(micro)))))
        return micro + [dummy(pad, device)] * (wanted - len(micro))
