"""Engines as GPUs get them, asynchronous scheduling and the second model runner, run on the CPU:
the tests of the plain engine must hold on them too. Each run is a process of its own, see
`runner_on_cpu.py`."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import forked
import pytest
from timing import deadline

from rlcore.errors import UserError
from rlcore.rollout.specs import ActorSpec

HERE = Path(__file__).parent
UPDATES = ["test_vllm_updates.py"]
ALL = [*UPDATES, "test_vllm_engine.py", "test_vllm_set_version.py", "test_kept_rows.py"]


def passes_on(runner: str, files: list[str], *args: str, timeout_s: float) -> None:
    """Run tests of this folder on a runner, scheduling ahead."""
    args = ["-p", "runner_on_cpu", "-p", "no:cacheprovider", *args, *(str(HERE / f) for f in files)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(HERE), prepend=os.pathsep)
        patch.setenv("RUNNER", runner)
        patch.setenv("TRITON_INTERPRET", "1")
        if runner == "first":
            text = forked.call(pytest.main, args, seconds=timeout_s)
        else:  # must be there before vLLM is imported
            text = _in_new_process(args, timeout_s)
    assert " passed" in text, text[-4000:]


def _in_new_process(args: list[str], timeout_s: float) -> str:
    try:
        importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("triton is not installed: `make venv` installs it")
    command = [sys.executable, "-m", "pytest", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=deadline(timeout_s))
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.mark.engine
def test_each_token_has_the_version_that_sampled_it_while_steps_are_scheduled_ahead():
    only = ["-k", "match_the_version and short-in_flight or keep_leaves"]
    passes_on("first", UPDATES, *only, timeout_s=300)


@pytest.mark.engine
@pytest.mark.slow
def test_the_plain_engine_s_tests_hold_while_steps_are_scheduled_ahead():
    passes_on("first", ALL, timeout_s=900)


@pytest.mark.engine
@pytest.mark.nightly
@pytest.mark.timeout(1900)
def test_the_plain_engine_s_tests_hold_on_the_second_runner():
    # vLLM's top-k kernel does not run in the interpreter, and noisy actors stay on the first runner
    passes_on("second", ALL, "-k", "not truncated and not logit_noise", timeout_s=1800)


@pytest.mark.engine
@pytest.mark.slow
def test_sparse_engines_know_tokens_of_prompts_on_the_second_runner():
    passes_on("second", ["sparse_steps.py"], timeout_s=300)


def test_gpus_get_the_second_runner_and_asynchronous_scheduling():
    gpu, cpu = ActorSpec(num_gpus=1), ActorSpec()
    assert gpu.on_second_runner and gpu.schedules_ahead and not gpu.eager
    assert not cpu.on_second_runner and not cpu.schedules_ahead and cpu.eager
    plain = ActorSpec(num_gpus=1, second_runner=False, async_scheduling=False)
    assert not plain.on_second_runner and not plain.schedules_ahead
    noisy = ActorSpec(num_gpus=1, logit_noise=0.1)
    assert not noisy.on_second_runner and not noisy.schedules_ahead


@pytest.mark.parametrize("name", ["second_runner", "async_scheduling"])
@pytest.mark.parametrize(
    "other",
    [
        {"num_gpus": 0},
        {"num_gpus": 1, "logit_noise": 0.1},
        {"num_gpus": 1, "probability_floor": 1e-6},
    ],
)
def test_what_only_a_gpu_can_do_is_refused_elsewhere(name, other):
    spec = ActorSpec(**{name: True}, **other)
    with pytest.raises(UserError, match=rf"actor\.a\.{name}=true cannot be combined with actor"):
        spec.check("actor.a")
