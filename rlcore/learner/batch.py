"""A rank's share of one optimizer step as tensors: the records of the actors, and the scores of the
learner's passes.

Rows are episodes, columns their sampled tokens over all turns and parts, in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlcore.corrections.numerics import total
from rlcore.corrections.pipeline import present_kinds
from rlcore.interfaces import Reduce
from rlcore.learner.packing import EpisodeTokens, MicroBatch
from rlcore.learner.sequences import Reader, ScoredSequence, of_episode, read_next_tokens
from rlcore.objectives.values import Estimates, States
from rlcore.spec import refuse
from rlcore.types import (
    TEACHER,
    TEACHER_S,
    Episode,
    Group,
    PageRule,
    SamplingSpec,
    StepTensors,
    TokenScores,
    Trajectory,
    actor_label,
    at_kind,
)

# probability that the stored tokens of a whole kept set have together, but for rounding
KEPT_MASS = 1 - 1e-5
MOST_UNSTORED = 0.01  # of a batch's tokens
_SAMPLES = 1 << 20  # more than any group has: sample ids are group_id * _SAMPLES + sample_index


@dataclass(slots=True)
class PolicyScores:
    """TokenScores of every token of a step, right-padded: [B, T] or [B, T, k]; 0 without a
    token."""

    logp: Tensor
    entropy: Tensor
    topk_ids: Tensor | None = None
    topk_logp: Tensor | None = None
    logp_at_ids: Tensor | None = None
    inside: Tensor | None = None
    coverage: Tensor | None = None
    sketch: Tensor | None = None

    @classmethod
    def collect(
        cls,
        shape: torch.Size,
        parts: Sequence[tuple[MicroBatch, TokenScores]],
        device: torch.device,
    ) -> PolicyScores:
        """Make the scores of a step from the scores of micro-batches that together cover it."""
        # as wide as the scores: float32, or float64 where a policy is
        dtype = parts[0][1].logp.dtype if parts else torch.float32
        empty = torch.zeros(shape, dtype=dtype, device=device)
        out = cls(empty, empty.clone())
        for mb, scores in parts:
            for name, values in _present(scores, cls):
                if getattr(out, name) is None:
                    setattr(out, name, values.new_zeros((*shape, *values.shape[1:])))
                if len(mb.episodes):
                    getattr(out, name)[mb.episodes[mb.row], mb.column] = values
        return out

    def rows(self, chosen: Tensor, width: int) -> PolicyScores:
        """The scores of some episodes [B] bool, cut to the longest of them."""
        values: dict[str, Any] = {}
        for name in self.__dataclass_fields__:
            its = getattr(self, name)
            values[name] = None if its is None else its[chosen, :width]
        return PolicyScores(**values)

    @classmethod
    def of(cls, mb: MicroBatch, scores: TokenScores, width: int) -> PolicyScores:
        """The scores of one micro-batch's episodes, [b, width]."""
        return cls(**{name: mb.dense(values, width) for name, values in _present(scores, cls)})


def _present(scores: TokenScores, fields: type[PolicyScores]) -> list[tuple[str, Tensor]]:
    pairs = [(name, getattr(scores, name)) for name in fields.__dataclass_fields__]
    return [(name, values.detach()) for name, values in pairs if values is not None]


@dataclass(frozen=True, slots=True)
class TurnSpans:
    """The turns of a step's episodes: at most K of any of them.

    Example, an episode of two turns and three tokens: TurnSpans(tensor([[-0.5, 1.0]]), tensor([2]),
    tensor([[0, 0, 1]]), tensor([[0.0, -0.5, 1.0]]))
    """

    rewards: Tensor  # [B, K] float64, 0 behind an episode's last turn
    count: Tensor  # [B] int64
    of_token: Tensor  # [B, T] int64: the turn that sampled each token; 0 where there is none
    token_rewards: Tensor  # [B, T] float64; a turn's, where only turns were rewarded, on its last

    def ending_with(self, rewards: Tensor, tokens: Tensor) -> TurnSpans:
        """These turns with further rewards [B], each added at the last token of its episode [B]."""
        turns, by_token = self.rewards.clone(), self.token_rewards.clone()
        row = torch.nonzero(tokens > 0)[:, 0]  # an episode without a token has no last one
        turns[row, self.count[row] - 1] += rewards[row].to(turns)
        by_token[row, tokens[row] - 1] += rewards[row].to(by_token)
        return replace(self, rewards=turns, token_rewards=by_token)

    def less(self, to_go: Tensor) -> TurnSpans:
        """These turns less a penalty by token: `to_go` [B, T] float64 is its sum from each token
        on. Rewards of turns do not change."""
        following = torch.cat([to_go[:, 1:], to_go.new_zeros(len(to_go), 1)], dim=1)
        return replace(self, token_rewards=self.token_rewards - (to_go - following))


