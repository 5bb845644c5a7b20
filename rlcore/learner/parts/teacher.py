"""The teacher of a policy in the learner's ranks: its scores of a batch, and what the policy's loss
and the metrics have of them.

The teacher is a frozen model (one a task, or one for all), or the policy as it was some steps ago
or as the phase began. It may also be an engine, which has scored the records as they arrived. A
context stands before an episode in the teacher's own pass only, behind the prompt. `best` is an
answer of the group with a higher reward, `feedback` the episode's later observations. An episode
without such a context, or that would not fit, or goes on in a further record, has no teacher.

Scores are taken once a phase, before its first step, as p_ref is: the teacher's likeliest tokens
and the sampled one. With `top_k=null` the teacher's hidden states are taken with each
differentiated pass instead, and the distance is over the whole vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlcore.interfaces import Reduce
from rlcore.learner.batch import StepBatch, TeacherScores
from rlcore.learner.lm_head import HeadSpec, TeacherTarget, TopkTarget
from rlcore.learner.packing import EpisodeTokens, MicroBatch
from rlcore.learner.parts.part import LearnerPart
from rlcore.learner.policy import FrozenPolicy
from rlcore.learner.protocols import TrainEngine
from rlcore.learner.sequences import TokenSequence
from rlcore.learner.specs import LearnerJob
from rlcore.learner.state_files import Schedule
from rlcore.objectives.distillation import rest_mass, sampled_rest
from rlcore.objectives.protocols import LossTensors

if TYPE_CHECKING:
    from rlcore.learner.parts.part import LayOut

FILE = "teacher.safetensors"  # of a saved state: weights of kind=previous
_TURN = "turn"  # in that file, beside the weights: how often it has been refreshed
QUARTERS = 4


class Teacher(LearnerPart):
    """Scores batches, and gives the loss each token's distance."""

    def __init__(
        self,
        job: LearnerJob,
        models: Mapping[str, TrainEngine | FrozenPolicy],
        policy: TrainEngine,
        reduce: Reduce,
    ) -> None:
        """`models`: by task; "" serves all other tasks."""
        self.spec = job.teacher
        self._models = models
        self._policy = policy
        self._reduce = reduce
        self._k = self.spec.top_k
        self._head = HeadSpec(
            job.sampling.temperature,
            job.learner.head_chunk_tokens,
            topk=self._k or 0,
            fp32=job.learner.exact_head,
        )
        self._turn: int | None = None  # of kind=previous; None: as the run began
        self._seconds = 0.0
        self._engine_seconds = 0.0
        self._sums: Tensor | None = None

    def begin(self, phase: Sequence[StepBatch], lay_out: LayOut) -> None:
        self.follow()
        for batch in phase:
            self.score(batch, lay_out)

    # ----- its weights -----

    def follow(self) -> None:
        """As a phase begins: kind=previous takes over the policy, if that is due. Collective."""
        if self.spec.kind != "previous":
            return
        turn = self._policy.optimizer_steps // self.spec.refresh_steps
        if self._turn is not None and turn > self._turn:
            for name, weight in self._policy.weights():
                self._previous.load({name: weight})
        self._turn = turn

    @property
    def _previous(self) -> FrozenPolicy:
        model = self._models[""]
        assert isinstance(model, FrozenPolicy)
        return model

    def save(self, folder: Path, schedule: Schedule) -> None:
        """On rank 0: the weights of kind=previous, which nothing else has."""
        if self.spec.kind != "previous" or self._turn is None:
            return
        held = self._previous.policy.lm.named_parameters()
        state = {name: p.detach().cpu().clone() for name, p in held}
        state[_TURN] = torch.tensor(self._turn)
        schedule(partial(folder.mkdir, parents=True, exist_ok=True))
        schedule(partial(save_file, state, folder / FILE))

    def load(self, folder: Path) -> None:
        """Take back what `save` wrote; without such a file the teacher begins with the run."""
        if self.spec.kind != "previous" or not (folder / FILE).is_file():
            return
        state = load_file(folder / FILE)
        self._turn = int(state.pop(_TURN))
        self._previous.load(state)

    # ----- its scores -----

    @torch.no_grad()
    def score(self, batch: StepBatch, lay_out: LayOut) -> None:
        """Fill `batch.teacher`. `lay_out`: this rank's micro-batches of some episodes, as many as
        every other rank has. Collective."""
        if self.spec.kind == "engine":  # records have brought them
            self._engine_seconds += _of(batch).engine_s
            return
        start = time.monotonic()
        found = TeacherScores.nothing(batch.sent.mask, self._k or 0)
        batch.teacher = found
        if self._k is None:
            found.on |= batch.sent.mask
            return
        read = self._read(batch)
        for task, model in self._models.items():
            others = set(self._models) - {""}
            mine = [t == task if task else t not in others for t in batch.tasks]
            for mb in lay_out([parts if own else () for parts, own in zip(read, mine)]):
                scores = model.forward(mb, None, self._head)
                if not len(mb.episodes):
                    continue
                at = mb.episodes[mb.row], mb.column
                found.on[at] = True
                found.logp[at] = scores.logp.to(found.logp)
                if scores.topk_ids is not None and scores.topk_logp is not None:
                    k = scores.topk_ids.shape[1]  # a small vocabulary has fewer
                    found.ids[(*at, slice(k))] = scores.topk_ids
                    found.logp_at[(*at, slice(k))] = scores.topk_logp.to(found.logp_at)
        self._seconds += time.monotonic() - start

    def _read(self, batch: StepBatch) -> list[EpisodeTokens]:
        """The batch's episodes as the teacher reads them; empty: one without a teacher."""
        if self.spec.context == "none":
            return batch.episodes
        contexts = _best(batch) if self.spec.context == "best" else map(_feedback, batch.episodes)
        lm: Any = self._policy.policy.lm
        config = lm.config.get_text_config()
        room = getattr(config, "max_position_embeddings", None)
        return [_behind(context, parts, room) for context, parts in zip(contexts, batch.episodes)]

    # ----- the loss -----

    def target(self, batch: StepBatch, mb: MicroBatch) -> TeacherTarget:
        """The teacher as the policy's differentiated pass over a micro-batch takes it."""
        if self._k is None:
            start, model = time.monotonic(), self._models[""]
            assert isinstance(model, FrozenPolicy)
            whole = model.base(mb)
            self._seconds += time.monotonic() - start
            return TeacherTarget(self.spec, whole)
        scores = _of(batch)
        if len(mb.episodes):
            return TeacherTarget(
                self.spec, TopkTarget(mb.flat(scores.ids), mb.flat(scores.logp_at))
            )
        ids = scores.ids.new_full((len(mb.targets), self._k), -1)
        nothing = scores.logp_at.new_full(ids.shape, -torch.inf)
        return TeacherTarget(self.spec, TopkTarget(ids, nothing))

    # seven parameters: what a micro-batch's loss has of the step
    def distance(
        self,
        batch: StepBatch,
        mb: MicroBatch,
        pair: Tensor,
        tokens: LossTensors,
        states: Tensor,
        ratio: Tensor,
    ) -> Tensor:
        """Each token's distance [b, T] in the loss, with the gradient.

        pair [N, 2]: of the pass. states, ratio [b, T]: weights of what is known of a state, and of
        what is estimated from its sampled token.
        """
        scores, rows, width = _of(batch), mb.episodes, tokens.mask.shape[1]
        dense = mb.dense(pair, width)
        distance = dense[..., 0] * states
        if self._k is not None and self.spec.tail == "sampled":
            sampled = mb.dense(mb.targets, width)
            listed = (scores.ids[rows] == sampled[..., None]).any(-1) | ~scores.on[rows]
            distance = distance + sampled_rest(tokens.logp_new, scores.logp[rows], listed, ratio)
        distance = torch.where(scores.on[rows], distance, 0.0)
        self._count(batch, mb, distance.detach(), dense[..., 1].detach(), tokens.mask)
        return distance

    # ----- metrics -----

    def _count(
        self, batch: StepBatch, mb: MicroBatch, distance: Tensor, same: Tensor, mask: Tensor
    ) -> None:
        """Add a micro-batch's tokens: by quarter of their answer the count and the distance. Then
        come agreements, the teacher's mass elsewhere, tokens with a teacher and all of the loss,
        and episodes with a token that has none."""
        scores, rows = _of(batch), mb.episodes
        kept = mask.bool()
        on = kept & scores.on[rows]
        lengths = batch.sent.mask[rows].sum(1, keepdim=True).clamp(min=1)
        quarter = torch.arange(kept.shape[1], device=kept.device) * QUARTERS // lengths
        in_each = [on & (quarter == q) for q in range(QUARTERS)]
        rest = torch.zeros_like(distance)
        if self._k is not None:
            rest = rest_mass(scores.logp_at[rows], scores.ids[rows]).to(distance)
        sums = [
            *(of.sum() for of in in_each),
            *(distance[of].double().sum() for of in in_each),
            (same * on).sum(),
            (rest * on).sum(),
            on.sum(),
            kept.sum(),
            (batch.sent.mask[rows] & ~scores.on[rows]).any(1).sum(),
        ]
        added = torch.stack([s.double() for s in sums])
        self._sums = added if self._sums is None else self._sums + added

    def metrics(self, reduce: Reduce) -> dict[str, float]:
        """The metrics of the tokens since the last call, over all ranks. Collective."""
        empty = torch.zeros(2 * QUARTERS + 5, dtype=torch.float64, device=self._policy.device)
        own = empty if self._sums is None else self._sums
        sums = reduce(torch.cat([own, own.new_tensor([self._engine_seconds])])).tolist()
        self._sums = None
        counts, distances = sums[:QUARTERS], sums[QUARTERS : 2 * QUARTERS]
        same, rest, on, kept, unscored, engine_s = sums[2 * QUARTERS :]
        found = {
            "teacher/divergence": sum(distances) / max(on, 1.0),
            "teacher/token_share": on / max(kept, 1.0),
            "teacher/unscored": unscored,
            "time/learner_teacher_s": self._seconds,
        }
        for q, (count, distance) in enumerate(zip(counts, distances), 1):
            found[f"teacher/divergence_quarter_{q}"] = distance / max(count, 1.0)
        if self._k is None or self._k > 0:
            found["teacher/top1_agreement"] = same / max(on, 1.0)
        if self._k is not None:
            found["teacher/tail_mass"] = rest / max(on, 1.0)
        if self.spec.kind == "engine":
            found["time/teacher_engine_s"] = engine_s
        self._seconds = self._engine_seconds = 0.0
        return found


