"""A pytest plugin that starts engines on a CPU as they start on a GPU, with asynchronous scheduling
and, where `RUNNER=second`, on vLLM's second model runner under Triton's interpreter.

    TRITON_INTERPRET=1 RUNNER=second pytest -p runner_on_cpu tests/rollout/engines/test_x.py

It must be imported before vLLM. Streams and events of CUDA are stood in for: everything runs in
order, so what a copy that is under way can do wrong on a GPU does not show here.
"""

from __future__ import annotations

import contextlib
import os
import types
from typing import Any

import torch

SECOND = os.environ["RUNNER"] == "second"


class Nothing:
    """A stream or an event on which nothing ever waits."""

    device = torch.device("cpu")

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def nothing(self, *args: Any) -> None: ...

    wait_stream = wait_event = wait = record = synchronize = nothing


def _stand_in_for_cuda() -> None:
    torch.cuda.Stream = torch.cuda.Event = torch.Event = Nothing  # type: ignore[misc, assignment]
    torch.cuda.current_stream = lambda *_: Nothing()
    torch.cuda.stream = lambda _: contextlib.nullcontext()  # type: ignore[assignment]


def _let_vllm_use_triton() -> None:
    """vLLM's CPU build takes Triton only with a CPU back end, which the interpreter needs not."""
    from triton.backends import backends

    driver = types.SimpleNamespace(is_active=lambda: True)
    backends["cpu"] = types.SimpleNamespace(driver=driver)  # type: ignore[assignment]


def _let_vllm_schedule_ahead() -> None:
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def keep_async(cls: Any, config: Any) -> None:
        check(cls, config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(keep_async)  # type: ignore[method-assign]


_stand_in_for_cuda()
if SECOND:
    _let_vllm_use_triton()

from rlcore.rollout.specs import ActorSpec  # noqa: E402

ActorSpec.on_second_runner = property(lambda _: SECOND)  # type: ignore[assignment, method-assign]
ActorSpec.schedules_ahead = property(lambda _: True)  # type: ignore[assignment, method-assign]

import rlcore.rollout.engines.vllm  # noqa: E402, F401  sets vLLM's environment

_let_vllm_schedule_ahead()


def pytest_sessionstart(session: Any) -> None:
    """Fail where vLLM does not run as this module says."""
    from rlcore.rollout.engines.vllm import engine

    start = engine.start_llm

    def checked(job: Any, vocab: int) -> Any:
        llm = start(job, vocab)
        assert llm.engine_core.engine_core.batch_queue_size == 2
        assert llm.vllm_config.use_v2_model_runner == SECOND
        return llm

    engine.start_llm = checked
