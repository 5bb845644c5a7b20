"""Errors of other libraries keep the message that a person needs: real ones where they can be
raised here, recorded texts of those that need a GPU or a network."""

import asyncio

import pydantic
import pytest
import torch
import transformers
from ray.exceptions import RayTaskError

from rlcore.reasons import message_of, reason


def raised(call):
    with pytest.raises(Exception) as caught:
        call()
    return caught.value


class _Settings(pydantic.BaseModel):
    width: int = 1

    @pydantic.model_validator(mode="after")
    def _check(self):
        if self.width > 9:
            raise ValueError("chunked prefill is required for this cache mode; set it to true")
        assert self.width != 5, "five is odd"
        return self


def _group():
    async def fail():
        raise ValueError("the third page is missing")

    async def both():
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fail())

    asyncio.run(both())


def _silent():
    raise AssertionError


def _wrapped():
    try:
        raise FileNotFoundError(2, "No such file or directory", "model.safetensors")
    except OSError as e:
        raise RuntimeError("Engine core initialization failed. See root cause above.") from e


def _mismatch():
    torch.nn.Linear(2, 3).load_state_dict({"weight": torch.zeros(4, 2), "bias": torch.zeros(3)})


def _ray_task():
    cause = raised(lambda: _Settings(width=12))
    raise RayTaskError("start", "Traceback (most recent call last):\n ...", cause)


REAL = [
    (lambda: _Settings(width="x"), "ValidationError: _Settings.width: Input should be a valid int"),
    (lambda: _Settings(width=12), "ValidationError: _Settings: chunked prefill is required"),
    (lambda: _Settings(width=5), "ValidationError: _Settings: five is odd"),
    (_ray_task, "ValidationError: _Settings: chunked prefill is required for this cache mode"),
    (_group, "ValueError: the third page is missing"),
    (_silent, "AssertionError in _silent, test_reasons.py:"),
    (_wrapped, "FileNotFoundError: [Errno 2] No such file or directory: 'model.safetensors'"),
    (lambda: {}["head_dim"], "KeyError: no 'head_dim'"),
    (_mismatch, "RuntimeError: Error(s) in loading state_dict for Linear: size mismatch"),
    (lambda: torch.zeros(2) @ torch.zeros(3), "RuntimeError: inconsistent tensor size"),
    (
        lambda: transformers.AutoConfig.from_pretrained("/nowhere/model", local_files_only=True),
        "/nowhere/model",
    ),
]


@pytest.mark.parametrize(("call", "expected"), REAL)
def test_an_exception_gives_its_message(call, expected):
    found = reason(raised(call))
    assert expected in found and "\n" not in found and "https://" not in found


RECORDED = {
    "NCCL": (
        "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled system error "
        "(run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5\nncclSystemError: System call "
        "(e.g. socket, malloc) or external library call failed or device error. \nLast error:\n"
        "Call to ibv_reg_mr failed with error Cannot allocate memory",
        "Call to ibv_reg_mr failed with error Cannot allocate memory",
    ),
    "CUDA": (
        "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be "
        "asynchronously reported at some other API call, so the stacktrace below might be "
        "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n",
        "CUDA error: an illegal memory access was encountered",
    ),
    "memory": (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB "
        "of which 1.31 GiB is free.",
        "CUDA out of memory. Tried to allocate 2.00 GiB.",
    ),
    "vLLM through Ray": (
        "\x1b[36mray::RolloutActor.start()\x1b[39m (pid=11, ip=10.0.0.1)\n"
        '  File "/x/rlcore/cluster/actors/rollout.py", line 80, in start\n    self.e = build()\n'
        '  File "/x/vllm/engine/arg_utils.py", line 1690, in create_engine_config\n'
        "    config = VllmConfig(\n             ^^^^^^^^^^^\n"
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig\n"
        "  Value error, Chunked prefill is required for mamba cache mode 'align'. "
        "[type=value_error, input_value=ArgsKwargs((), {'model_co...}), input_type=ArgsKwargs]\n"
        "    For further information visit https://errors.pydantic.dev/2.13/v/value_error",
        "ValidationError: VllmConfig: Chunked prefill is required for mamba cache mode 'align'.",
    ),
    "a traceback that ends in an assertion": (
        "Traceback (most recent call last):\n"
        '  File "/x/deepspeed/runtime/engine.py", line 10, in step\n    assert self.ready\n'
        "AssertionError: gradients were not reduced: assertion error",
        "AssertionError: gradients were not reduced: assertion error",
    ),
    "hub": (
        "We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them "
        "in the cached files.\nCheck your internet connection or see how to run the library in "
        "offline mode at 'https://huggingface.co/docs/transformers/installation#offline-mode'.",
        "We couldn't connect to 'https://huggingface.co' to load the files",
    ),
}


@pytest.mark.parametrize("library", RECORDED)
def test_a_recorded_text_gives_its_message(library):
    text, expected = RECORDED[library]
    assert expected in message_of(text)
    assert expected in reason(RuntimeError(text))


@pytest.mark.parametrize("text", ["", "assertion error", "https://errors.pydantic.dev/2.13/v/x"])
def test_a_text_that_says_nothing_is_no_message(text):
    assert message_of(text) == ""
    assert reason(RuntimeError(text)) == "RuntimeError (no message)"


def test_a_chain_that_closes_ends():
    a, b = ValueError(""), ValueError("")
    a.__cause__, b.__cause__ = b, a
    assert reason(a) == "ValueError (no message)"


def test_a_long_message_is_cut():
    assert len(reason(ValueError("x" * 5000))) == 400
