"""What Python's garbage collector costs the buffer's process, as the fleet grows.

    python -m benchmarks.speed.collector [--actors 512]

A buffer takes all groups that so many actors can hold, in messages as its shards send them, once
with the collector as Python sets it and once as a run does, each in a process of its own.
Seconds are of processor time. The cut is what a checkpoint stops the process for; how long another
thread waits at most while it is written is by the clock, and longer on a busy machine.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import pickle
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

from benchmarks.harness import machine, table
from benchmarks.speed.control_plane import PUBLISH_EVERY, SAMPLES, STALENESS, empty_buffer
from rlcore.buffer import journal
from rlcore.buffer.shard import Shard, ShardReport
from rlcore.buffer.specs import BatchingSpec
from rlcore.cluster.process_tuning import keep_passes_short
from rlcore.references import RecordReference
from rlcore.serialization import dump_trajectory
from rlcore.testing.records import make_score, make_trajectory

MESSAGE = 256  # samples in a message
LOOK_S = 5e-4  # between two looks of a thread at the clock


class Passes:
    """Processor seconds of the collector's passes."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.full = 0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._begun = time.thread_time()
        else:
            self.seconds.append(time.thread_time() - self._begun)
            self.full += info["generation"] == 2


def messages(groups: int) -> Iterator[bytes]:
    """All samples of all groups, as bytes that hold no objects of the collector's."""
    drawn = make_trajectory(0, 0)
    ((header, _),) = Shard("one").put([dump_trajectory(drawn)])
    score, told = make_score(drawn, 0.0), ShardReport()
    for number in range(groups * SAMPLES):
        group_id, index = divmod(number, SAMPLES)
        own = {"group_id": group_id, "sample_index": index, "draw_id": f"bf16-0:{number}"}
        known = replace(header, **own, prompt_id=f"digits/train/{group_id}")
        told.kept.append((known, RecordReference("shard-1", number, 4096)))
        told.scores.append(replace(score, **own, reward=float(index % 2)))
        if len(told.kept) == MESSAGE or number == groups * SAMPLES - 1:
            yield pickle.dumps(told, protocol=5)
            told = ShardReport()


def longest_pause(cut: journal.BufferSnapshot) -> float:
    """Seconds by the clock that another thread waits at most while a checkpoint is written, whose
    records are in shards."""

    def write(folder: Path, keys: Mapping[str, Sequence[int]]) -> dict[str, str]:
        return dict.fromkeys(keys, "")

    with tempfile.TemporaryDirectory() as folder:
        writing = Thread(target=journal.save, args=(f"{folder}/buffer", cut, write))
        writing.start()
        longest, last = 0.0, time.monotonic()
        while writing.is_alive():
            time.sleep(LOOK_S)
            now = time.monotonic()
            longest, last = max(longest, now - last), now
    return longest


def measured(actors: int, as_in_a_run: bool) -> dict[str, Any]:
    """One row."""
    batching = BatchingSpec(
        groups_per_step=actors, max_staleness=STALENESS, steps_per_publish=PUBLISH_EVERY
    )
    buffer = empty_buffer(batching, SAMPLES)
    groups, passes = buffer.room(), Passes()
    prepared = list(messages(groups))
    if as_in_a_run:
        keep_passes_short()
    buffer.admit([f"digits/train/{i}" for i in range(groups)])
    gc.callbacks.append(passes)
    begun = time.thread_time()
    for message in prepared:
        buffer.add_told(pickle.loads(message))
    took = time.thread_time() - begun
    gc.callbacks.remove(passes)
    begun = time.thread_time()
    cut = journal.cut(buffer)
    stops = time.thread_time() - begun
    pause = longest_pause(cut)
    del cut
    samples, found = groups * SAMPLES, list(passes.seconds)
    gc.unfreeze()
    begun = time.thread_time()
    gc.collect()
    return {
        "actors": actors,
        "groups": groups,
        "collector": "as in a run" if as_in_a_run else "as Python sets it",
        "a sample us": f"{1e6 * took / samples:.3g}",
        "collecting us": f"{1e6 * sum(found) / samples:.3g}",
        "passes": len(found),
        "full": passes.full,
        "longest pass ms": f"{1e3 * max(found, default=0.0):.3g}",
        "a full pass after ms": f"{1e3 * (time.thread_time() - begun):.3g}",
        "cut ms": f"{1e3 * stops:.3g}",
        "pause while it is written ms": f"{1e3 * pause:.3g}",
        "objects": len(gc.get_objects()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--actors", default="512")
    args = parser.parse_args()
    print(machine())
    rows = []
    for actors in map(int, args.actors.split(",")):
        for as_in_a_run in (False, True):
            spawn = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(1, mp_context=spawn) as process:
                rows.append(process.submit(measured, actors, as_in_a_run).result())
    print(table(rows))


if __name__ == "__main__":
    main()
