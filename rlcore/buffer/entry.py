"""A live group as the buffer holds it: drawings that are incomplete, samples that have arrived."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

from rlcore.references import Record
from rlcore.serialization import RecordHeader, StoredEpisode, StoredGroup
from rlcore.types import FinishReason, Score

PASSED = 1 - 1e-6  # of a grade that is correct, whatever rounding did


@dataclass(slots=True)
class Drawing:
    """One drawing of a sample, of which records or score are still missing."""

    records: dict[int, tuple[RecordHeader, Record]] = field(default_factory=dict)  # by part
    score: Score | None = None

    @property
    def size(self) -> int:
        """Bytes of its records."""
        return sum(len(record) for _, record in self.records.values())

    @property
    def complete(self) -> bool:
        """Whether its score and all parts of its record are there."""
        if self.score is None or not self.records:
            return False
        header, _ = next(iter(self.records.values()))
        return len(self.records) == header.parts


@dataclass(slots=True)
class ArrivedSample:
    """One sample whose record and score are both there; it is not changed, but replaced."""

    score: Score
    tokens: int  # sampled tokens
    finish_reason: FinishReason
    records: tuple[Record, ...]  # by part; empty where it will not be trained on

    @classmethod
    def of(cls, drawing: Drawing) -> ArrivedSample:
        """A complete drawing; a failed score keeps no record."""
        assert drawing.score is not None
        parts = [drawing.records[part] for part in sorted(drawing.records)]
        records = tuple(record for _, record in parts)
        return cls(
            drawing.score,
            sum(header.tokens for header, _ in parts),
            parts[-1][0].finish_reason,
            records if drawing.score.status == "ok" else (),
        )

    @property
    def usable(self) -> bool:
        return self.score.status == "ok"

    @property
    def passed(self) -> bool:
        """Whether the grader judged it correct, by its part of that name or else by the reward."""
        reward = self.score.reward
        return reward is not None and self.score.parts.get("correct", reward) >= PASSED

    @property
    def size(self) -> int:
        """Bytes of its records."""
        return sum(map(len, self.records))


PLAIN = (
    *("group_id", "prompt_id", "admitted_version", "finished", "arrival_version"),
    *("uses", "last_step", "losses"),
)


class EntryCut(NamedTuple):
    """A live group at one moment."""

    plain: tuple[Any, ...]  # the fields PLAIN
    taken_by: list[int]
    samples: dict[int, ArrivedSample]  # by sample_index

    def ordered(self) -> list[tuple[int, ArrivedSample]]:
        """The samples by index."""
        return sorted(self.samples.items())

    def state(self) -> dict[str, Any]:
        """JSON-able state without records, of which the number is noted, and without scores."""
        samples = {
            index: {"tokens": s.tokens, "finish_reason": s.finish_reason, "records": len(s.records)}
            for index, s in self.ordered()
        }
        plain = dict(zip(PLAIN, self.plain, strict=True))
        return {**plain, "taken_by": self.taken_by, "samples": samples}


@dataclass(slots=True)
class Entry:
    """One live group: its samples as they arrive, then its uses."""

    group_id: int
    prompt_id: str
    admitted_version: int
    samples: dict[int, ArrivedSample] = field(default_factory=dict)  # by sample_index
    # sample_index -> draw_id: a sample is drawn again when its first drawing seems lost
    drawings: dict[int, dict[str, Drawing]] = field(default_factory=dict)
    finished: bool = False
    arrival_version: int = 0
    uses: int = 0  # committed steps
    last_step: int = -1  # newest committed step that used it
    taken_by: list[int] = field(default_factory=list)  # uncommitted steps
    losses: int = 0  # times that the actor that sampled it was lost or late
    held: int = 0  # bytes of it that `LiveGroups.bytes` has counted
    # sampled again after a loss, although it is in a batch or was trained on: it stays as it comes
    fixed: bool = False
    noted: bool = False  # its pass rate was

    @property
    def task(self) -> str:
        return self.prompt_id.split("/", 1)[0]

    @property
    def size(self) -> int:
        """Bytes of all records, those of incomplete drawings included."""
        incomplete = sum(d.size for found in self.drawings.values() for d in found.values())
        return incomplete + sum(s.size for s in self.samples.values())

    def records(self) -> list[Record]:
        """All records, those of incomplete drawings included."""
        drawn = (d for found in self.drawings.values() for d in found.values())
        incomplete = [record for d in drawn for _, record in d.records.values()]
        return incomplete + [r for s in self.samples.values() for r in s.records]

    @property
    def tokens(self) -> int:
        """Sampled tokens that will be trained on."""
        return sum(s.tokens for s in self.samples.values() if s.records)

    def missing(self, samples_per_group: int) -> tuple[int, ...]:
        """Sample indices to ask for, so that the group has as many samples as it needs."""
        absent = [i for i in range(samples_per_group) if i not in self.samples]
        return tuple(absent[: max(0, samples_per_group - len(self.samples))])

    def usable(self) -> list[ArrivedSample]:
        """Scored samples by sample_index, whether or not selection kept them."""
        return [s for _, s in sorted(self.samples.items()) if s.usable]

    def kept(self) -> list[ArrivedSample]:
        """Samples with records, by sample_index: what is trained on."""
        return [s for _, s in sorted(self.samples.items()) if s.records]

    def stored(self) -> StoredGroup:
        """The group as a learner rank fetches it."""
        episodes = tuple(StoredEpisode(s.score, s.records) for s in self.kept())
        return StoredGroup(
            self.group_id, self.prompt_id, self.admitted_version, self.arrival_version, episodes
        )

    def cut(self) -> EntryCut:
        """The group as it is now, unaffected by what happens to it later; a checkpoint stops the
        buffer for this alone.

        Incomplete drawings are left out: after a resume their samples are asked for again.
        """
        return EntryCut(_plain(self), self.taken_by.copy(), self.samples.copy())

    @classmethod
    def from_state(
        cls, state: dict[str, Any], records: Iterator[Record], scores: Iterator[Score]
    ) -> Entry:
        """The inverse of `EntryCut.state`; takes its records and scores off the iterators, in
        order."""
        samples = {
            int(index): ArrivedSample(
                next(scores),
                fields["tokens"],
                fields["finish_reason"],
                tuple(next(records) for _ in range(fields["records"])),
            )
            for index, fields in state["samples"].items()
        }
        plain = {name: state[name] for name in PLAIN}
        return cls(**plain, taken_by=state["taken_by"], samples=samples)


_plain = attrgetter(*PLAIN)
