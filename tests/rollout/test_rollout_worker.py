"""The worker thread: streaming, atomic submits, updates with a deadline, and how it fails."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator

import pytest
import torch
from rollout_fakes import WEIGHTS, FakeEngine, ask
from timing import deadline, wait_until

from rlcore.errors import DeadlineExceeded
from rlcore.interfaces import StepLoad
from rlcore.rollout.step_costs import StepCosts
from rlcore.rollout.worker import RolloutWorker, SpareTime
from rlcore.weights.manifest import ArrivalError, make_manifest
from rlcore.weights.stream import whole

NEW = {n: t + 1 for n, t in WEIGHTS.items()}
WAIT_S = deadline(30)


class Sink:
    """Collects what a worker streams, batch by batch."""

    def __init__(self) -> None:
        self.batches: list[list] = []
        self._new = threading.Condition()

    def __call__(self, batch: list) -> None:
        with self._new:
            self.batches.append(batch)
            self._new.notify()

    def all(self) -> list:
        return [t for b in self.batches for t in b]

    def wait(self, count: int) -> list:
        with self._new:
            assert self._new.wait_for(lambda: len(self.all()) >= count, WAIT_S)
        return self.all()


def wait_for_a_heartbeat(worker: RolloutWorker) -> None:
    last = worker.counters.heartbeat
    wait_until(lambda: worker.counters.heartbeat > last, 30, "a heartbeat")


def submit_and_step_once(worker: RolloutWorker, engine: FakeEngine, requests: list) -> None:
    """The next step then waits at the gate."""
    before = worker.status()["steps"]
    engine.gate.close()
    worker.submit(requests).result(WAIT_S)
    engine.gate.allow(1)
    wait_until(lambda: worker.status()["steps"] > before, 30, "a step")


@pytest.fixture
def sink() -> Sink:
    return Sink()


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def worker(engine, sink) -> Iterator[RolloutWorker]:
    worker = RolloutWorker(engine, sink, flush_interval_s=0.0)
    yield worker
    engine.loading.set()
    worker.close()


def test_finished_trajectories_stream_out_while_others_run(worker, sink):
    worker.submit(ask(24)).result(WAIT_S)
    assert len(sink.wait(24)) == 24
    assert len(sink.batches) > 2 and all(sink.batches)
    assert {t.request_id for t in sink.all()} == {f"train:0:{i}" for i in range(24)}
    status = worker.status()
    assert status["finished"] == status["submitted"] == 24 and status["error"] is None
    assert status["tokens"] == sum(len(t.sampled_ids) for t in sink.all())
    assert status["busy_s"] > 0
    assert set(status["costs"]) == {"step_s", "request_s", "context_s", "prompt_s"}
    assert all(seconds >= 0 for seconds in status["costs"].values())


def test_proposed_and_accepted_tokens_are_counted(engine, worker, sink, monkeypatch):
    monkeypatch.setattr(engine, "load_of_step", lambda: StepLoad(3, proposed=4, accepted=2))
    worker.submit(ask(2)).result(WAIT_S)
    sink.wait(2)
    wait_until(lambda: worker.status()["waiting"] == 0, 30, "the end")
    status = worker.status()
    assert status["proposed"] == 2 * status["accepted"] == 4 * status["steps"] > 0


def test_the_idle_worker_still_has_a_heartbeat(worker):
    for _ in range(2):
        wait_for_a_heartbeat(worker)
    assert worker.status()["steps"] == 0


def test_spare_time_begins_at_a_larger_share_than_it_ends_at():
    clock = iter(range(0, 1000, 10))
    spare = SpareTime(lambda: next(clock))

    def after(*idle):
        for seconds in idle:
            spare.add(seconds)
            has = spare.next_version()
        return has

    assert not after(0.9, 0.9, 0.9, 0.9)
    assert after(*[1.5] * 5)
    assert after(*[0.6] * 20) and not after(*[0.4] * 20) and not after(*[0.6] * 20)


@pytest.mark.parametrize("turns", [False, True])
def test_an_engine_with_time_to_spare_serves_older_requests_first(engine, sink, monkeypatch, turns):
    """Turns of episodes excepted: an older group's may come after a newer group's."""
    monkeypatch.setattr(StepCosts, "requests_at", lambda self, share: 4)
    worker = RolloutWorker(engine, sink, flush_interval_s=0.0, turns=turns)
    try:
        worker.submit(ask(1, group=9)).result(WAIT_S)
        sink.wait(1)
        for _ in range(2):
            wait_for_a_heartbeat(worker)  # idle
        worker.set_version(1).result(WAIT_S)
        assert engine.book.full_for_newer == (math.inf if turns else 4)
        submit_and_step_once(worker, engine, ask(4))
        worker.update_weights(2, whole(NEW), "in_flight", timeout_s=30)
        worker.submit(ask(2, group=1))
        engine.gate.allow()
        sink.wait(7)
        versions = {t.request_id: set(t.token_version) for t in sink.all()}
        assert versions["train:0:0"] == {1, 2} and versions["train:1:0"] == {2}
    finally:
        worker.close()


def test_a_busy_engine_serves_requests_as_they_come(engine, sink):
    worker = RolloutWorker(engine, sink, flush_interval_s=0.0)
    try:
        submit_and_step_once(worker, engine, ask(2, max_new_tokens=60))
        updates = [
            worker.update_weights(v, whole(NEW), "in_flight", timeout_s=30) for v in range(1, 20)
        ]
        engine.gate.allow(1)
        for update in updates:
            update.result(WAIT_S)
        assert engine.book.full_for_newer == math.inf
        engine.gate.allow()
    finally:
        worker.close()


def test_a_list_with_one_bad_request_enters_not_at_all_and_the_engine_goes_on(worker, sink):
    with pytest.raises(ValueError, match=r"model\.max_len"):
        worker.submit([*ask(3), *ask(1, group=1, prompt=[5] * 64)]).result(WAIT_S)
    worker.submit(ask(1, group=2)).result(WAIT_S)
    assert [t.group_id for t in sink.wait(1)] == [2]
    assert worker.status()["submitted"] == 1


def test_the_decoding_time_of_open_requests_is_reported(worker, engine):
    submit_and_step_once(worker, engine, ask(6, max_new_tokens=50))
    engine.gate.allow(1)
    # two wait for a place
    wait_until(lambda: len(worker.status()["decoding_s"]) == 4, 30, "the first tokens")
    first = worker.status()["decoding_s"]["train:0:0"]
    engine.gate.allow(2)
    wait_until(lambda: worker.status()["decoding_s"]["train:0:0"] > first, 30, "more tokens")
    aborted = worker.abort([f"train:0:{i}" for i in range(6)])
    engine.gate.allow()
    aborted.result(WAIT_S)
    wait_until(lambda: worker.status()["decoding_s"] == {}, 30, "the end of all requests")


@pytest.mark.parametrize("mode", ["in_flight", "abort", "finish"])
def test_an_update_takes_its_place_among_the_commands(worker, sink, mode):
    manifest = make_manifest(1, NEW, full=True, seed=0)
    worker.submit(ask(6, max_new_tokens=50)).result(WAIT_S)
    update = worker.update_weights(1, whole(NEW), mode, manifest=manifest, timeout_s=30)
    behind = worker.submit(ask(2, group=1))
    assert set(update.result(WAIT_S)) == {"stop_s", "drain_s"} and worker.status()["version"] == 1
    behind.result(WAIT_S)
    for t in sink.wait(8):
        if t.group_id == 1:
            assert set(t.token_version) == {1}
        if mode == "finish":
            assert len(set(t.token_version)) == 1
    assert worker.checksums(["w"]).result(WAIT_S) == {"w": manifest.checksums["w"]}


@pytest.mark.parametrize("mode", ["abort", "finish"])
def test_nothing_is_decoded_asleep_and_what_was_held_goes_on(worker, engine, sink, mode):
    submit_and_step_once(worker, engine, ask(6, max_new_tokens=50))
    asleep = worker.sleep()
    engine.gate.allow()
    assert asleep.result(WAIT_S) == 3.0
    steps = worker.status()["steps"]
    worker.submit(ask(2, group=1)).result(WAIT_S)
    worker.wake("weights").result(WAIT_S)
    manifest = make_manifest(1, NEW, full=True, seed=0)
    worker.update_weights(1, whole(NEW), mode, manifest=manifest, timeout_s=30).result(WAIT_S)
    wait_for_a_heartbeat(worker)
    status = worker.status()
    assert status["asleep"] and status["steps"] == steps and not sink.all()
    worker.wake("all").result(WAIT_S)
    done = sink.wait(8)
    assert not worker.status()["asleep"]
    assert all(len(t.token_version) == (50 if t.group_id == 0 else 6) for t in done)
    for t in done:
        assert set(t.token_version) == ({1} if t.group_id == 1 else set(t.token_version) | {1})


def test_set_version_leaves_the_weights(worker, sink):
    before = worker.checksums(WEIGHTS).result(WAIT_S)
    worker.set_version(7).result(WAIT_S)
    worker.submit(ask(1)).result(WAIT_S)
    assert set(sink.wait(1)[0].token_version) == {7} and worker.status()["version"] == 7
    assert worker.checksums(WEIGHTS).result(WAIT_S) == before


def test_a_drain_that_takes_too_long_keeps_the_old_weights(worker, engine, sink):
    submit_and_step_once(worker, engine, ask(6, max_new_tokens=60))
    update = worker.update_weights(1, whole(NEW), "finish", timeout_s=0.0)
    late = worker.submit(ask(2, group=1))
    engine.gate.allow()
    with pytest.raises(DeadlineExceeded, match=r"schedule\.publish_timeout_s"):
        update.result(WAIT_S)
    late.result(WAIT_S)
    assert all(set(t.token_version) == {0} for t in sink.wait(8))
    assert worker.status()["version"] == 0


def test_a_refused_update_leaves_a_serving_engine(worker, sink):
    for mode in ("in_flight", "finish"):
        with pytest.raises(ValueError, match="is missing"):
            worker.update_weights(1, whole({"w": torch.ones(2)}), mode, timeout_s=30).result(WAIT_S)
    worker.submit(ask(2)).result(WAIT_S)
    assert all(set(t.token_version) == {0} for t in sink.wait(2))


def test_weights_that_did_not_arrive_stop_the_engine(worker):
    announced = make_manifest(1, NEW, full=True, seed=0)
    with pytest.raises(ArrivalError, match="did not arrive whole"):
        worker.update_weights(
            1, whole(WEIGHTS), "in_flight", manifest=announced, timeout_s=30
        ).result(WAIT_S)
    wait_until(lambda: worker.status()["error"] is not None, 30, "the error")
    assert "ArrivalError" in worker.status()["error"]
    with pytest.raises(RuntimeError, match="has failed: ArrivalError"):
        worker.submit(ask(1))


def test_slow_loading_is_no_missed_heartbeat_until_its_own_deadline(worker, engine):
    def loading(version, timeout_s):
        engine.loading.clear()
        update = worker.update_weights(version, whole(NEW), "in_flight", timeout_s=timeout_s)
        wait_until(lambda: worker.status()["loading"], 30, "loading to begin")
        return update

    slow = loading(1, 3600)
    assert worker.status()["heartbeat_age_s"] == 0.0
    engine.loading.set()
    slow.result(WAIT_S)
    late = loading(2, 0.01)
    wait_until(lambda: worker.status()["heartbeat_age_s"] > 0.1, 30, "a missed heartbeat")
    engine.loading.set()
    late.result(WAIT_S)
    wait_for_a_heartbeat(worker)


def test_an_engine_that_fails_is_reported_by_every_later_call(worker, engine):
    engine.fail = RuntimeError("one of the engine's 2 ranks died")
    waiting = worker.submit(ask(1))
    wait_until(lambda: worker.status()["error"] is not None, 30, "the error")
    assert waiting.exception(WAIT_S) is None
    for call in (
        lambda: worker.submit(ask(1)),
        lambda: worker.checksums([]),
        lambda: worker.abort([]),
        lambda: worker.update_weights(1, whole(NEW), "in_flight", timeout_s=1),
    ):
        with pytest.raises(RuntimeError, match="ranks died"):
            call()


def test_an_error_in_delivery_ends_the_worker_and_fails_what_waits(engine):
    delivering, queued = threading.Event(), threading.Event()

    def broken(_batch: list) -> None:
        delivering.set()
        assert queued.wait(WAIT_S)
        raise OSError("no space left")

    worker = RolloutWorker(engine, broken, flush_interval_s=0.0)
    worker.submit(ask(1)).result(WAIT_S)
    assert delivering.wait(WAIT_S)
    update = worker.update_weights(1, whole(NEW), "finish", timeout_s=30)
    queued.set()
    with pytest.raises(RuntimeError, match="has stopped: OSError: no space left"):
        update.result(WAIT_S)
    assert worker.status()["error"] == "OSError: no space left"
    worker.close()


def test_closing_delivers_what_is_finished_and_refuses_more(engine, sink):
    worker = RolloutWorker(engine, sink, flush_interval_s=1000.0)
    worker.submit([*ask(2, max_new_tokens=1), *ask(2, group=1, max_new_tokens=10**6)]).result(
        WAIT_S
    )
    wait_until(lambda: worker.status()["tokens"] >= 2, 30, "two tokens")
    worker.close()
    assert {t.group_id for t in sink.all()} >= {0}
    with pytest.raises(RuntimeError, match="closed"):
        worker.submit(ask(1, group=3))
