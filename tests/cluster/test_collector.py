"""Python's garbage collector in a run's processes: its full passes are not made, and not missed."""

import contextlib
import gc
import json
import weakref
from unittest.mock import MagicMock

import pytest
import ray
from test_start import hosting
from timing import deadline

from rlcore.advisor.simulate.clock import run_simulated
from rlcore.advisor.simulate.loop import Scenario, Simulation
from rlcore.buffer import ReplayBuffer
from rlcore.buffer.admission import ByteLimit
from rlcore.buffer.specs import BatchingSpec, SelectionSpec
from rlcore.cluster.process_tuning import NEVER, keep_passes_short
from rlcore.cluster.start import start_buffer, wait_started
from rlcore.commands import train
from rlcore.loop.run_plan import Progress
from rlcore.loop.specs import CheckpointSpec, ScheduleSpec


@pytest.fixture
def collector():
    """Sets the collector of this process back after a test."""
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


class Ring:
    """A cycle that nothing else refers to."""

    def __init__(self):
        self.itself = self


@pytest.fixture
def passes():
    """The generations of the passes that are made."""
    made = []

    def note(phase, info):
        if phase == "stop":
            made.append(info["generation"])

    gc.callbacks.append(note)
    yield made
    gc.callbacks.remove(note)


def test_many_new_objects_bring_no_full_pass_and_young_cycles_are_freed(collector, passes):
    keep_passes_short()
    assert passes.count(2) == 1 and gc.get_freeze_count() > 1000  # young ones may come anywhere
    passes.clear()
    kept, rings = [[] for _ in range(2_000_000)], [weakref.ref(Ring()) for _ in range(100_000)]
    assert len(kept) == 2_000_000 and 2 not in passes and {0, 1} <= set(passes)
    alive = sum(ring() is not None for ring in rings)
    assert alive < 20_000, "those since the last pass"


def test_a_cycle_that_an_earlier_attempt_left_is_freed(collector):
    ring = Ring()
    keep_passes_short()
    left = weakref.ref(ring)
    del ring
    gc.collect()
    assert left() is not None  # frozen
    keep_passes_short()
    assert left() is None


@pytest.mark.parametrize("every", [0, 3])
def test_what_buffer_and_controller_drop_is_in_no_cycles(every, collector, tmp_path):
    """Else memory would grow, since no full pass finds them. A checkpoint leaves two encoders of
    JSON, which are small."""
    schedule = ScheduleSpec(steps=40, groups_per_step=4, max_staleness=2)
    scenario = Scenario(schedule, checkpoint=CheckpointSpec(every=every), actors=4, nodes=2)
    found = []

    async def counted(run):
        await run.until(4)
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        await run.until(16)
        gc.collect()
        found.extend(type(thing) for thing in gc.garbage)
        run.controller.request_stop()

    async def main():
        await Simulation(scenario, tmp_path).run(counted)

    try:
        run_simulated(main())
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not [kind for kind in found if kind.__module__.startswith("rlcore")]
    assert found.count(json.JSONEncoder) == (8 if every else 0)
    assert bool(found) == bool(every)


def test_a_run_settles_its_own_process_before_the_loop_begins(collector, monkeypatch):
    """The loop is in the process of the command."""
    seen = []

    async def loop(*arguments):
        seen.append((gc.get_threshold(), gc.get_freeze_count()))

    monkeypatch.setattr(train, "_loop", loop)
    monkeypatch.setattr(train, "connected", lambda *a, **b: contextlib.nullcontext())
    monkeypatch.setattr(train, "stored_bytes", lambda *a: 0)
    monkeypatch.setattr(train, "with_drafts", lambda config, *a: config)
    monkeypatch.setattr(train, "starting_model", lambda *a: "model")
    monkeypatch.setattr(train.derived, "ranks", lambda config: 1)
    monkeypatch.setattr(train, "joined_address", lambda address: None)
    monkeypatch.setattr(train, "note_in_about", lambda *a, **b: None)
    monkeypatch.setattr(train, "Session", MagicMock())
    before = gc.get_threshold(), gc.get_freeze_count()
    train._attempt(MagicMock(), train.Start(progress=Progress()), 0.0)
    assert (gc.get_threshold(), gc.get_freeze_count()) == before  # a caller from Python goes on
    ((thresholds, frozen),) = seen
    assert thresholds[2] == NEVER and frozen > 1000


@pytest.mark.cluster
def test_the_buffer_s_process_makes_no_full_passes():
    limits = {"limit": ByteLimit(1 << 30), "run_seed": 0, "keep_samples": 1}
    batching = BatchingSpec(groups_per_step=1)
    empty = ReplayBuffer(batching, SelectionSpec(), samples_per_group=2, **limits)

    ray.init("local", num_cpus=1, object_store_memory=10**8, include_dashboard=False)
    try:
        buffer = start_buffer(hosting(), empty)
        wait_started(hosting(), [buffer])
        look = buffer.handle.__ray_call__.remote(
            lambda actor: (gc.get_threshold(), gc.get_freeze_count())
        )
        thresholds, frozen = ray.get(look, timeout=deadline(60))
        assert thresholds[2] == NEVER and frozen > 1000
    finally:
        ray.shutdown()
