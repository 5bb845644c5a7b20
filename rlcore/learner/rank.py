"""One rank of the learner: update phases, optimizer steps, supervised steps.

p_ref is the policy as an update phase began. The phase trains on its batches in order, each in an
optimizer step, and in several epochs if it has more steps than batches.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rlcore.learner.batch import (
    StepBatch,
    build_batch,
    positions,
    sample_log_ratios,
    staleness_split,
)
from rlcore.learner.build import build_parts
from rlcore.learner.estimates import read_twice, variance
from rlcore.learner.packing import EpisodeTokens, MicroBatch, dummy, pack
from rlcore.learner.selection import keep_accepted, selection_metrics
from rlcore.learner.sequences import ScoredSequence
from rlcore.learner.specs import LearnerJob, RankPlace
from rlcore.learner.state import RankState
from rlcore.learner.steps import take_step
from rlcore.learner.supervised import cross_entropy
from rlcore.seeding import derive_seed
from rlcore.types import POLICY, Group


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
        self._costs, self._tight = parts.costs, parts.tight
        self._most = parts.most
        self._read = parts.read
        #: which share of each batch is this rank's; others may hold parts of the same
        self._share = place.rank // job.learner.parts
        self._sharper = {
            task: job.sampling.temperature / own for task, own in job.task_temperatures.items()
        }
        self._phase: list[StepBatch] = []  # its batches, from their p_ref pass on
        self._taken = 0  # steps of the phase
        self._steps = 0  # that it has in all
        self._fresh = True  # no step of the phase has been taken: p_new is p_ref
        self._ref_seconds = 0.0

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

        `steps` of the phase; None: as many as batches. Those beyond them train on the batches again
        in the same order, under the same p_ref. Ranks may have unequal shares, also empty ones, but
        the same number of batches. `first=False`: the rest of a phase whose first step was taken
        before a checkpoint, so p_new is no longer p_ref.
        """
        start = time.monotonic()
        self._phase = [self._batch(groups) for groups in groups_per_step]
        self._taken = 0
        self._steps = len(self._phase) if steps is None else steps
        self._fresh = first
        self._update.prepare(self._phase, first=first, steps=self._steps)
        self._ref_seconds = time.monotonic() - start

    def _batch(self, groups: Sequence[Group]) -> StepBatch:
        """The batch of some groups, in micro-batches; of those responses that are trained on."""
        built = partial(
            build_batch,
            with_topk=self._update.topk > 0,
            device=self.engine.device,
            sharper=self._sharper,
            read=self._read,
        )
        batch = built(groups)
        batch.micro = self._micro_batches(batch.episodes)
        diffusion = self.job.diffusion
        if diffusion is not None:
            batch.twice = read_twice(groups, self._read, diffusion.prompt_masking)
        if self.job.keep_by_acceptance is None:
            return batch
        ref = self._update.score_ref(batch)
        chosen, rows = keep_accepted(groups, batch, ref, self.job.keep_by_acceptance)
        kept = built(chosen)
        kept.micro = self._micro_batches(kept.episodes)
        kept.ref = ref.rows(rows, kept.sent.mask.shape[1])  # p_ref's pass is not made twice
        kept.metrics = selection_metrics(batch, ref, rows, self._reduce)
        return kept

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
        what = f"optimizer step {step}"
        metrics = (
            batch.metrics
            | estimates
            | gradient.metrics
            | take_step(
                self.engine,
                gradient.sums,
                self._reduce,
                what=what,
                kept=gradient.kept,
                step_scale=gradient.step_scale,
            )
        )
        metrics |= staleness_split(batch, step, self._reduce)
        metrics |= positions(batch, self._reduce)
        if (replay := self.engine.policy.replay) is not None:
            metrics |= replay.metrics(self._reduce)
        metrics |= self._update.advantages.metrics(batch, self._reduce)
        metrics["time/learner_update_s"] = time.monotonic() - start
        # after the policy's own step, so that what is shared with it is as of now
        for companion in self.companions:
            metrics |= companion.step(batch, step, self._update.group_advantages(batch))
        metrics["time/learner_ref_s"] = self._ref_seconds if first else 0.0
        return metrics

    def log_ratios(
        self, samples: Sequence[tuple[int, int]]
    ) -> dict[tuple[int, int], list[float | None]]:
        """log p_ref - log p_inf of the tokens of those samples (group id, index) that this rank
        trains on in the current phase, after its first step. None: a token outside the safe set, or
        without a finite log-prob. Not collective."""
        found: dict[tuple[int, int], list[float | None]] = {}
        for batch in self._phase:
            if batch.ref is not None:
                found |= sample_log_ratios(batch.sent, batch.ref, samples)
        return found

    def load(self, folder: str | Path, *, keep_phase: bool = False) -> None:
        """Continue from `save`.

        `keep_phase`: the phase just begun stays (its p_ref was computed under other weights than
        those loaded); without it, a phase must be begun again.
        """
        super().load(folder)
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
        """Of the log-probs' estimate (`estimates.py`); nothing for a causal model, whose log-probs
        are exact. Collective."""
        if self.job.diffusion is None:
            return {}
        scored = [self.score(sequences) for sequences in batch.twice]
        pairs = [(torch.from_numpy(a), torch.from_numpy(b)) for a, b in zip(*scored)]
        return variance(pairs, self._reduce)

    def _seed(self, step: int) -> None:
        """A step's randomness depends on its number, so there is no state to save."""
        torch.manual_seed(derive_seed(self.job.run_seed, "learner", step, self._share))

    def _micro_batches(self, episodes: Sequence[EpisodeTokens]) -> list[MicroBatch]:
        """This rank's micro-batches, filled up with dummies to the largest count of any rank (at
        least one)."""
        pad, device = self.job.pad_id, self.engine.device
        offers = {"costs": self._costs, "tight": self._tight}
        micro = pack(episodes, self._most, self._layout, pad, device, **offers)
        wanted = int(self._reduce.max(torch.tensor(max(1, len(micro)))))
        return micro + [dummy(pad, device)] * (wanted - len(micro))