def _of(batch: StepBatch) -> TeacherScores:
    if batch.teacher is None:
        raise RuntimeError("a distance before the teacher has scored the batch")
    return batch.teacher


def _best(batch: StepBatch) -> list[np.ndarray | None]:
    """Of each episode: prompt and best answer of its group, where that has a higher reward."""
    rewards, ids = batch.sent.rewards.tolist(), batch.sent.group_ids.tolist()
    best: dict[int, int] = {}
    for row, (group, reward) in enumerate(zip(ids, rewards)):
        if group not in best or reward > rewards[best[group]]:
            best[group] = row
    found: list[np.ndarray | None] = []
    for group, reward in zip(ids, rewards):
        sequence = _alone(batch.episodes[best[group]])
        better = rewards[best[group]] > reward
        found.append(sequence.token_ids if better and sequence is not None else None)
    return found


def _feedback(parts: EpisodeTokens) -> np.ndarray | None:
    """The prompt and the later observations of an episode, where there are any."""
    sequence = _alone(parts)
    if sequence is None:
        return None
    seen = ~np.asarray(sequence.sampled, bool)
    return sequence.token_ids[seen] if seen[sequence.prompt_len :].any() else None


def _behind(context: np.ndarray | None, parts: EpisodeTokens, room: int | None) -> EpisodeTokens:
    """An episode behind a context; nothing where it has none, or both are longer than `room`."""
    sequence = _alone(parts)
    if context is None or sequence is None:
        return ()
    if room is not None and len(context) + len(sequence.token_ids) > room:
        return ()
    ids = np.concatenate([context, sequence.token_ids])
    sampled = np.concatenate([np.zeros(len(context), bool), np.asarray(sequence.sampled, bool)])
    return (TokenSequence(ids, sampled, sequence.sharper),)


def _alone(parts: EpisodeTokens) -> TokenSequence | None:
    """The record of an episode that has one."""
    first = parts[0] if len(parts) == 1 else None
    return first if isinstance(first, TokenSequence) else None
