"""The worker thread over a real engine: each token has the log-prob of the version it carries."""

from __future__ import annotations

import queue
import threading

import numpy as np
import pytest
import torch
from timing import deadline

from rlcore.rollout.worker import RolloutWorker
from rlcore.weights.manifest import ArrivalError, make_manifest
from rlcore.weights.stream import whole

pytestmark = pytest.mark.engine


@pytest.fixture
def finished():
    return queue.Queue()


@pytest.fixture
def worker(engine, finished):
    worker = RolloutWorker(engine, lambda ts: [finished.put(t) for t in ts], flush_interval_s=0.01)
    yield worker
    worker.close()


def collect(finished, count):
    return [finished.get(timeout=deadline(60)) for _ in range(count)]


def test_submitted_lists_are_reproducible(worker, finished, ask):
    runs = []
    for group in (0, 1):
        worker.submit(ask(20, group=group, seed=40)).result(deadline(30))
        runs.append(sorted(collect(finished, 20), key=lambda t: t.sample_index))
    first, second = ([t.sampled_ids.tolist() for t in run] for run in runs)
    assert first == second


def test_a_thread_count_set_elsewhere_does_not_stop_a_new_thread(worker, finished, ask):
    # vLLM replaces torch.set_num_threads by a function that does nothing
    count = torch.get_num_threads()
    for threads in (1, count):
        setting = threading.Thread(target=torch._C.set_num_threads, args=(threads,))
        setting.start()
        setting.join()
        worker.submit(ask(2, group=10 + threads)).result(deadline(30))
        assert len(collect(finished, 2)) == 2
        assert worker.status()["error"] is None


@pytest.mark.parametrize("mode", ["in_flight", "abort", "finish"])
def test_updates_between_steps(worker, finished, ask, model_a, model_b, mode):
    manifest = make_manifest(1, model_b.tensors, full=True, seed=0)
    worker.submit(ask(24, max_new_tokens=200)).result(deadline(30))
    update = worker.update_weights(1, whole(model_b.tensors), mode, manifest=manifest, timeout_s=60)
    worker.submit(ask(2, group=1)).result(deadline(60))
    update.result(deadline(60))
    for t in collect(finished, 26):
        for version, model in ((0, model_a), (1, model_b)):
            own = t.token_version == version
            np.testing.assert_allclose(t.logp_inf[own], model.sampled(t)[own], atol=1e-5)
        if t.group_id == 1:
            assert set(t.token_version) == {1}
        if mode == "finish":
            assert len(set(t.token_version)) == 1


def test_weights_that_did_not_arrive_are_fatal(worker, ask, model_a, model_b):
    announced = make_manifest(1, model_b.tensors, full=False, seed=0)
    with pytest.raises(ArrivalError, match="did not arrive whole"):
        worker.update_weights(
            1, whole(model_a.tensors), "in_flight", manifest=announced, timeout_s=60
        ).result(deadline(60))
