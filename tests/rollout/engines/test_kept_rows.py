"""Log-prob rows that stay on the device: a record has those of today's path, which copies them
every step, and each row is copied once."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.outputs import LogprobsTensors

from rlcore.rollout.engines.vllm import kept_rows, worker_side
from rlcore.rollout.engines.vllm.kept_rows import KeptLogprobs, RowStore
from rlcore.rollout.engines.vllm.patches import is_second
from rlcore.weights.stream import whole


@pytest.fixture
def copies(monkeypatch):
    """Numbers of rows that were copied together."""
    seen = []
    copy = kept_rows.StepGroup.copy

    def counted(group):
        before = group._copied
        copy(group)
        if group._copied > before:
            seen.append(group._copied - before)

    monkeypatch.setattr(kept_rows.StepGroup, "copy", counted)
    return seen


def step(store, rows, width, start):
    """A step's rows as vLLM's scheduler gets them, and the arrays that it would get today."""
    ids = torch.arange(start, start + rows * width).view(rows, width)
    tensors = KeptLogprobs(ids, -ids.float(), torch.zeros(rows))
    tensors.store = store
    return tensors.to_cpu_nonblocking().tolists(), LogprobsTensors(*tensors).tolists()


def test_each_row_is_taken_as_it_was_whatever_steps_a_group_has(copies):
    store, rng, asked, total = RowStore(torch.device("cpu")), np.random.default_rng(0), [], 0
    for number in range(150):
        rows, width = int(rng.integers(1, 9)), 3 if number < 100 else 5
        kept, today = step(store, rows, width, 100 * number)
        total += rows
        asked += [(kept.slice_request(r, 1), today.slice_request(r, 1)) for r in range(rows)]
        if rng.random() < 0.1:  # a record is made of some of them
            asked.pop(0)[0].group.take([0])
    for (group, numbers), (ids, logp, *_) in asked:
        found = group.take(numbers)
        assert len(numbers) == 1 and found[0].dtype == np.int32 and found[1].dtype == np.float32
        assert np.array_equal(found[0], ids) and np.array_equal(found[1], logp)
    assert sum(copies) == total and len(copies) < 40


def test_a_group_ends_where_its_bytes_or_steps_do(monkeypatch):
    monkeypatch.setattr(kept_rows, "_BYTES", 8 * 4 * 2 * 5)  # five steps of four rows of two
    store = RowStore(torch.device("cpu"))
    groups = [step(store, 4, 2, n)[0].slice_request(0, 1).group for n in range(12)]
    assert [groups.count(g) for g in dict.fromkeys(groups)] == [5, 5, 2]
    wide = step(store, 4, 900, 0)[0].slice_request(3, 1)
    assert wide.rows == [3] and wide.group not in groups
    monkeypatch.undo()
    store = RowStore(torch.device("cpu"))
    groups = [step(store, 4, 2, n)[0].slice_request(0, 1).group for n in range(40)]
    assert groups.count(groups[0]) == kept_rows.STEPS


def run(engine, ask, finish, model_a, model_b):
    """Requests of several k and a stop string; one that is dropped, some that are cut and go on,
    and new weights, between whole steps and while all run."""
    engine.update_weights(0, whole(model_a.tensors), "in_flight")
    done = []
    engine.add(ask(6, group=0, prompt=[5, 6, 7], max_new_tokens=24))
    engine.add(ask(3, group=1, max_new_tokens=12, logprobs_k=3, stop=("7", "ab")))
    engine.add(ask(2, group=2, max_new_tokens=12, logprobs_k=-1))
    done += [t for _ in range(5) for t in engine.step()]
    several = ask(4, group=3, prompt=[9, 8], max_new_tokens=16, temperature=0.7)
    engine.add(several)
    done += [t for _ in range(5) for t in engine.step()]
    engine.abort([several[0].request_id])
    begun = engine.cut([several[1].request_id, several[2].request_id])
    done += [t for _ in range(4) for t in engine.step()]
    engine.update_weights(1, whole(model_b.tensors), "in_flight")
    engine.add([r for r in several if r.request_id in {t.request_id for t in begun}], begun)
    done += [t for _ in range(5) for t in engine.step()]
    engine.update_weights(2, whole(model_a.tensors), "abort")
    done += finish(engine)
    return sorted(done, key=lambda t: (t.group_id, t.sample_index))


def copy_every_step(engine, monkeypatch):
    """Undo `keep_rows` for the test."""
    runner = engine.core._llm.model_executor.driver_worker.model_runner
    if is_second(runner):
        monkeypatch.delattr(runner, "sample")
    else:
        monkeypatch.setattr(runner.sampler, "gather_logprobs", worker_side._gather_logprobs)


@pytest.mark.engine
@pytest.mark.parametrize("quick", [True, False], ids=["quick", "vllm"])
def test_records_are_those_of_rows_that_are_copied_every_step(
    engine, ask, finish, model_a, model_b, monkeypatch, copies, quick
):
    assert engine.core.copied is None
    if quick and engine.core._quick is None:
        pytest.skip("steps that are scheduled ahead are vLLM's")
    if not quick:
        monkeypatch.setattr(engine.core, "_quick", None)
    found = run(engine, ask, finish, model_a, model_b)
    assert copies
    copy_every_step(engine, monkeypatch)
    copies.clear()
    expected = run(engine, ask, finish, model_a, model_b)
    assert not copies and len(found) == len(expected) == 14
    for a, b in zip(found, expected, strict=True):
        assert a.finish_reason == b.finish_reason
        for name in ("token_ids", "token_version", "logp_inf", "topk_ids", "topk_logp"):
            assert np.array_equal(getattr(a, name), getattr(b, name), equal_nan=True), name


def test_a_version_that_was_never_tried_copies_every_step(monkeypatch):
    monkeypatch.setattr(type(kept_rows.KEPT_LOGPROBS), "version", lambda _: "0.40.1")
    assert kept_rows.keep_rows(None) == "it was not tried with vLLM 0.40.1"


def test_a_gpu_copies_every_step_until_one_has_shown_otherwise():
    runner = SimpleNamespace(device=torch.device("cuda"))
    assert kept_rows.keep_rows(runner) == "no GPU has shown it"
