from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

from rlcore.rollout.engines.vllm.cpu.quick_steps import QuickSteps
from rlcore.weights.stream import whole

pytestmark = pytest.mark.engine


@pytest.fixture
def quick(monkeypatch):
    """Of every step, whether it was a quick one."""
    seen = []

    def step(steps):
        found = plain(steps)
        seen.append(found is not None)
        return found

    plain = QuickSteps.step
    monkeypatch.setattr(QuickSteps, "step", step)
    return seen


def busy_run(engine, ask, finish, model_a, model_b):
    """Prompts that come late and fill blocks of the cache as they grow, one that is dropped, and
    new weights while all run."""
    engine.update_weights(0, whole(model_a.tensors), "in_flight")
    done = []
    engine.add(ask(4, group=0, prompt=[5, 6, 7], max_new_tokens=40))
    engine.add(ask(3, group=1, prompt=[5 + i % 20 for i in range(124)], max_new_tokens=30))
    done += [t for _ in range(6) for t in engine.step()]
    dropped = ask(2, group=2, prompt=[9, 8], max_new_tokens=40)
    engine.add(dropped)
    done += [t for _ in range(5) for t in engine.step()]
    engine.abort([dropped[0].request_id])
    done += [t for _ in range(4) for t in engine.step()]
    engine.update_weights(1, whole(model_b.tensors), "in_flight")
    done += finish(engine)
    return sorted(done, key=lambda t: (t.group_id, t.sample_index))


def test_quick_steps_give_what_those_of_vllm_give(
    engine, ask, finish, model_a, model_b, quick, monkeypatch
):
    found = busy_run(engine, ask, finish, model_a, model_b)
    # one of vLLM's for each wave of prompts and after the weights, one that finds nothing left
    assert quick.count(False) < 8 < quick.count(True)
    monkeypatch.setattr(engine.core, "_quick", None)
    expected = busy_run(engine, ask, finish, model_a, model_b)
    assert len(found) == len(expected) == 8
    assert {t.finish_reason for t in found} == {"stop", "length"}
    for a, b in zip(found, expected, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert a.finish_reason == b.finish_reason
        assert np.array_equal(a.token_version, b.token_version)
        for name in ("logp_inf", "topk_ids", "topk_logp"):
            assert np.array_equal(getattr(a, name), getattr(b, name))


def own_functions(engine):
    """Return of the engine's norms, and of its sampler, whether they are vLLM's own."""
    runner = engine.core._llm.model_executor.driver_worker.model_runner
    norm, sampler = runner.model.model.norm, runner.sampler.topk_topp_sampler
    return (
        norm._forward_method.__func__ is RMSNorm.forward_cpu,
        getattr(sampler.forward, "__func__", None) is TopKTopPSampler.forward_cpu,
    )


def test_the_fast_path_and_vllm_s_own_give_equal_tokens(
    engine, start, ask, finish, model_a, model_b, quick
):
    slow = start(model_a, cpu_fast_paths=False)
    assert slow.core.by_modules == slow.core.unshared == "cpu_fast_paths is false"
    assert own_functions(slow) == (True, True)
    assert own_functions(engine) == (False, False)
    expected = busy_run(slow, ask, finish, model_a, model_b)
    assert quick == []
    found = busy_run(engine, ask, finish, model_a, model_b)
    assert any(quick)
    assert len(found) == len(expected) == 8
    for a, b in zip(found, expected, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert a.finish_reason == b.finish_reason
        assert np.array_equal(a.token_version, b.token_version)
        for name in ("logp_inf", "topk_logp"):
            assert np.allclose(getattr(a, name), getattr(b, name), atol=2e-5)


WITHOUT = """
import sys
from pathlib import Path
from engine_helpers import Model, drain, make_job, requests
from rlcore.rollout.specs import start_engine

def tokens(fast):
    engine = start_engine(make_job(Model(Path(sys.argv[1]), {}, None), cpu_fast_paths=fast))
    engine.add(requests(4))
    found = [t.token_ids.tolist() for t in drain(engine)]
    engine.close()
    return found, any(n.startswith("rlcore") and ".cpu" in n for n in sys.modules)

slow, loaded = tokens(False)
assert not loaded
assert tokens(True) == (slow, True)
"""


def test_an_engine_without_fast_paths_imports_none_and_gives_the_same_tokens(model_a):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-c", WITHOUT, str(model_a.path)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr[-4000:]


def test_requests_wait_for_blocks_of_the_cache(start, model_a, ask, finish, quick):
    # room for eight blocks of 128 positions, where six requests need two each in the end
    engine = start(model_a, kv_cache_gib=9 * 2**17 / 2**30)
    preempted = []
    scheduler = engine.core._core.engine_core.scheduler
    plain = scheduler._preempt_request
    scheduler._preempt_request = lambda *a, **k: (preempted.append(a), plain(*a, **k))
    engine.add(ask(6, prompt=[5 + i % 20 for i in range(126)], max_new_tokens=30))
    done = finish(engine)
    assert len(done) == 6
    assert any(quick)
    assert preempted
    for t in done:
        assert np.allclose(t.logp_inf, model_a.sampled(t), atol=2e-5)
    pool = scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # one is never given out


def test_a_model_that_runs_by_modules_has_no_quick_steps():
    assert QuickSteps.of(None, None, None) is None
