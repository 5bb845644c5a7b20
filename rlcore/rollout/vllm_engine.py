"""The vLLM engine as a sampler whose weights change between two decode steps: requests, versions, drains."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import torch

from rlcore.errors import UserError
from rlcore.models import load_tokenizer
from rlcore.rollout.checks import check_length, check_settings, check_vocabulary
from rlcore.rollout.held_weights import HeldWeights
from rlcore.rollout.model_folder import read_config
from rlcore.rollout.quantization import quantization_options
from rlcore.rollout.segments import Sample
from rlcore.rollout.stop_text import StopWatcher
from rlcore.rollout.vllm_core import Output, VllmCore, engine_dtype, on_cpu
from rlcore.seeding import derive_seed
from rlcore.types import ActorKind, FinishReason, OnPublish, Request, SamplingSpec, Trajectory
from rlcore.weights.rounding import Granularity, Rounding

if TYPE_CHECKING:
    from rlcore.attention.block_topk import BlockTopK


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
            on_cpu=on_cpu(),
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
        self._tokenizer = load_tokenizer(model_path)
        self._active: dict[str, Sample] = {}  # request id -> sample, in order of admission
        self._held: list[Sample] = []  # not started, waiting for a drain to end
        self._draining = False
        self._ready: list[Trajectory] = []  # finished during a blocking drain
        self._step_tokens = 0
        torch_dtype = engine_dtype(dtype)
        self._core = VllmCore(
            vocab=self._vocab,
            temperature_scale=temperature_scale,
            sparse=sparse,
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
        )
        self._weights = HeldWeights(
            model_path,
            self._core.rpc,
            dtype=torch_dtype,
            rounding=rounding,
            scales=scales,
            keep_high_precision=keep_high_precision,
            quantised=quantization is not None,
        )
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
        seed = request.seed
        if sample.segments:  # never the draws of an earlier segment again
            seed = derive_seed(seed, "rollout/resubmit", sample.segments)
        self._core.add(
            request.request_id,
            [*map(int, request.prompt_ids), *sample.tokens],
            request.sampling,
            max_tokens=sample.budget - len(sample.tokens),
            seed=seed,
            prompt_len=len(request.prompt_ids),
            # blocks of older weights stay cached: a salt keeps new requests from reusing them
            cache_salt=f"v{self.version}" if self._keep_kv else None,
        )
        self._active[request.request_id] = sample

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop requests; unknown ids are ignored."""
        ids = set(request_ids)
        self._held = [s for s in self._held if s.request.request_id not in ids]
        self._core.abort([i for i in ids if self._active.pop(i, None) is not None])

    def unfinished(self) -> int:
        """Requests queued, running or held back by a drain."""
        return len(self._active) + len(self._held)

    def running(self) -> int:
        """Requests in the current batch."""
        return self._core.running()

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
        self._step_tokens = 0
        for out in list(self._core.step()):
            sample = self._active.get(out.request_id)
            if sample is None:
                continue
            self._step_tokens += len(out.tokens)
            sample.extend(out.tokens, out.rows)
            if (reason := self._finish_reason(sample, out)) is not None:
                del self._active[out.request_id]
                done.append(sample.finish(reason, self.actor_id, self.actor_kind))
        return done

    def _finish_reason(self, sample: Sample, out: Output) -> FinishReason | None:
        if out.finish is None and sample.watcher is not None and any([sample.watcher.push(t) for t in out.tokens]):
            self._core.abort([out.request_id])
            return "stop"
        return out.finish

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
        self._core.abort(ids)

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
        if not self._core.forget_prefixes(running=running):
            raise RuntimeError("vLLM did not drop its prefix cache: keys and values of older weights would be reused")

    def checksums(self, names: Iterable[str]) -> dict[str, int]:
        """Checksums of the weights as the engine holds them: see `HeldWeights.checksums`."""
        return self._weights.checksums(names)

    def names(self) -> list[str]:
        """Hugging Face names of all weights, tied ones once."""
        return self._weights.names()

    # -- start and end -----------------------------------------------------------------------------------------------

    def _warm_up(self) -> None:
        """The first step compiles and allocates: pay for it before anybody waits."""
        spec = SamplingSpec(max_new_tokens=2, logprobs_k=self._max_k)
        prompt = torch.zeros(1, dtype=torch.int32).numpy()
        self.add([Request(-1, i, "warm-up", prompt, spec, seed=i, purpose="warm-up") for i in range(2)])
        while self._active:
            self._decode()
        self._core.forget_prefixes()

    def close(self) -> None:
        """Stop the engine and free its memory."""
        self._core.close()
