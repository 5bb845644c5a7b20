"""A shard is lost with its node: what only it had is asked for again.

A group keeps its id, its account and, since seeds depend on these, the seeds of its samples. It is
in flight again until its samples have arrived a second time. A group that a batch has, or that was
trained on before, stays in it: nothing filters it then. Records that a checkpoint holds are read
back from there."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rlcore.buffer.entry import ArrivedSample, Entry
from rlcore.buffer.store import InFlight, ReplayBuffer
from rlcore.references import Record, RecordReference

# (group id, sample index, draw id) -> the records of that drawing, if they are written somewhere
Recover = Callable[[int, int, str], tuple[bytes, ...] | None]


def lose_shard(buffer: ReplayBuffer, shard: str, recover: Recover) -> InFlight:
    """The records of a shard are gone; what to ask actors for again."""
    live, promised = buffer.live, buffer.batches.promised()
    live.forget_shard(shard)
    again = []
    for entry in list(live.entries.values()):
        if not _forget(entry, shard, recover):
            continue
        live.resize(entry)
        if entry.finished:
            live.reopen(entry, fixed=bool(entry.uses) or entry.group_id in promised)
        live.resampled += 1
        again.append(entry.group_id)
    return live.in_flight(again)


def _forget(entry: Entry, shard: str, recover: Recover) -> bool:
    """Drop what an entry has in a shard; whether something of it must be sampled again."""
    missing = False
    for drawings in entry.drawings.values():
        for draw_id, drawing in list(drawings.items()):
            if _inside(shard, (record for _, record in drawing.records.values())):
                del drawings[draw_id]
                missing = True
    for index, sample in list(entry.samples.items()):
        if not _inside(shard, sample.records):
            continue
        written = recover(entry.group_id, index, sample.score.draw_id)
        if written is None:
            del entry.samples[index]
            missing = True
        else:
            entry.samples[index] = ArrivedSample(
                sample.score, sample.tokens, sample.finish_reason, written
            )
    return missing


def _inside(shard: str, records: Iterable[Record]) -> bool:
    return any(isinstance(r, RecordReference) and r.shard == shard for r in records)
