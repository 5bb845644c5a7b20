"""The vLLM engine as a sampler whose weights change between two decode steps. The file that imports vLLM.

The engine core is driven directly and its outputs are kept as the arrays they are: vLLM's own output processor turns
every log-prob into Python objects, which costs more than computing them (see benchmarks/rollout_logprobs.py).
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine import FinishReason as VllmFinish
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from rlcore.errors import UserError
from rlcore.models import load_tokenizer
from rlcore.rollout.checks import check_length, check_settings, check_vocabulary
from rlcore.rollout.held_weights import HeldWeights
from rlcore.rollout.model_folder import read_config
from rlcore.rollout.prompt_lengths import PROMPT_LEN
from rlcore.rollout.quantization import quantization_options
from rlcore.rollout.segments import Sample
from rlcore.rollout.stop_text import StopWatcher
from rlcore.seeding import derive_seed
from rlcore.types import ActorKind, FinishReason, OnPublish, Request, SamplingSpec, Trajectory
from rlcore.weights.rounding import Granularity, Rounding

if TYPE_CHECKING:
    from rlcore.attention.block_topk import BlockTopK

_EXTENSION = "rlcore.rollout.worker_extension.WeightExtension"
_FINISH: dict[VllmFinish, FinishReason] = {VllmFinish.STOP: "stop", VllmFinish.LENGTH: "length"}


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


class VllmEngine:
    """`interfaces.Engine` over one in-process vLLM engine. Not thread-safe: one thread owns it."""

    def __init__(
        self,
        *,
        model_path: str,
        actor_id: str,
        actor_kind: ActorKind = "bf16",
        dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        max_len: int = 512,
        max_num_seqs: int = 256,
        max_batched_tokens: int | None = None,
        kv_cache_gib: float = 1.0,
        gpu_memory_utilization: float = 0.85,
        enforce_eager: bool = True,
        prefix_caching: bool = True,
        tensor_parallel: int = 1,
        logprobs_k: int = 20,
        kv_on_update: Literal["recompute", "keep"] = "recompute",
        quantization: Literal["fp8"] | None = None,
        kv_cache_dtype: str = "auto",
        rounding: Rounding = "none",
        scales: Granularity = "tensor",
        keep_high_precision: Sequence[str] = ("lm_head", "embed_tokens"),
        logit_noise: float = 0.0,
        temperature_scale: float = 1.0,
        sparse: BlockTopK | None = None,
        policy_path: str | None = None,
        version: int = 0,
    ) -> None:
        """Start the engine and warm it up. Lengths in tokens, memory in GiB.

        logprobs_k: the most top log-probs a request may ask for. kv_on_update: what an in-flight update does with the
        keys and values of running requests. rounding: emulated precision, applied to every set of weights before it
        is loaded. scales: of quantised weights, emulated or vLLM's. sparse: attend by this rule; it then holds for
        every engine started later in this process. policy_path: the learner's model folder, whose vocabulary must be
        this model's. version: policy version of the weights in `model_path`.
        Raises UserError for settings or a model folder that cannot work.
        """
        config = read_config(model_path)
        check_length(config, max_len)
        check_vocabulary(model_path, policy_path)
        check_settings(
            on_cpu=current_platform.is_cpu(),
            tensor_parallel=tensor_parallel,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            rounding=rounding,
            max_batched_tokens=max_batched_tokens,
            max_len=max_len,
        )
        self.version = version
        self.actor_id, self.actor_kind = actor_id, actor_kind
        self._max_len, self._max_k, self._vocab = max_len, logprobs_k, int(config["vocab_size"])
        self._keep_kv = kv_on_update == "keep"
        self._temperature_scale = temperature_scale
        self._tokenizer = load_tokenizer(model_path)
        self._active: dict[str, Sample] = {}  # request id -> sample, in order of admission
        self._held: list[Sample] = []  # not started, waiting for a drain to end
        self._draining = False
        self._ready: list[Trajectory] = []  # finished during a blocking drain
        self._step_tokens = 0
        self._params: dict[SamplingSpec, SamplingParams] = {}
        torch_dtype = _engine_dtype(dtype)
        args = _engine_args(
            model=model_path,
            dtype=torch_dtype,
            max_model_len=max_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_batched_tokens or max(2048, max_len, max_num_seqs),
            enforce_eager=enforce_eager,
            enable_prefix_caching=prefix_caching,
            max_logprobs=max(1, min(logprobs_k, self._vocab)),
            **quantization_options(quantization, scales, keep_high_precision),
            kv_cache_dtype=kv_cache_dtype,
            kv_cache_gib=kv_cache_gib,
            gpu_memory_utilization=gpu_memory_utilization,
            logit_noise=logit_noise,
            **({} if sparse is None else {"block_size": sparse.block_size}),
        )
        self._llm = _start(args, sparse)
        self._core = self._llm.engine_core
        self._tasks = self._llm.get_supported_tasks()
        self._weights = HeldWeights(
            model_path,
            self._rpc,
            dtype=torch_dtype,
            rounding=rounding,
            scales=scales,
            keep_high_precision=keep_high_precision,
            quantised=quantization is not None,
        )
        self._runner().sampler.gather_logprobs = _gather_logprobs
        self._warm_up()
        gc.collect()
        gc.freeze()  # the loaded modules never die: keep the collector from walking them during generation

    # -- requests ----------------------------------------------------------------------------------------------------

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests, all or none. Raises ValueError for one that the engine cannot serve."""
        samples = [self._sample(r) for r in requests]
        ids = [s.request.request_id for s in samples]
        known = self._active.keys() | {s.request.request_id for s in self._held}
        if len(set(ids)) < len(ids) or (clash := known.intersection(ids)):
            raise ValueError(f"request ids must be unique among unfinished requests: {sorted(clash or ids)[0]} is not")
        if self._draining:
            self._held += samples
            return
        for sample in samples:
            self._submit(sample)

    def _sample(self, request: Request) -> Sample:
        spec, prompt = request.sampling, len(request.prompt_ids)
        if not 0 < prompt < self._max_len:
            raise ValueError(
                f"{request.request_id}: a prompt of {prompt} tokens does not fit model.max_len={self._max_len}, "
                f"which must hold it and at least one sampled token"
            )
        if spec.logprobs_k > self._max_k:
            raise ValueError(
                f"{request.request_id}: rollout.logprobs_k={spec.logprobs_k} is above the {self._max_k} "
                f"this engine was started for"
            )
        if int(max(request.prompt_ids)) >= self._vocab or int(min(request.prompt_ids)) < 0:
            raise ValueError(f"{request.request_id}: prompt token ids must lie in 0..{self._vocab - 1}")
        return Sample(
            request=request,
            budget=min(spec.max_new_tokens, self._max_len - prompt),
            version=self.version,
            watcher=StopWatcher(self._tokenizer, spec.stop) if spec.stop else None,
        )

    def _submit(self, sample: Sample) -> None:
        """Hand a sample to the engine core: the prompt, then the tokens it has so far."""
        request = sample.request
        params = self._sampling_params(request.sampling)
        params.max_tokens = sample.budget - len(sample.tokens)
        seed = request.seed
        if sample.segments:  # never the draws of an earlier segment again
            seed = derive_seed(seed, "rollout/resubmit", sample.segments)
        params.seed = seed
        params.extra_args = {PROMPT_LEN: len(request.prompt_ids)}  # sparse attention: resubmitted tokens are response
        prompt: dict[str, Any] = {"type": "token", "prompt_token_ids": [*map(int, request.prompt_ids), *sample.tokens]}
        if self._keep_kv:  # blocks of older weights stay cached: a salt keeps new requests from reusing them
            prompt["cache_salt"] = f"v{self.version}"
        core_request = self._llm.input_processor.process_inputs(
            request.request_id,
            prompt,  # type: ignore[arg-type]
            params,
            supported_tasks=self._tasks,
        )
        core_request.external_req_id = request.request_id
        self._core.add_request(core_request)
        self._active[request.request_id] = sample

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

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop requests; unknown ids are ignored."""
        ids = set(request_ids)
        self._held = [s for s in self._held if s.request.request_id not in ids]
        self._core.abort_requests([i for i in ids if self._active.pop(i, None) is not None])

    def unfinished(self) -> int:
        """Requests queued, running or held back by a drain."""
        return len(self._active) + len(self._held)

    def running(self) -> int:
        """Requests in the current batch."""
        return len(self._scheduler.running)

    def _runner(self) -> Any:
        return self._llm.model_executor.driver_worker.model_runner

    @property
    def _scheduler(self) -> Any:
        return self._core.engine_core.scheduler  # type: ignore[attr-defined]

    # -- decoding ----------------------------------------------------------------------------------------------------

    def step(self) -> list[Trajectory]:
        """One decode step; the trajectories that finished in it, unscored. Raises RuntimeError if vLLM failed one."""
        done, self._ready = self._ready, []
        return done + self._decode() if self._active else done

    def tokens_in_step(self) -> int:
        """Response tokens sampled by the last step."""
        return self._step_tokens

    def _decode(self) -> list[Trajectory]:
        done = []
        outputs = self._core.get_output().outputs
        self._step_tokens = 0
        for out in outputs:
            sample = self._active.get(out.request_id)
            if sample is None:
                continue
            tokens = out.new_token_ids
            self._step_tokens += len(tokens)
            sample.extend(tokens, out.new_logprobs[:2] if out.new_logprobs is not None else None)
            if (reason := self._finish_reason(sample, out)) is not None:
                del self._active[out.request_id]
                done.append(sample.finish(reason, self.actor_id, self.actor_kind))
        return done

    def _finish_reason(self, sample: Sample, out: EngineCoreOutput) -> FinishReason | None:
        if out.finish_reason is not None:
            if out.finish_reason not in _FINISH:
                raise RuntimeError(f"vLLM ended {out.request_id} with {out.finish_reason.name}: {out.stop_reason}")
            return _FINISH[out.finish_reason]
        if sample.watcher is not None and any([sample.watcher.push(t) for t in out.new_token_ids]):
            self._core.abort_requests([out.request_id])
            return "stop"
        return None

    # -- weights -----------------------------------------------------------------------------------------------------

    def begin_drain(self) -> None:
        """Let the requests that have sampled a token finish; hold back all others and all new ones."""
        if self._draining:
            return
        self._draining = True
        waiting = [s for s in self._active.values() if not s.tokens]
        self._withdraw(waiting)
        self._held += waiting

    def end_drain(self) -> None:
        """Queue what was held back, in order, under the version of now."""
        self._draining = False
        held, self._held = self._held, []
        for sample in held:
            sample.switch(self.version)
            self._submit(sample)

    def drained(self) -> bool:
        """True when a drain was begun and nothing runs any more."""
        return self._draining and not self._active

    def update_weights(self, version: int, tensors: Mapping[str, torch.Tensor], on_publish: OnPublish) -> None:
        """Load a whole set of weights (Hugging Face names) as `version`, atomically between two steps.

        finish: decodes until the requests that have tokens are done (their trajectories come with the next `step`).
        abort: requests are resubmitted with the tokens they have. in_flight: they go on, see `kv_on_update`.
        Raises ValueError, the old weights untouched, for a set that is not the model's or a version that goes back.
        """
        if version < self.version and self.unfinished():
            raise ValueError(f"version {version} is older than {self.version} while requests are unfinished")
        self._weights.check(tensors)
        if on_publish == "finish":
            self.begin_drain()
            while self._active:
                self._ready += self._decode()
            self._switch(version, tensors, running=False)
            self.end_drain()
        elif on_publish == "abort":
            samples = list(self._active.values())
            self._withdraw(samples)
            self._switch(version, tensors, running=False)
            self._resubmit(samples)
        elif on_publish == "in_flight":
            unstarted = [s for s in self._active.values() if not s.tokens] if self._keep_kv else []
            self._withdraw(unstarted)
            self._switch(version, tensors, running=True)
            for sample in self._active.values():
                sample.switch(version)
            self._resubmit(unstarted)
        else:
            raise UserError.choice("schedule.on_publish", on_publish, ("finish", "abort", "in_flight"))

    def stamp(self, version: int) -> None:
        """Note that the policy is at `version` while this engine's own weights stay (a frozen draft).

        Tokens sampled from now on carry `version`, those of running requests too.
        """
        self.version = version
        for sample in self._active.values():
            sample.switch(version)

    def _withdraw(self, samples: Iterable[Sample]) -> None:
        ids = [s.request.request_id for s in samples]
        for request_id in ids:
            del self._active[request_id]
        self._core.abort_requests(ids)

    def _resubmit(self, samples: Iterable[Sample]) -> None:
        for sample in samples:
            sample.switch(self.version)
            sample.segments += bool(sample.tokens)
            self._submit(sample)

    def _switch(self, version: int, tensors: Mapping[str, torch.Tensor], *, running: bool) -> None:
        self._weights.load(tensors)
        self.version = version
        if running and self._keep_kv:
            return  # old keys and values stay on purpose; new requests carry another cache salt
        if not self._llm.reset_prefix_cache(reset_running_requests=running):
            raise RuntimeError("vLLM did not drop its prefix cache: keys and values of older weights would be reused")

    def checksums(self, names: Iterable[str]) -> dict[str, int]:
        """Checksums of the weights as the engine holds them: see `HeldWeights.checksums`."""
        return self._weights.checksums(names)

    def names(self) -> list[str]:
        """Hugging Face names of all weights, tied ones once."""
        return self._weights.names()

    def _rpc(self, method: str, *args: Any) -> Any:
        return self._llm.collective_rpc(method, args=args)[0]

    # -- start and end -----------------------------------------------------------------------------------------------

    def _warm_up(self) -> None:
        """The first step compiles and allocates: pay for it before anybody waits."""
        spec = SamplingSpec(max_new_tokens=2, logprobs_k=self._max_k)
        prompt = torch.zeros(1, dtype=torch.int32).numpy()
        self.add([Request(-1, i, "warm-up", prompt, spec, seed=i, purpose="warm-up") for i in range(2)])
        while self._active:
            self._decode()
        self._llm.reset_prefix_cache()

    def close(self) -> None:
        """Stop the engine and free its memory."""
        self._core.shutdown()


def _engine_dtype(dtype: str) -> torch.dtype:
    """auto: float32 on CPU, bfloat16 on GPU (vLLM's own auto would make float32 checkpoints half precision)."""
    if dtype == "auto":
        return torch.float32 if current_platform.is_cpu() else torch.bfloat16
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


def _start(args: EngineArgs, sparse: BlockTopK | None) -> LLMEngine:
    """The engine; a sparse rule replaces the platform's attention backend first."""
    if sparse is None:
        return LLMEngine.from_engine_args(args)
    name = "sparse_backend_cpu" if current_platform.is_cpu() else "sparse_backend_gpu"
    backend = importlib.import_module(f"rlcore.rollout.{name}")
    backend.install(sparse)
    llm = LLMEngine.from_engine_args(args)
    backend.bind(llm.model_executor.driver_worker.model_runner)
    return llm


def _engine_args(*, kv_cache_gib: float, logit_noise: float, **common: Any) -> EngineArgs:
    if current_platform.is_cpu():
        _keep_weights_live()
        # A prompt cut into chunks draws once too often from its seeded generator, and vLLM can rewind only GPU ones.
        common["enable_chunked_prefill"] = False
        common["kv_cache_memory_bytes"] = int(kv_cache_gib * 2**30)
    if logit_noise:
        common["logits_processors"] = [NoiseProcessor]
        common["additional_config"] = {"logit_noise": logit_noise}
    return EngineArgs(
        **common,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        async_scheduling=False,
        disable_log_stats=True,
        worker_extension_cls=_EXTENSION,
        seed=0,
    )


def _keep_weights_live() -> None:
    """Keep vLLM's CPU linears from packing their weights away at load: packed ones cannot be updated in place, and a
    reload silently leaves the tied LM head on its old copy."""
    import vllm._custom_ops as ops
    import vllm.model_executor.layers.utils as layers

    ops._supports_onednn = False
    layers.check_cpu_sgl_kernel = lambda *_: False
