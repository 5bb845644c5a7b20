"""The worker thread over a real engine: streaming, atomic submits, updates with a deadline, and how it fails."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from rlcore.errors import DeadlineExceeded
from rlcore.rollout.worker import RolloutWorker
from rlcore.weights.manifest import ArrivalError, make_manifest


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

    def wait(self, count: int, timeout: float = 60.0) -> list:
        with self._new:
            assert self._new.wait_for(lambda: len(self.all()) >= count, timeout)
        return self.all()


@pytest.fixture
def sink() -> Sink:
    return Sink()


@pytest.fixture
def worker(engine, sink):
    worker = RolloutWorker(engine, sink, flush_interval_s=0.01)
    yield worker
    worker.close()


def test_finished_trajectories_stream_out_while_others_run(worker, sink, ask):
    worker.submit(ask(24, max_new_tokens=120)).result(30)
    assert len(sink.wait(24)) == 24
    assert len(sink.batches) > 2 and all(sink.batches)
    assert {t.request_id for t in sink.all()} == {f"train:0:{i}" for i in range(24)}
    status = worker.status()
    assert status["finished"] == status["submitted"] == 24 and status["error"] is None
    assert status["tokens"] == sum(len(t.response_ids) for t in sink.all())
    assert status["busy_s"] > 0 and status["heartbeat_age_s"] < 30


def test_the_idle_worker_still_shows_a_heartbeat(worker):
    first = worker.counters.heartbeat
    deadline = time.monotonic() + 30
    while worker.counters.heartbeat == first and time.monotonic() < deadline:
        time.sleep(0.01)
    assert worker.counters.heartbeat > first and worker.status()["steps"] == 0


def test_a_list_with_one_bad_request_enters_not_at_all_and_the_engine_goes_on(worker, sink, ask):
    with pytest.raises(ValueError, match=r"model\.max_len"):
        worker.submit([*ask(3), *ask(1, group=1, prompt=[5] * 300)]).result(30)
    worker.submit(ask(1, group=2)).result(30)
    assert [t.group_id for t in sink.wait(1)] == [2]
    assert worker.status()["submitted"] == 1


def test_submitted_lists_are_reproducible(worker, sink, ask):
    for group in (0, 1):
        worker.submit(ask(20, group=group, seed=40)).result(30)
        sink.wait(20 * (group + 1))
    first, second = (sorted((t for t in sink.all() if t.group_id == g), key=lambda t: t.sample_index) for g in (0, 1))
    assert [t.response_ids.tolist() for t in first] == [t.response_ids.tolist() for t in second]


@pytest.mark.parametrize("mode", ["in_flight", "abort", "finish"])
def test_updates_between_steps(worker, sink, ask, model_a, model_b, mode):
    manifest = make_manifest(1, model_b.tensors, full=True, seed=0)
    worker.submit(ask(24, max_new_tokens=200)).result(30)
    update = worker.update_weights(1, model_b.tensors, mode, manifest=manifest)
    behind = worker.submit(ask(2, group=1))
    times = update.result(60)
    behind.result(30)
    assert set(times) == {"stop_s", "drain_s"} and worker.status()["version"] == 1
    for t in sink.wait(26):
        for version, model in ((0, model_a), (1, model_b)):
            own = t.token_version == version
            np.testing.assert_allclose(t.logp_inf[own], model.sampled(t)[own], atol=1e-5)
        if t.group_id == 1:
            assert set(t.token_version) == {1}
        if mode == "finish":
            assert len(set(t.token_version)) == 1
    assert worker.checksums(["model.norm.weight"]).result(30) == {
        "model.norm.weight": manifest.checksums["model.norm.weight"]
    }


def test_a_drain_that_takes_too_long_keeps_the_old_weights(worker, sink, ask, model_a, model_b):
    worker.submit(ask(16, max_new_tokens=240)).result(30)
    update = worker.update_weights(1, model_b.tensors, "finish", timeout_s=0.0)
    late = worker.submit(ask(2, group=1))
    try:
        update.result(60)
        drained = True  # everything ended within one step: nothing to wait for
    except DeadlineExceeded as e:
        drained = False
        assert "schedule.publish_timeout_s" in str(e)
    late.result(30)
    trajectories = sink.wait(18)
    assert not drained and worker.status()["version"] == 0
    assert all(set(t.token_version) == {0} for t in trajectories)
    np.testing.assert_allclose(trajectories[-1].logp_inf, model_a.sampled(trajectories[-1]), atol=1e-5)


def test_a_refused_update_leaves_a_serving_engine(worker, sink, ask, model_b):
    half = dict(list(model_b.tensors.items())[:3])
    for mode in ("in_flight", "finish"):
        with pytest.raises(ValueError, match="is missing"):
            worker.update_weights(1, half, mode).result(30)
    worker.submit(ask(2)).result(30)
    assert all(set(t.token_version) == {0} for t in sink.wait(2))


def test_weights_that_did_not_arrive_stop_the_engine_for_good(worker, ask, model_a, model_b):
    announced = make_manifest(1, model_b.tensors, full=False, seed=0)
    with pytest.raises(ArrivalError, match="did not arrive whole"):
        worker.update_weights(1, model_a.tensors, "in_flight", manifest=announced).result(30)
    wait_for_error(worker, "ArrivalError")
    with pytest.raises(RuntimeError, match="has failed: ArrivalError"):
        worker.submit(ask(1))


def test_an_error_in_the_engine_thread_is_reported_by_every_later_call(engine, ask):
    def broken(_batch: list) -> None:
        raise OSError("no space left")

    worker = RolloutWorker(engine, broken)
    worker.submit(ask(8)).result(30)
    wait_for_error(worker, "OSError: no space left")
    for call in (lambda: worker.submit(ask(1)), lambda: worker.checksums([]), lambda: worker.abort([])):
        with pytest.raises(RuntimeError, match="OSError: no space left"):
            call()
    worker.close()


def test_closing_hands_over_what_is_finished_and_refuses_more(engine, sink, ask):
    worker = RolloutWorker(engine, sink, flush_interval_s=1000.0)
    worker.submit(ask(16, max_new_tokens=3)).result(30)
    deadline = time.monotonic() + 60
    while worker.status()["tokens"] < 20 and time.monotonic() < deadline:
        time.sleep(0.005)
    worker.close()
    assert sink.all()
    with pytest.raises(RuntimeError, match="closed"):
        worker.submit(ask(1, group=3))


def wait_for_error(worker: RolloutWorker, words: str) -> None:
    deadline = time.monotonic() + 60
    while worker.status()["error"] is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert words in worker.status()["error"]