@dataclass(slots=True)
class TeacherScores:
    """A teacher's log-probs of a batch's tokens, [B, T] or [B, T, k]."""

    on: Tensor  # bool: the token has a teacher
    logp: Tensor  # of the sampled token; 0 without a teacher
    ids: Tensor  # int64, its likeliest tokens; -1 without one
    logp_at: Tensor  # their log-probs; -inf without one
    engine_s: float = 0.0  # seconds in which a teacher's engines took them

    @classmethod
    def nothing(cls, mask: Tensor, k: int) -> TeacherScores:
        """Of a batch before it is scored. mask [B, T]."""
        shape, device = mask.shape, mask.device
        return cls(
            torch.zeros(shape, dtype=torch.bool, device=device),
            torch.zeros(shape, device=device),
            torch.full((*shape, k), -1, device=device),
            torch.full((*shape, k), -torch.inf, device=device),
        )


@dataclass(slots=True)
class StepBatch:
    """One rank's whole groups of a step: B episodes of at most T sampled tokens. B may be 0."""

    episodes: list[EpisodeTokens]
    sent: StepTensors  # from actors and graders; the learner's log-probs are zeros here
    arrival_version: Tensor  # [B] int32
    turns: TurnSpans
    tasks: tuple[str, ...] = ()  # of the episodes [B], as their prompt ids say
    # dummies at the end: as many as every other rank has
    micro: list[MicroBatch] = field(default_factory=list)
    ref: PolicyScores | None = None  # under the policy that entered the update phase
    ref_is_old: bool = False  # steps of the phase were taken between `ref` and this batch's step
    base: PolicyScores | None = None  # under the frozen starting policy
    advantages: Tensor | None = None  # [B, T] of its last step, before corrections replace them
    values: Tensor | None = None  # [B, T] of a critic, as the phase began
    states: States | None = None  # that a critic values
    estimates: Estimates | None = None  # of these states, what the critic is trained on
    teacher: TeacherScores | None = None  # as the phase began
    metrics: dict[str, float] = field(default_factory=dict)  # of how its episodes were chosen
    unstored: int = 0  # tokens whose kept set is not in their record (`KEPT_MASS`)
    # where log-probs are estimates: some of its records under two draws (`LogProbEstimator.twice`)
    twice: tuple[Sequence[ScoredSequence], Sequence[ScoredSequence]] = ((), ())

    @property
    def tokens(self) -> int:
        """Sampled tokens."""
        return sum(s.scored for parts in self.episodes for s in parts)


@dataclass(frozen=True, slots=True)
class TokenTrace:
    """The part of each token in a step's loss, of some episodes of a batch, [b, T]."""

    rows: Tensor  # [b]: the episodes
    slope: Tensor  # d loss / d log p_new
    weight: Tensor  # of the corrections
    mask: Tensor  # tokens in the loss
    advantages: Tensor


def observed(
    sent: StepTensors,
    at: tuple[int, int],
    advantages: Tensor,
    ref: PolicyScores,
    new: PolicyScores,
) -> StepTensors:
    """Return the tensors that corrections see: `sent` with the learner's scores under p_ref and
    p_new. `at`: the optimizer step, and the version of p_ref."""
    step, ref_version = at
    return replace(
        sent,
        step=step,
        ref_version=ref_version,
        advantages=advantages,
        logp_ref=ref.logp,
        logp_new=new.logp,
        ref_topk_ids=ref.topk_ids,
        ref_topk_logp=ref.topk_logp,
        ref_logp_at_inf_ids=ref.logp_at_ids,
        new_topk_ids=new.topk_ids,
        new_topk_logp=new.topk_logp,
        new_logp_at_inf_ids=new.logp_at_ids,
        ref_inside=ref.inside,
        new_inside=new.inside,
        coverage=ref.coverage,
        sketch=ref.sketch,
        new_sketch=new.sketch,
    )


