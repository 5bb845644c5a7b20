"""vLLM's engine core, driven directly. The file that imports vLLM (besides the attention backends beside it).

Its outputs are kept as the arrays they are: vLLM's own output processor turns every log-prob into Python objects, which
costs more than computing them (see benchmarks/rollout_logprobs.py).
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors.torch import save_file
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform
from vllm.v1.engine import FinishReason as VllmFinish
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from rlcore.rollout.prompt_lengths import PROMPT_LEN
from rlcore.rollout.worker_extension import WeightExtension
from rlcore.seeding import derive_seed
from rlcore.types import FinishReason, SamplingSpec

if TYPE_CHECKING:
    import numpy as np

    from rlcore.attention.block_topk import BlockTopK

_SHARED_MEMORY = "/dev/shm"  # where weights wait for the ranks of an engine
_FINISH: dict[VllmFinish, FinishReason] = {VllmFinish.STOP: "stop", VllmFinish.LENGTH: "length"}


class Output(NamedTuple):
    """What one step sampled for one request."""

    request_id: str
    tokens: list[int]
    rows: tuple[np.ndarray, np.ndarray] | None  # ids and log-probs [tokens, >= k+1], the sampled token first
    finish: FinishReason | None


class WorkerSide(WeightExtension):
    """What vLLM's workers gain. With tensor parallelism each is a process of its own, which imports this file."""

    def rl_plain_gather(self) -> None:
        """Sample without the ranks of the sampled tokens."""
        self.model_runner.sampler.gather_logprobs = _gather_logprobs

    def rl_requantise(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """vLLM's own reload, which keeps to itself what was taken, in its three steps."""
        runner = self.model_runner
        initialize_layerwise_reload(runner.model)
        loaded = runner.model.load_weights(tensors)
        finalize_layerwise_reload(runner.model, runner.model_config)
        return set(loaded)


class VllmCore:
    """One engine of vLLM, its scheduler in this process: requests in, tokens and log-prob rows out, a step at a time.

    With `tensor_parallel` ranks the model runs in as many child processes, which end with this one.
    """

    def __init__(
        self, *, vocab: int, temperature_scale: float, sparse: BlockTopK | None, tensor_parallel: int, **options: Any
    ) -> None:
        """Start it. `options`: `_engine_args`. `temperature_scale` multiplies every temperature that is asked for."""
        options |= _sparse_options(sparse)
        self._ranks = tensor_parallel
        self._llm = _start(_engine_args(tensor_parallel=tensor_parallel, **options), sparse)
        self._core = self._llm.engine_core
        self._tasks = self._llm.get_supported_tasks()
        self._vocab, self._temperature_scale = vocab, temperature_scale
        self._params: dict[SamplingSpec, SamplingParams] = {}
        self.rpc("rl_plain_gather")

    def add(
        self,
        request_id: str,
        token_ids: Sequence[int],
        spec: SamplingSpec,
        *,
        max_tokens: int,
        seed: int,
        prompt_len: int,
        cache_salt: str | None,
    ) -> None:
        """Queue a request. `token_ids`: the prompt's `prompt_len` tokens, and those of the response sampled before.

        `cache_salt`: only requests of the same salt share keys and values of equal prefixes.
        """
        params = self._sampling_params(spec)
        params.max_tokens, params.seed = max_tokens, seed
        params.extra_args = {PROMPT_LEN: prompt_len}  # sparse attention: resubmitted tokens are response
        prompt: dict[str, Any] = {"type": "token", "prompt_token_ids": list(token_ids)}
        if cache_salt is not None:
            prompt["cache_salt"] = cache_salt
        core_request = self._llm.input_processor.process_inputs(
            request_id,
            prompt,  # type: ignore[arg-type]
            params,
            supported_tasks=self._tasks,
        )
        core_request.external_req_id = request_id
        self._core.add_request(core_request)

    def _sampling_params(self, spec: SamplingSpec) -> SamplingParams:
        """A template per kind of request; vLLM copies it when a request is queued."""
        if spec not in self._params:
            self._params[spec] = SamplingParams(
                temperature=spec.temperature * self._temperature_scale,
                top_p=spec.top_p,
                top_k=spec.top_k,
                min_p=spec.min_p,
                logprobs=None if spec.logprobs_k < 0 else min(spec.logprobs_k, self._vocab),
                flat_logprobs=True,
                detokenize=False,
            )
        return self._params[spec]

    def abort(self, request_ids: list[str]) -> None:
        """Drop requests that are queued or running."""
        self._core.abort_requests(request_ids)

    def step(self) -> Iterable[Output]:
        """One engine step. Raises RuntimeError if vLLM failed a request or lost a rank."""
        for out in self._outputs():
            if out.finish_reason is not None and out.finish_reason not in _FINISH:
                raise RuntimeError(f"vLLM ended {out.request_id} with {out.finish_reason.name}: {out.stop_reason}")
            rows = out.new_logprobs[:2] if out.new_logprobs is not None else None
            finish = None if out.finish_reason is None else _FINISH[out.finish_reason]
            yield Output(out.request_id, out.new_token_ids, rows, finish)

    def _outputs(self) -> list[Any]:
        try:
            return list(self._core.get_output().outputs)
        except RuntimeError as e:  # vLLM says only "cancelled" when the process of a rank is gone
            if self._ranks > 1 and self._llm.model_executor.is_failed:
                raise RuntimeError(f"one of the engine's {self._ranks} ranks died") from e
            raise

    def running(self) -> int:
        """Requests in the current batch."""
        return len(self._core.engine_core.scheduler.running)  # type: ignore[attr-defined]

    def forget_prefixes(self, *, running: bool = False) -> bool:
        """Drop cached keys and values; those of `running` requests are computed anew. False: vLLM did not do it."""
        return bool(self._llm.reset_prefix_cache(reset_running_requests=running))

    def rpc(self, method: str, *args: Any) -> Any:
        """Call a method of `WorkerSide` on every rank; what the first returned. Raises what a rank raised."""
        return self._llm.collective_rpc(method, args=args)[0]

    def send(self, method: str, tensors: Mapping[str, torch.Tensor], *args: Any) -> Any:
        """`rpc` of a method whose first argument is tensors."""
        if self._ranks == 1:
            return self.rpc(method, tensors, *args)
        with tempfile.NamedTemporaryFile(dir=_SHARED_MEMORY, prefix="rlcore-weights-") as file:
            save_file({n: t.contiguous() for n, t in tensors.items()}, file.name)
            return self.rpc("rl_with_file", method, file.name, *args)

    def close(self) -> None:
        """Stop the engine and free its memory."""
        self._core.shutdown()


class NoiseProcessor(LogitsProcessor):
    """Gaussian noise on the logits, to make a mismatch on purpose. vLLM's processed log-probs include it.

    The noise depends on (request seed, position) alone, so on neither the batch nor a recomputation.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._std = float(vllm_config.additional_config["logit_noise"])
        self._device = device
        self._rows: dict[int, tuple[int, list[int]]] = {}  # batch row -> (request seed, its output tokens so far)

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        process_dict_updates(self._rows, batch_update, lambda params, _, out: (int(params.seed or 0), out))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator()
        for row, (seed, output) in self._rows.items():
            generator.manual_seed(derive_seed(seed, "rollout/logit_noise", len(output)))
            noise = torch.randn(logits.shape[1], generator=generator)
            logits[row] += self._std * noise.to(logits.device, logits.dtype)
        return logits


def on_cpu() -> bool:
    """Whether vLLM runs on the CPU here."""
    return bool(current_platform.is_cpu())


def engine_dtype(dtype: str) -> torch.dtype:
    """auto: float32 on CPU, bfloat16 on GPU (vLLM's own auto would make float32 checkpoints half precision)."""
    if dtype == "auto":
        return torch.float32 if on_cpu() else torch.bfloat16
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]


def _gather_logprobs(logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> LogprobsTensors:
    """vLLM's Sampler.gather_logprobs without the sampled token's rank, which nobody here reads and which costs most.

    `logprobs` [n, V], `token_ids` [n] -> rows [n, 1 + num_logprobs], the sampled token first.
    """
    top, top_ids = torch.topk(logprobs, num_logprobs, dim=-1)
    sampled = token_ids.unsqueeze(-1)
    ids = torch.cat((sampled, top_ids), dim=1).to(torch.int32)
    rows = torch.cat((logprobs.gather(-1, sampled), top), dim=1)
    return LogprobsTensors(ids, rows, torch.zeros_like(token_ids))


def _sparse_options(sparse: BlockTopK | None) -> dict[str, Any]:
    """The rule's pages, and the backend that `install` replaces: on some GPUs vLLM would prefer another."""
    if sparse is None:
        return {}
    return {"block_size": sparse.block_size} | ({} if on_cpu() else {"attention_backend": "FLASH_ATTN"})


def _start(args: EngineArgs, sparse: BlockTopK | None) -> LLMEngine:
    """The engine; a sparse rule replaces the platform's attention backend first."""
    if sparse is None:
        return LLMEngine.from_engine_args(args)
    name = "sparse_backend_cpu" if on_cpu() else "sparse_backend_gpu"
    backend = importlib.import_module(f"rlcore.rollout.{name}")
    backend.install(sparse)
    llm = LLMEngine.from_engine_args(args)
    backend.bind(llm.model_executor.driver_worker.model_runner)
    return llm


def _engine_args(*, kv_cache_gib: float, logit_noise: float, tensor_parallel: int, **common: Any) -> EngineArgs:
    if on_cpu():
        # A prompt cut into chunks draws once too often from its seeded generator, and vLLM can rewind only GPU ones.
        common["enable_chunked_prefill"] = False
        common["kv_cache_memory_bytes"] = int(kv_cache_gib * 2**30)
    if logit_noise:
        common["logits_processors"] = [NoiseProcessor]
        common["additional_config"] = {"logit_noise": logit_noise}
    return EngineArgs(
        **common,
        load_format="safetensors",  # "auto" would unpickle another format
        tensor_parallel_size=tensor_parallel,
        distributed_executor_backend="uni" if tensor_parallel == 1 else "mp",
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        async_scheduling=False,
        disable_log_stats=True,
        worker_extension_cls=f"{__name__}.{WorkerSide.__name__}",
        seed=0,
    )


def _keep_weights_live() -> None:
    """Keep vLLM's CPU linears from packing their weights away at load: packed ones cannot be updated in place, and a
    reload silently leaves the tied LM head on its old copy."""
    import vllm._custom_ops as ops
    import vllm.model_executor.layers.utils as layers

    ops._supports_onednn = False
    layers.check_cpu_sgl_kernel = lambda *_: False


if on_cpu():  # here, since every rank's process needs it before it loads its part
    _keep_weights_live()
