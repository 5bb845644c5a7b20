"""The vLLM engine as a sampler whose weights change between two decode steps."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import torch

from rlcore.errors import UserError
from rlcore.models import load_tokenizer
from rlcore.rollout.checks import attention_heads, check_length, check_settings, check_vocabulary
from rlcore.rollout.held_weights import HeldWeights
from rlcore.rollout.model_folder import read_config
from rlcore.rollout.quantization import quantization_options
from rlcore.rollout.request_book import RequestBook
from rlcore.rollout.vllm_core import VllmCore, engine_dtype, on_cpu
from rlcore.types import ActorKind, OnPublish, Request, SamplingSpec, Trajectory
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
        every engine started later in this process. tensor_parallel: ranks that share the model, each a process and on
        a GPU machine a GPU. policy_path: the learner's model folder, whose vocabulary must be
        this model's. version: policy version of the weights in `model_path`.
        Raises UserError for settings or a model folder that cannot work.
        """
        config = read_config(model_path)
        check_length(config, max_len)
        check_vocabulary(model_path, policy_path)
        check_settings(
            on_cpu=on_cpu(),
            tensor_parallel=tensor_parallel,
            heads=attention_heads(config),
            sparse=sparse is not None,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            rounding=rounding,
            max_batched_tokens=max_batched_tokens,
            max_len=max_len,
        )
        vocab, torch_dtype = int(config["vocab_size"]), engine_dtype(dtype)
        self._core = VllmCore(
            vocab=vocab,
            temperature_scale=temperature_scale,
            sparse=sparse,
            tensor_parallel=tensor_parallel,
            model=model_path,
            dtype=torch_dtype,
            max_model_len=max_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_batched_tokens or max(2048, max_len, max_num_seqs),
            enforce_eager=enforce_eager,
            enable_prefix_caching=prefix_caching,
            max_logprobs=max(1, min(logprobs_k, vocab)),
            **quantization_options(quantization, scales, keep_high_precision),
            kv_cache_dtype=kv_cache_dtype,
            kv_cache_gib=kv_cache_gib,
            gpu_memory_utilization=gpu_memory_utilization,
            logit_noise=logit_noise,
        )
        self._weights = HeldWeights(
            model_path,
            self._core,
            dtype=torch_dtype,
            rounding=rounding,
            scales=scales,
            keep_high_precision=keep_high_precision,
            quantised=quantization is not None,
        )
        self._keep_kv = kv_on_update == "keep"
        self._book = RequestBook(
            self._core,
            load_tokenizer(model_path),
            actor_id=actor_id,
            actor_kind=actor_kind,
            max_len=max_len,
            max_k=logprobs_k,
            vocab=vocab,
            salted=self._keep_kv,  # blocks of older weights stay cached: keep new requests from reusing them
            version=version,
        )
        self._ready: list[Trajectory] = []  # finished during a blocking drain
        self._warm_up(logprobs_k)
        gc.collect()
        gc.freeze()  # the loaded modules never die: keep the collector from walking them during generation

    # -- requests ----------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Policy version that the tokens sampled now carry."""
        return self._book.version

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests, all or none. Raises ValueError for one that the engine cannot serve."""
        self._book.add(requests)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop requests; unknown ids are ignored."""
        self._book.abort(request_ids)

    def unfinished(self) -> int:
        """Requests queued, running or held back by a drain."""
        return self._book.unfinished()

    def running(self) -> int:
        """Requests in the current batch."""
        return self._core.running()

    def step(self) -> list[Trajectory]:
        """One decode step; the trajectories that finished in it, unscored. Raises RuntimeError if vLLM failed one."""
        done, self._ready = self._ready, []
        return done + self._book.decode() if self._book.active else done

    def tokens_in_step(self) -> int:
        """Response tokens sampled by the last step."""
        return self._book.step_tokens

    def begin_drain(self) -> None:
        """Let the requests that have sampled a token finish; hold back all others and all new ones."""
        self._book.begin_drain()

    def end_drain(self) -> None:
        """Queue what was held back, in order, under the version of now."""
        self._book.end_drain()

    def drained(self) -> bool:
        """True when a drain was begun and nothing runs any more."""
        return self._book.drained()

    # -- weights -----------------------------------------------------------------------------------------------------

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
            self._book.begin_drain()
            while self._book.active:
                self._ready += self._book.decode()
            self._switch(version, tensors, running=False)
            self._book.end_drain()
        elif on_publish == "abort":
            samples = self._book.withdraw(started=True)
            self._switch(version, tensors, running=False)
            self._book.resubmit(samples)
        elif on_publish == "in_flight":
            unstarted = self._book.withdraw(started=False) if self._keep_kv else []
            self._switch(version, tensors, running=True)
            self._book.resubmit(unstarted)
        else:
            raise UserError.choice("schedule.on_publish", on_publish, ("finish", "abort", "in_flight"))

    def _switch(self, version: int, tensors: Mapping[str, torch.Tensor], *, running: bool) -> None:
        self._weights.load(tensors)
        self._book.stamp(version)
        if running and self._keep_kv:
            return  # old keys and values stay on purpose; new requests carry another cache salt
        if not self._core.forget_prefixes(running=running):
            raise RuntimeError("vLLM did not drop its prefix cache: keys and values of older weights would be reused")

    def stamp(self, version: int) -> None:
        """Note that the policy is at `version` while this engine's own weights stay (a frozen draft).

        Tokens sampled from now on carry `version`, those of running requests too.
        """
        self._book.stamp(version)

    def checksums(self, names: Iterable[str]) -> dict[str, int]:
        """Checksums of the weights as the engine holds them: see `HeldWeights.checksums`."""
        return self._weights.checksums(names)

    def names(self) -> list[str]:
        """Hugging Face names of all weights, tied ones once."""
        return self._weights.names()

    # -- start and end -----------------------------------------------------------------------------------------------

    def _warm_up(self, logprobs_k: int) -> None:
        """The first step compiles and allocates: pay for it before anybody waits."""
        spec = SamplingSpec(max_new_tokens=2, logprobs_k=logprobs_k)
        prompt = torch.zeros(1, dtype=torch.int32).numpy()
        self.add([Request(-1, i, "warm-up", prompt, spec, seed=i, purpose="warm-up") for i in range(2)])
        while self._book.active:
            self._book.decode()
        self._core.forget_prefixes()

    def close(self) -> None:
        """Stop the engine and free its memory."""
        self._core.close()