def sample_details(
    batch: StepBatch, samples: Sequence[tuple[int, int]]
) -> dict[tuple[int, int], dict[str, Any]]:
    """Details of the episodes (group id, sample index) that this rank has. "log_ratio" is log p_ref
    less log p_inf of each sampled token, None where there is none. After the batch's step there
    is also "advantage", the mean over the episode's tokens. Empty before p_ref is known."""
    sent, ref = batch.sent, batch.ref
    if ref is None:
        return {}
    rows = {name: row for row, name in enumerate(sent.sample_ids.tolist())}
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for group_id, index in samples:
        row = rows.get(group_id * _SAMPLES + index)
        if row is None:
            continue
        on = sent.mask[row]
        ratios = (ref.logp[row] - sent.logp_inf[row])[on]
        usable = torch.isfinite(ratios)
        if ref.inside is not None:
            usable &= ref.inside[row][on]
        pairs = zip(ratios.tolist(), usable.tolist())
        details: dict[str, Any] = {"log_ratio": [round(r, 4) if ok else None for r, ok in pairs]}
        if batch.advantages is not None and bool(on.any()):
            details["advantage"] = round(float(batch.advantages[row][on].double().mean()), 4)
        found[group_id, index] = details
    return found


def sample_of(sent: StepTensors, row: int) -> tuple[int, int]:
    """(group id, sample index) of an episode."""
    group_id, index = divmod(int(sent.sample_ids[row]), _SAMPLES)
    return group_id, index


def build_batch(
    groups: Sequence[Group],
    *,
    with_topk: bool,
    device: torch.device,
    kept_sets: bool = False,
    sharper: Mapping[str, float] | None = None,
    read: Reader = read_next_tokens,
    kinds: Sequence[str] = (),
    by_position: bool = False,
) -> StepBatch:
    """Tensors of one rank's groups. `sharper`: of the tokens of each task (`TokenSequence`).
    `read`: how the model reads a record. `kinds`: labels of the run's actors, where it
    distinguishes them; an episode of another label is counted as the kind after the last.
    `by_position`: some actors keep pages by position (`StepTensors.stretch`).
    `kept_sets`: sampling was truncated; a token whose kept set is not stored whole has no usable
    log-prob, since the learner cannot condition on that set.

    Raises ValueError for an episode without a reward: buffers leave those out.
    """
    episodes = [e for g in groups for e in g.episodes]
    for e in episodes:
        if e.score.reward is None:
            raise ValueError(f"episode {e.parts[0].request_id} has no reward to be trained on")
    rewards = [e.score.reward for e in episodes if e.score.reward is not None]
    rows = _EpisodeRows(episodes, device)
    # the learner's log-probs have the shape of the actors' and are filled in by its passes
    logp_inf = rows.tokens("logp_inf", 0.0, np.float32)
    sent = StepTensors(
        mask=rows.mask,
        logp_inf=logp_inf,
        logp_ref=torch.zeros_like(logp_inf),
        logp_new=torch.zeros_like(logp_inf),
        rewards=rows.column(rewards, torch.float64),
        group_ids=rows.column([e.score.group_id for e in episodes], torch.int64),
        advantages=torch.zeros_like(logp_inf),
        token_version=rows.tokens("token_version", 0, np.int32),
        sample_ids=rows.column(
            [e.score.group_id * _SAMPLES + e.sample_index for e in episodes], torch.int64
        ),
        step=0,
        truncated=rows.column(
            [e.parts[-1].finish_reason == "length" for e in episodes], torch.bool
        ),
        token_ids=rows.tokens("sampled_ids", 0, np.int64),
        repeats=rows.repeats() if read is read_next_tokens else None,
    )
    if kinds:
        numbers = {label: number for number, label in enumerate(kinds)}
        labels = [actor_label(e.parts[0].actor_id) for e in episodes]
        sent.kinds = rows.column([numbers.get(n, len(kinds)) for n in labels], torch.int64)
    if by_position:
        sent.stretch = rows.stretches()
    if with_topk:
        # at least one column, so that every rank has the same tensors whatever its share
        k = max([1, *(t.topk_ids.shape[1] for e in episodes for t in e.parts)])
        sent.topk_ids_inf = rows.tokens("topk_ids", -1, np.int64, k)
        sent.topk_logp_inf = rows.tokens("topk_logp", -np.inf, np.float32, k)
    unstored = 0
    if kept_sets:
        whole = rows.whole_sets()
        unstored = int((sent.mask & ~whole).sum())
        assert sent.topk_ids_inf is not None
        sent.topk_ids_inf.masked_fill_(~whole[..., None], -1)
        sent.logp_inf = sent.logp_inf.masked_fill(~whole, torch.nan)
    arrival = rows.column([g.arrival_version for g in groups for _ in g.episodes], torch.int32)
    tasks = tuple(g.prompt_id.partition("/")[0] for g in groups for _ in g.episodes)
    sharpness = [(sharper or {}).get(task, 1.0) for task in tasks]
    tokens: list[EpisodeTokens] = [of_episode(e, s, read) for e, s in zip(episodes, sharpness)]
    return StepBatch(tokens, sent, arrival, rows.turns(), tasks, unstored=unstored)


