"""Arrival: the records of a drawing and its score arrive separately and are paired here.

A sample has arrived when all parts of one drawing's record and its score are there, in whichever
order. A sample may be drawn more than once (its first actor seemed lost): the first complete
drawing counts, the others are dropped. A drawing that comes too late is counted once, by its score.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from rlcore.buffer.ledger import GroupVerdict, all_equal, judge
from rlcore.buffer.live import ArrivedSample, Attempt, LiveGroup, LiveGroups
from rlcore.buffer.specs import SelectionSpec
from rlcore.references import Record
from rlcore.serialization import RecordHeader, read_headers
from rlcore.types import Score, actor_label, at_kind

MOST_UNSUMMED = 64  # different rewards


@dataclass(slots=True)
class ArrivalTotals:
    """Running sums over every sample that arrived, kept or not. Sums of rewards are over usable
    samples only.

    Rewards are summed exactly: rounded sums would depend on the order in which samples arrive.
    """

    samples: int = 0
    tokens: int = 0
    scored: int = 0
    reward_sum: Fraction = Fraction(0)
    reward_squares: Fraction = Fraction(0)
    # rewards that are not in the sums yet, counted by value: values are few, and fractions are slow
    _unsummed: Counter[float] = field(default_factory=Counter)

    def add(self, sample: ArrivedSample) -> None:
        """Count one sample."""
        self.samples += 1
        self.tokens += sample.tokens
        reward = sample.score.reward
        if reward is not None:
            self.scored += 1
            self._unsummed[reward] += 1
            if len(self._unsummed) > MOST_UNSUMMED:
                self._sum()

    def _sum(self) -> None:
        for reward, count in self._unsummed.items():
            exact = Fraction(reward)
            self.reward_sum += count * exact
            self.reward_squares += count * exact**2
        self._unsummed.clear()

    def metrics(self) -> dict[str, float]:
        """Totals and means since the start of the run; they depend on when they are read."""
        self._sum()
        metrics = {
            "buffer/arrived_samples": float(self.samples),
            "buffer/arrived_tokens": float(self.tokens),
        }
        if self.samples:
            metrics["buffer/arrived_response_length_mean"] = self.tokens / self.samples
        if self.scored:
            mean = self.reward_sum / self.scored
            metrics["buffer/arrived_reward_mean"] = float(mean)
            # below 0 only after a checkpoint of an earlier version, whose sums were rounded
            variance = max(Fraction(0), self.reward_squares / self.scored - mean**2)
            metrics["buffer/arrived_reward_std"] = math.sqrt(variance)
        return metrics

    def state(self) -> dict[str, Any]:
        """As JSON, the exact sums as text ("7/4")."""
        self._sum()
        plain = {name: getattr(self, name) for name in ("samples", "tokens", "scored")}
        return plain | {name: str(getattr(self, name)) for name in _EXACT}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> ArrivalTotals:
        """The inverse of `state`; reads states of earlier versions, too, whose sums are numbers."""
        return cls(**{**state, **{name: Fraction(state[name]) for name in _EXACT}})


_EXACT = ("reward_sum", "reward_squares")


def task_metrics(entries: Iterable[LiveGroup], tasks: Sequence[str]) -> dict[str, float]:
    """Metrics of groups by task, for a run with several: `task/<task>/...`; for a task without
    groups in the batch only the number of groups, 0."""
    groups = list(entries)
    metrics: dict[str, float] = {}
    for task in tasks:
        own = [e for e in groups if e.task == task]
        metrics[f"task/{task}/groups"] = float(len(own))
        if own:
            of_batch = batch_metrics(own)
            named = {_TASK_NAMES.get(name, name): value for name, value in of_batch.items()}
            metrics |= {f"task/{task}/{name}": value for name, value in named.items()}
            metrics[f"task/{task}/token_share"] = sum(e.tokens for e in own) / max(
                1, sum(e.tokens for e in groups)
            )
    return metrics


def kind_metrics(entries: Iterable[LiveGroup], kinds: Sequence[str]) -> dict[str, float]:
    """`batch_metrics` by the label of the actor that drew each sample, for a run with several."""
    groups, metrics = list(entries), dict[str, float]()
    for kind in kinds:
        own = [s for e in groups for s in e.usable() if actor_label(s.score.draw_id) == kind]
        if own:
            metrics |= at_kind(_of_samples(own), kind)
    return metrics


_TASK_NAMES = {
    "reward/mean": "reward_mean",
    "reward/std": "reward_std",
    "reward/selected_mean": "reward_selected_mean",
    "response_length/mean": "response_length_mean",
    "response_length/max": "response_length_max",
    "response_length/truncated_share": "truncated_share",
}


def batch_metrics(entries: Iterable[LiveGroup]) -> dict[str, float]:
    """Rewards and lengths (sampled tokens) over all usable samples of a batch, before selection.

    Summed exactly (`math.fsum`): the order in which samples came does not matter, and two runs of
    one seed agree to the bit.
    """
    groups = [[s for s in e.samples.values() if s.usable] for e in entries]
    return _of_samples([s for group in groups for s in group]) | _equal_groups(groups)


def _equal_groups(groups: Sequence[Sequence[ArrivedSample]]) -> dict[str, float]:
    """The share of groups that tell no sample from another; nothing where all have one sample."""
    rewards = [[r for s in g if (r := s.score.reward) is not None] for g in groups if len(g) > 1]
    equal = [all_equal(found) for found in rewards if found]
    return {"reward/equal_share": sum(equal) / len(equal)} if equal else {}


def _of_samples(samples: Sequence[ArrivedSample]) -> dict[str, float]:
    rewards = [s.score.reward for s in samples if s.score.reward is not None]
    lengths = [s.tokens for s in samples]
    kept = [s.score.reward for s in samples if s.records and s.score.reward is not None]
    mean = math.fsum(rewards) / len(rewards)
    cut = sum(s.finish_reason == "length" for s in samples)
    metrics = {
        "reward/mean": mean,
        "reward/std": math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / len(rewards)),
        "response_length/mean": sum(lengths) / len(lengths),
        "response_length/max": float(max(lengths)),
        "response_length/truncated_share": cut / len(samples),
    }
    if len(kept) < len(rewards):
        metrics["reward/selected_mean"] = math.fsum(kept) / len(kept)
    parts: dict[str, list[float]] = defaultdict(list)
    for s in samples:
        for name, value in s.score.parts.items():
            parts[name].append(value)
    for name, values in sorted(parts.items()):
        metrics[f"reward_parts/{name}"] = math.fsum(values) / len(values)
    return metrics


REASON_CHARS = 300  # of a grader's message


class Intake:
    """Pairs records and scores, and judges a group when its last sample has arrived."""

    def __init__(self, live: LiveGroups, selection: SelectionSpec) -> None:
        self._live = live
        self._selection = selection
        self.totals = ArrivalTotals()
        self.duplicates = 0  # drawings of samples that had already arrived
        self.late = 0  # drawings of groups that had already departed
        self.unreadable = 0  # records that do not say whose they are
        # (group id, prompt id, pass rate) of groups that arrived, until they are asked for
        self.outcomes: list[tuple[int, str, float]] = []
        self.alike = 0  # samples from the run's first on that failed for one reason
        self._reason = ""  # this one, without its numbers
        self.failed_score = ""  # prompt id and reason of the newest sample that was not scored
        self._paired, self._lag_s = 0, 0.0  # samples here, and between their first and last part

    def add_records(self, records: Sequence[bytes]) -> None:
        """Records of training samples. Raises ValueError, taking none, as `ReplayBuffer` says."""
        read = read_headers(records)
        self.add_read(read)
        self.unreadable += len(records) - len(read)

    def add_read(self, read: Sequence[tuple[RecordHeader, Record]]) -> None:
        """As `add_records`, with headers that were read before."""
        for header, _ in read:
            entry = self._live.entries.get(header.group_id)
            if why := self._wrong(header, entry):
                raise ValueError(f"buffer: record {header.request_id} {why}")
        for header, record in read:
            self._add_record(header, record)

    def add_scores(self, scores: Sequence[Score]) -> None:
        """Scores of training samples; one whose numbers cannot be trained on becomes a failed one.
        Raises ValueError, taking none, as `ReplayBuffer` says."""
        for score in scores:
            self._check_score(score)
        for score in scores:
            self._add_score(score.checked())

    def _wrong(self, header: RecordHeader, entry: LiveGroup | None) -> str:
        """Why a record is not taken."""
        if header.purpose != "train":
            return "is not of a training sample"
        if not self._was_asked(entry, header.group_id, header.sample_index):
            return "was never asked for"
        if entry is None:
            return ""
        if header.prompt_id != entry.prompt_id:
            return f"is of {header.prompt_id}, its group of {entry.prompt_id}"
        oldest = header.oldest_version
        if oldest is not None and oldest < entry.admitted_version:
            return (
                f"has tokens of version {oldest}, but its group was admitted at published "
                f"version {entry.admitted_version}: actor {header.actor_id} served an older one"
            )
        return ""

    def _check_score(self, score: Score) -> None:
        entry = self._live.entries.get(score.group_id)
        if not self._was_asked(entry, score.group_id, score.sample_index):
            name = f"score of sample {score.sample_index} of group {score.group_id}"
            raise ValueError(f"buffer: {name} was never asked for")

    def _was_asked(self, entry: LiveGroup | None, group_id: int, sample_index: int) -> bool:
        live = self._live
        # of a departed group the task is not known any more
        n = live.most_samples if entry is None else live.samples(entry)
        return live.ledger.known(group_id) and 0 <= sample_index < n

    def _add_record(self, header: RecordHeader, record: Record) -> None:
        entry = self._live.entries.get(header.group_id)
        if entry is None or header.sample_index in entry.samples:
            self._live.release([record])
            return  # counted when its score comes
        drawing = _drawing(entry, header.sample_index, header.draw_id)
        if header.part in drawing.records:
            self._live.release([record])
        else:
            drawing.records[header.part] = (header, record)
            self._live.bytes += len(record)
            entry.held += len(record)
            self._settle(entry, header.sample_index, drawing)

    def _add_score(self, score: Score) -> None:
        entry = self._live.entries.get(score.group_id)
        if entry is None:
            self.late += 1
            return
        if score.sample_index in entry.samples:
            self.duplicates += 1
            return
        drawing = _drawing(entry, score.sample_index, score.draw_id)
        if drawing.score is not None:
            self.duplicates += 1
            return
        drawing.score = score
        self._settle(entry, score.sample_index, drawing)

    def _settle(self, entry: LiveGroup, sample_index: int, drawing: Attempt) -> None:
        """If the drawing is complete, it becomes the sample."""
        if not drawing.complete:
            return
        self._paired += 1
        self._lag_s += time.monotonic() - drawing.since
        drawings = entry.drawings.pop(sample_index)
        sample = ArrivedSample.of(drawing)
        entry.samples[sample_index] = sample
        if len(drawings) > 1 or not sample.records:
            self._forget(entry, drawing if sample.records else None, drawings.values())
        self._count(entry.prompt_id, sample)
        if len(entry.samples) == self._live.samples(entry):
            self._complete(entry)

    def _forget(
        self, entry: LiveGroup, kept: Attempt | None, drawings: Collection[Attempt]
    ) -> None:
        """Drop the records of all drawings of a sample except the one that has become it."""
        for drawing in drawings:
            if drawing is not kept:
                self._live.release(record for _, record in drawing.records.values())
        self._live.resize(entry)
        self.duplicates += sum(d.score is not None for d in drawings) - 1

    def _count(self, prompt_id: str, sample: ArrivedSample) -> None:
        status = sample.score.status
        self.totals.add(sample)
        self._live.ledger.score_errors += status == "error"
        self._live.ledger.score_timeouts += status == "timeout"
        if not sample.usable:
            reason = sample.score.error or status
            said = re.sub(r"\d+", "0", reason)
            if self.alike == self.totals.samples - 1 and self._reason in ("", said):
                self.alike, self._reason = self.alike + 1, said
            self.failed_score = f"{prompt_id}: {reason}"[:REASON_CHARS]

    def metrics(self) -> dict[str, float]:
        """Totals of samples, and how long they took to be whole, since this process started."""
        lag = {"time/score_lag_s": self._lag_s / self._paired} if self._paired else {}
        return self.totals.metrics() | lag

    def take_outcomes(self) -> list[tuple[str, float]]:
        """(prompt id, pass rate) of the groups since the last call, in order of admission, which
        does not depend on timing where whole waves arrive."""
        taken, self.outcomes = sorted(self.outcomes), []
        return [(prompt_id, rate) for _, prompt_id, rate in taken]

    def resume(self) -> None:
        """After a restore with fewer samples a group: finish the groups that have that many."""
        for entry in [e for e in self._live.entries.values() if not e.finished]:
            n = self._live.samples(entry)
            if len(entry.samples) >= n:
                ordered = sorted(entry.samples.items())
                self._live.release(record for _, s in ordered[n:] for record in s.records)
                entry.samples = dict(ordered[:n])
                self._live.resize(entry)
                self._complete(entry)

    def _complete(self, entry: LiveGroup) -> None:
        """Once all samples of the group have arrived: fail it, filter it, or keep the samples to
        train on."""
        live = self._live
        usable = entry.usable()
        rewards = [s.score.reward for s in usable if s.score.reward is not None]
        if entry.fixed and not usable:  # its batch waits for it: all of it is asked for again
            entry.samples.clear()
            return
        verdict = judge(rewards, self._selection, live.samples(entry))
        if entry.fixed:
            verdict = GroupVerdict(kept=verdict.kept or tuple(range(len(usable))))
        if rewards and not verdict.failed:
            live.accounts.judged(entry.task, filtered=bool(verdict.evicted), reward=rewards[0])
        if usable and live.remembers(entry) and not entry.noted:
            entry.noted = True
            passed = sum(s.passed for s in usable) / len(usable)
            self.outcomes.append((entry.group_id, entry.prompt_id, passed))
        if verdict.failed:
            return live.fail(entry, verdict.failed)
        count, size = live.arrived_bytes
        live.arrived_bytes = (count + 1, size + entry.held)
        if verdict.evicted:
            return live.evict(entry, verdict.evicted)
        if len(verdict.kept) < len(usable):
            kept = set(verdict.kept)
            for position, sample in enumerate(usable):
                if position not in kept:
                    live.release(sample.records)
                    entry.samples[sample.score.sample_index] = replace(sample, records=())
            live.resize(entry)
        live.finish(entry)


def _drawing(entry: LiveGroup, sample_index: int, draw_id: str) -> Attempt:
    return entry.drawings.setdefault(sample_index, {}).setdefault(draw_id, Attempt())