def recorded_scores(groups: Sequence[Group], mask: Tensor, k: int) -> TeacherScores:
    """The scores that a teacher's engine has given records, of at most k likeliest tokens; a record
    without any has no teacher. mask [B, T]: tokens of the groups' batch."""
    found = TeacherScores.nothing(mask, k)
    for row, episode in enumerate(e for group in groups for e in group.episodes):
        start = 0
        for part in episode.parts:
            own = row, slice(start, start + len(part.logp_inf))
            start = own[1].stop
            if any(name not in part.extras for name in TEACHER):
                continue
            ids, logp_at, logp = (torch.tensor(part.extras[name]) for name in TEACHER)
            given = min(k, ids.shape[1])  # a small vocabulary has fewer
            found.on[own] = True
            found.logp[own] = logp.to(found.logp)
            found.ids[own][:, :given] = ids[:, :given].to(found.ids)
            found.logp_at[own][:, :given] = logp_at[:, :given].to(found.logp_at)
            found.engine_s += part.timings.get(TEACHER_S, 0.0)
    return found


class _EpisodeRows:
    """Episodes as rows [B] of their sampled tokens [T]."""

    def __init__(self, episodes: Sequence[Episode], device: torch.device) -> None:
        self._episodes = episodes
        self._device = device
        counts = [sum(int(np.count_nonzero(t.sampled)) for t in e.parts) for e in episodes]
        self._width = max([1, *counts])  # a rank without episodes still has a column
        columns = torch.arange(self._width, device=device)
        self.mask = columns < self.column(counts, torch.int64)[:, None]

    def tokens(self, name: str, fill: float, dtype: type, *tail: int) -> Tensor:
        """A per-token field of the records as [B, T] or, with k given, as [B, T, k]."""
        shape = (len(self._episodes), self._width, *tail)
        out: np.ndarray = np.full(shape, fill, dtype=dtype)
        for row, episode in zip(out, self._episodes):
            start = 0
            for part in episode.parts:
                values = getattr(part, name)
                end = start + len(values)
                # records of other actors may store fewer than k
                row[(slice(start, end), *map(slice, values.shape[1:]))] = values
                start = end
        return torch.from_numpy(out).to(self._device)

    def stretches(self) -> Tensor:
        """[B, T] int64: the entry of its record's page rule that each token was sampled by, -1
        without one."""
        out = np.full((len(self._episodes), self._width), -1, np.int64)
        for row, episode in zip(out, self._episodes):
            start = 0
            for part in episode.parts:
                rule, end = PageRule.of_record(part.extras), start + len(part.logp_inf)
                if rule is not None:
                    # of the position that predicts it, whose query chose the pages
                    at = (np.flatnonzero(part.sampled) - 1) // rule.length_step
                    row[start:end] = np.minimum(at, len(rule.blocks) - 1)
                start = end
        return torch.from_numpy(out).to(self._device)

    def repeats(self) -> Tensor:
        """[B, T] int64: `StepTensors.repeats`, a hash of all that determines a token's p_inf.

        Sums modulo 2^64 of ids and versions, each times a factor of its position and the last
        mixed, so that two hashes agree by chance in one of 2^64 pairs."""
        longest = max((len(t.token_ids) for e in self._episodes for t in e.parts), default=0)
        factors = _mixed(np.arange(1, longest + 1, dtype=np.uint64)) | np.uint64(1)
        out = np.zeros((len(self._episodes), self._width), np.uint64)
        for row, episode in zip(out, self._episodes):
            start = 0
            for part in episode.parts:
                end = start + len(part.logp_inf)
                read = part.token_ids.astype(np.uint64)
                read[part.sampled] += (part.token_version.astype(np.uint64) + 1) << 32
                # a group is whole on its rank: statistics do not depend on how ranks divide groups
                rule = PageRule.of_record(part.extras)
                own = f"{part.group_id} {actor_label(part.actor_id)} {rule}".encode()
                seed = np.frombuffer(blake2b(own, digest_size=8).digest(), np.uint64)
                sums = seed + np.cumsum(_mixed(read) * factors[: len(read)], dtype=np.uint64)
                row[start:end] = _mixed(sums)[part.sampled]
                start = end
        return torch.from_numpy(out.view(np.int64)).to(self._device)

    def whole_sets(self) -> Tensor:
        """[B, T] bool: the set that sampling kept is stored whole. Where there is no token, too."""
        out = np.ones((len(self._episodes), self._width), bool)
        for row, episode in zip(out, self._episodes):
            found = np.concatenate([_stored_whole(part) for part in episode.parts])
            row[: len(found)] = found
        return torch.from_numpy(out).to(self._device)

    def turns(self) -> TurnSpans:
        """Raises ValueError for a score that does not reward every turn or token of its episode."""
        counts = [sum(len(t.turn_starts) for t in e.parts) for e in self._episodes]
        rewards = np.zeros((len(counts), max([1, *counts])))
        of_token = np.zeros((len(counts), self._width), np.int64)
        by_token = np.zeros((len(counts), self._width))
        for row, (e, count) in enumerate(zip(self._episodes, counts)):
            numbers = _turn_numbers(e)
            of_token[row, : len(numbers)] = numbers
            given = _turn_rewards(e, count, numbers)
            rewards[row, :count] = given
            by_token[row, : len(numbers)] = e.score.token_rewards or _on_last_tokens(given, numbers)
        return TurnSpans(
            torch.from_numpy(rewards).to(self._device),
            self.column(counts, torch.int64),
            torch.from_numpy(of_token).to(self._device),
            torch.from_numpy(by_token).to(self._device),
        )

    def column(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        """One value an episode, [B]."""
        return torch.tensor(values, dtype=dtype, device=self._device)


def _mixed(values: np.ndarray) -> np.ndarray:
    """[n] uint64 to [n] uint64: the finaliser of SplitMix64, one to one."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = values ^ (values >> np.uint64(31))
    return mixed


def _stored_whole(t: Trajectory) -> np.ndarray:
    """[S] bool: a record has all tokens that sampling kept. A set of fewer tokens than the record
    can hold is whole; other sets are judged by the stored probabilities."""
    if not t.topk_ids.shape[1]:
        return np.zeros(len(t.logp_inf), bool)
    mass = np.exp(t.topk_logp.astype(np.float64)).sum(1)
    whole: np.ndarray = (t.topk_ids[:, -1] < 0) | (mass >= KEPT_MASS)
    return whole


def kept_set_metrics(batch: StepBatch, sampling: SamplingSpec, reduce: Reduce) -> dict[str, float]:
    """The share of a batch's tokens whose kept set is not stored: they leave the loss. Raises
    UserError where these are more than MOST_UNSTORED."""
    counts = torch.tensor([batch.unstored, int(batch.sent.mask.sum())], dtype=torch.float64)
    unstored, tokens = reduce(counts).tolist()
    share = unstored / max(tokens, 1.0)
    refuse(
        share > MOST_UNSTORED,
        f"rollout.logprobs_k={sampling.logprobs_k} is too few to train with rollout.top_p="
        f"{sampling.top_p:g}, top_k={sampling.top_k} and min_p={sampling.min_p:g}: at {share:.1%} "
        "of the tokens sampling kept more, and the learner can only condition on a set that is "
        f"stored whole (at most {MOST_UNSTORED:.0%} may lack it): raise rollout.logprobs_k, or "
        f"bound the sets with rollout.top_k={sampling.logprobs_k} or less.",
    )
    return {"mismatch/unstored_share": share}


def _turn_rewards(episode: Episode, count: int, numbers: np.ndarray) -> Sequence[float]:
    """Rewards of the `count` turns of an episode. `numbers` [S]: the turn of each sampled token."""
    score, name = episode.score, episode.parts[0].request_id
    if score.token_rewards:
        if len(score.token_rewards) != len(numbers):
            raise ValueError(
                f"episode {name} has {len(numbers)} tokens and {len(score.token_rewards)} rewards"
            )
        summed: list[float] = np.bincount(numbers, score.token_rewards, count).tolist()
        return summed
    given = score.turn_rewards or [*[0.0] * (count - 1), score.reward or 0.0]
    if len(given) != count:
        raise ValueError(f"episode {name} has {count} turns and {len(given)} rewards")
    return given


def _on_last_tokens(given: Sequence[float], numbers: np.ndarray) -> np.ndarray:
    """[S]: rewards of turns, at their last tokens; the reward of a turn without a token is at the
    token before it."""
    out = np.zeros(len(numbers))
    if len(numbers):
        last = np.searchsorted(numbers, np.arange(len(given)), side="right") - 1
        np.add.at(out, np.maximum(last, 0), given)
    return out


def _turn_numbers(episode: Episode) -> np.ndarray:
    """[S] int64: the turn of each sampled token, counted through all parts."""
    numbers, before = [], 0
    for part in episode.parts:
        starts = np.searchsorted(part.turn_starts, np.flatnonzero(part.sampled), side="right")
        numbers.append(before + starts - 1)
        before += len(part.turn_starts)
    return np.concatenate(numbers)


def staleness_split(
    batch: StepBatch, step: int, reduce: Reduce, kinds: Sequence[str] = ()
) -> dict[str, float]:
    """Mean staleness of the step's tokens in two parts: before their group arrived, and in the
    buffer; also by kind."""
    metrics = _split(batch, batch.sent.mask, step, reduce)
    for kind, rows in present_kinds(kinds, batch.sent, reduce):
        of_kind = _split(batch, batch.sent.mask & rows[:, None], step, reduce)
        metrics |= at_kind(of_kind, kind)
    return metrics


def _split(batch: StepBatch, on: Tensor, step: int, reduce: Reduce) -> dict[str, float]:
    arrival = batch.arrival_version[:, None].double()
    flight = torch.where(on, arrival - batch.sent.token_version, 0.0)
    buffer = torch.where(on, step - arrival, 0.0)
    flight_sum, buffer_sum, n = total([flight, buffer, on], reduce)
    return {
        "staleness/in_flight_mean": flight_sum / max(n, 1.0),
        "staleness/in_buffer_mean": buffer_sum / max(n, 1.0),
    }


def positions(batch: StepBatch, reduce: Reduce) -> dict[str, float]:
    """Positions that a pass over the step computes, and its sequences' one by one."""
    computed = sum(mb.tokens for mb in batch.micro)
    sequences = sum(len(s) for parts in batch.episodes for s in parts)
    both = reduce(torch.tensor([computed, sequences], dtype=torch.float64))
    return dict(zip(("train/positions", "train/sequence_positions"), both.tolist()))
