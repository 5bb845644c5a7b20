"""The vLLM engine as a rollout engine whose weights change between two decode steps."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.renderers.base import BaseRenderer
from vllm.renderers.registry import RENDERER_REGISTRY
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import FinishReason as VllmFinish
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.outputs import LogprobsLists

from rlcore.errors import UserError
from rlcore.interfaces import StepLoad, Wake, WeightStream
from rlcore.models.folder import is_recurrent, read_config, read_shapes
from rlcore.models.text import load_tokenizer
from rlcore.rollout.checks import check_model
from rlcore.rollout.engines.vllm import PROMPT_LEN, RULE
from rlcore.rollout.engines.vllm.arguments import engine_args
from rlcore.rollout.engines.vllm.patches import PROPOSALS, ROUTES
from rlcore.rollout.engines.vllm.platform import check_platform, on_cpu
from rlcore.rollout.engines.vllm.weight_loader import WeightLoader, shared_file
from rlcore.rollout.engines.vllm.worker_side import SEVERAL
from rlcore.rollout.engines.vllm_facts import VllmFacts
from rlcore.rollout.request_book import BookedEngine, CoreRequest, DecodeCore, Output, RequestBook
from rlcore.rollout.specs import EngineJob, RolloutSpec
from rlcore.types import FinishReason, OnPublish, Request, SamplingSpec, Trajectory
from rlcore.weights.arrival import EngineTransfer

# The adapter of every request, where the job has one. vLLM reads no folder of this name: an adapter
# is loaded before the first request, and replaced in place.
_ADAPTER = LoRARequest("published", 1, "published")
_FINISH: dict[VllmFinish, FinishReason] = {VllmFinish.STOP: "stop", VllmFinish.LENGTH: "length"}


# vLLM's engine core, driven directly.
#
# Its outputs stay arrays: vLLM's own output processor turns every log-prob into Python objects,
# which costs more than computing them (see benchmarks/speed/rollout_logprobs.py).


class VllmCore(DecodeCore):
    """One engine of vLLM whose scheduler runs in this process.

    With several ranks the model runs in as many child processes, which end with this one.
    """

    def __init__(self, job: EngineJob, vocab: int) -> None:
        """Start it. `vocab`: rows of the model's embedding."""
        self._ranks = job.actor.tensor_parallel
        self._temperature_scale = job.actor.temperature_scale
        self._vocab = vocab
        self._adapter = None if job.adapter is None else _ADAPTER
        self._llm = start_llm(job, vocab)
        self._core = self._llm.engine_core
        self._tasks = self._llm.get_supported_tasks()
        self._params: dict[tuple[SamplingSpec, tuple[int, ...]], SamplingParams] = {}
        # A step that is under way when a request is dropped still gives a token for its name. The
        # request may come back meanwhile: so vLLM gets a name that no other one ever had.
        self._names: dict[str, str] = {}  # request id -> vLLM's name for it
        self._count = itertools.count()
        self.rpc("rl_plain_gather")
        if (kind := job.actor.activations) != "none":
            kept, last = job.actor.keep_high_precision, job.actor.precise_layers
            self.rpc("rl_round_inputs", kind, kept, last, job.key)
        #: why log-prob rows are copied to the host every step; None: `kept_rows` keeps them
        self.copied: str | None = SEVERAL
        if job.actor.speculate is not None:
            self.copied = "another model proposes tokens (speculate)"
        elif self._ranks == 1:
            self.copied = self.rpc("rl_keep_rows")
        #: why vLLM's modules run the model; None: `cpu/decoder.py` runs it
        self.by_modules: str | None = "cpu_fast_paths is false"
        #: why the common positions of requests are not computed once; None: they are
        self.unshared: str | None = "cpu_fast_paths is false"
        self._proposals: Proposals | None = None
        if job.bitwise:
            self.by_modules, self.unshared = self.rpc("rl_run_bitwise"), "bitwise is true"
        elif job.actor.speculate is not None:
            self.by_modules = self.unshared = "another model proposes tokens (speculate)"
            self.rpc("rl_speculate")
            self._proposals = Proposals(self._scheduler)
        elif job.cpu_fast_paths:
            self.by_modules, self.unshared = self.rpc("rl_fast_paths", self._ranks == 1)
        if job.routes and on_cpu():
            blocks = self._scheduler.kv_cache_manager.get_block_ids
            ROUTES.replace(self.rpc("rl_record_routes", blocks), of=self._scheduler)
        self._quick: Any = None
        if self.by_modules is None:
            self._quick = self.rpc("rl_quick_steps", self._scheduler)

    @property
    def _scheduler(self) -> Any:
        """vLLM's scheduler."""
        return self._core.engine_core.scheduler  # type: ignore[attr-defined]

    def add(self, request: CoreRequest) -> None:
        """Queue a request."""
        params = self._sampling_params(request.sampling, request.stop_ids)
        params.max_tokens = request.max_tokens
        params.seed = request.seed
        # Sparse attention: the tokens of a resubmitted response are no prompt.
        params.extra_args = {PROMPT_LEN: request.prompt_len}
        if request.page_rule is not None:
            params.extra_args[RULE] = request.page_rule
        prompt: dict[str, Any] = {"type": "token", "prompt_token_ids": list(request.token_ids)}
        if request.cache_salt is not None:
            prompt["cache_salt"] = request.cache_salt
        name = f"{request.request_id}/{next(self._count)}"
        core_request = self._llm.input_processor.process_inputs(
            name,
            prompt,  # type: ignore[arg-type]
            params,
            lora_request=self._adapter,
            supported_tasks=self._tasks,
        )
        core_request.external_req_id = name
        self._core.add_request(core_request)
        self._names[request.request_id] = name

    def _sampling_params(self, spec: SamplingSpec, stop_ids: tuple[int, ...]) -> SamplingParams:
        """A template per kind of request; vLLM copies it when a request is queued."""
        kind = spec, stop_ids
        if kind not in self._params:
            self._params[kind] = SamplingParams(
                temperature=spec.temperature * self._temperature_scale,
                top_p=spec.top_p,
                top_k=spec.top_k,
                min_p=spec.min_p,
                logprobs=None if spec.logprobs_k < 0 else min(spec.logprobs_k, self._vocab),
                flat_logprobs=True,
                stop_token_ids=list(stop_ids),
                detokenize=False,
                skip_clone=True,  # a shallow copy: only its plain fields differ between requests
            )
        return self._params[kind]

    def abort(self, request_ids: list[str]) -> None:
        """Drop requests that are queued or running."""
        names = (self._names.pop(i, None) for i in request_ids)
        self._core.abort_requests([n for n in names if n is not None])

    def step(self) -> Iterable[Output]:
        """One engine step. Raises RuntimeError if vLLM failed a request or lost a rank."""
        for out in self._outputs():
            request_id = out.request_id.rpartition("/")[0]
            if self._names.get(request_id) != out.request_id:
                continue  # dropped while the step was under way
            if out.finish_reason is not None:
                del self._names[request_id]
                if out.finish_reason not in _FINISH:
                    raise RuntimeError(
                        f"vLLM ended {request_id} with {out.finish_reason.name}: {out.stop_reason}"
                    )
            rows = out.new_logprobs
            if isinstance(rows, LogprobsLists):
                rows = rows[:2]
            finish = None if out.finish_reason is None else _FINISH[out.finish_reason]
            yield Output(request_id, out.new_token_ids, rows, finish, routes=out.routed_experts)

    def settle(self) -> Iterable[Output]:
        """Outputs of the step that is under way between two calls of `step` with asynchronous
        scheduling; schedules no further step. Raises as `step` does."""
        engine: Any = self._core.engine_core  # type: ignore[attr-defined]
        if engine.batch_queue is None:
            return
        engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        try:
            while any(s.total_num_scheduled_tokens for _, s, _ in engine.batch_queue):
                yield from self.step()
        finally:
            engine.scheduler.set_pause_state(PauseState.UNPAUSED)

    def _outputs(self) -> list[Any]:
        if self._quick is not None and (found := self._quick.step()) is not None:
            return found
        try:
            return list(self._core.get_output().outputs)
        except RuntimeError as e:
            # vLLM's own message is only "cancelled" when the process of a rank has ended.
            if self._ranks > 1 and self._llm.model_executor.is_failed:
                raise RuntimeError(f"one of the engine's {self._ranks} ranks died") from e
            raise

    def take_proposals(self) -> tuple[int, int]:
        """Tokens that another model proposed since the last call, and how many were accepted."""
        return (0, 0) if self._proposals is None else self._proposals.take()

    def running(self) -> int:
        """Requests in the current batch."""
        return len(self._scheduler.running)

    def forget_prefixes(self, *, running: bool = False) -> bool:
        """Drop cached keys and values; `running` requests recompute theirs.

        False: vLLM did not do it.
        """
        return bool(self._llm.reset_prefix_cache(reset_running_requests=running))

    def sleep(self) -> float:
        """Free keys and values, and on GPUs the weights, which are copied to the host; bytes freed
        on the first rank. No request may be queued or running.

        vLLM's level 2 is not used: with the weights it drops tensors that are neither parameters
        nor buffers, which no publication contains (vLLM's issue 29341).
        """
        if on_cpu():
            self.forget_prefixes()
            return float(self.rpc("rl_release"))
        if self.copied is None:
            self.rpc("rl_copy_rows")
        before = self.rpc("rl_free_bytes")
        self._llm.sleep(level=1)
        return float(self.rpc("rl_free_bytes") - before)

    def wake(self, what: Wake) -> None:
        """Take memory back: for the weights, then for everything."""
        if on_cpu():
            if what == "all":
                self.rpc("rl_take_back")
            return
        # without tags vLLM would map memory again that is awake already
        asleep: set[str] = self._llm.model_executor.sleeping_tags
        self._llm.wake_up(tags=["weights"] if what == "weights" else sorted(asleep))

    def rpc(self, method: str | Callable[..., Any], *args: Any) -> Any:
        """Call a method of `WorkerSide`, or a function of the worker, on every rank.

        Returns what the first rank returned; raises what any rank raised.
        """
        return self._llm.collective_rpc(method, args=args)[0]

    def send(self, method: str, tensors: Mapping[str, torch.Tensor], *args: Any) -> Any:
        """`rpc` of a method whose first argument is tensors."""
        if self._ranks == 1:
            return self.rpc(method, tensors, *args)
        with shared_file(tensors) as path:
            return self.rpc("rl_with_file", method, path, *args)

    def load_adapter(self, folder: str) -> None:
        """Replace the adapter of all requests on every rank by the one in a PEFT folder."""
        new = LoRARequest(_ADAPTER.lora_name, _ADAPTER.lora_int_id, folder, load_inplace=True)
        if not self._llm.add_lora(new):
            raise RuntimeError("vLLM did not load the adapter that was published")

    def close(self) -> None:
        """Stop the engine and free its memory."""
        self._core.shutdown()


class Proposals:
    """Counts what a speculating engine's scheduler sees of proposed tokens."""

    def __init__(self, scheduler: Any) -> None:
        self._counts = [0, 0]  # proposed, accepted
        PROPOSALS.replace(self._observe, of=scheduler)

    def _observe(
        self, stats: None, num_draft_tokens: int, num_accepted_tokens: int, *_: Any, **__: Any
    ) -> None:
        self._counts[0] += num_draft_tokens
        self._counts[1] += num_accepted_tokens

    def take(self) -> tuple[int, int]:
        """(proposed, accepted) since the last call."""
        proposed, accepted = self._counts
        self._counts = [0, 0]
        return proposed, accepted


class TokensOnly(BaseRenderer):
    """Renders no messages, since requests are token ids; vLLM's own renderer imports a web API's
    500 modules for them, in 0.7 s of processor time."""

    def render_messages(self, messages: Any, params: Any) -> Any:
        raise RuntimeError("requests of an engine are token ids, not messages")


def start_llm(job: EngineJob, vocab: int) -> LLMEngine:
    """The engine, on the model runner that its actor asks for."""
    if on_cpu():
        RENDERER_REGISTRY.register("hf", TokensOnly.__module__, TokensOnly.__name__)
        if is_recurrent(read_config(job.model_path)):
            from rlcore.rollout.engines.vllm.recurrent_cpu import install

            install()
    second = _on_second_runner(job)
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(second))
    llm = _start_with_attention(job, vocab)
    if llm.vllm_config.use_v2_model_runner != second:
        raise RuntimeError(
            "vLLM keeps the model runner of the first engine of a process: start an engine on "
            f"{'the second' if second else 'the first'} in another process"
        )
    return llm


def _on_second_runner(job: EngineJob) -> bool:
    """vLLM 0.26 returns experts from its first runner alone, 0.32 from its second."""
    if job.routes and not on_cpu() and job.actor.second_runner is None:
        return importlib.util.find_spec("vllm.config.aux_output") is not None
    return job.actor.on_second_runner


def _start_with_attention(job: EngineJob, vocab: int) -> LLMEngine:
    """The engine; a sparse rule replaces the platform's attention backend first."""
    args = engine_args(job, vocab)
    if job.actor.sparse is None:
        return LLMEngine.from_engine_args(args)
    name = "sparse_cpu" if on_cpu() else "sparse_backend_gpu"
    backend = importlib.import_module(f"rlcore.rollout.engines.vllm.{name}")
    backend.install(job.actor.sparse)
    llm = LLMEngine.from_engine_args(args)
    backend.bind(llm.model_executor.driver_worker.model_runner)
    return llm


class VllmEngine(BookedEngine):
    """One in-process vLLM engine. Not thread-safe: one thread owns it."""

    facts = VllmFacts

    def __init__(self, job: EngineJob) -> None:
        """Start the engine and warm it up.

        A sparse rule then holds for every engine started later in this process. Raises UserError
        for settings or a model folder that cannot work here.
        """
        check_platform(job.actor, job.key)
        check_model(job)
        vocab = int(read_config(job.model_path)["vocab_size"])
        self.core = VllmCore(job, vocab)
        unmatched = self.core.rpc("rl_unmatched", read_shapes(job.model_path))
        if unmatched:
            self.core.close()
            raise UserError(
                f"{job.key}.engine=vllm cannot take weights of {job.model_path} as they are "
                f"published: {unmatched}; choose a model of another family (docs/models.md)."
            )
        self._weights = WeightLoader(job.model_path, self.core, job.actor, job.adapter)
        self._keep_kv = job.actor.kv_on_update == "keep"
        book = RequestBook(
            self.core,
            job,
            load_tokenizer(job.model_path),
            vocab=vocab,
            # Blocks of older weights stay cached then: new requests must not reuse them.
            salted=self._keep_kv,
        )
        super().__init__(book)
        self._warm_up(job.logprobs_k)
        gc.collect()
        # Loaded modules live as long as the process: no need to scan them during generation.
        gc.freeze()

    # -- requests ----------------------------------------------------------------------------------

    def running(self) -> int:
        """Requests in the current batch."""
        return self.core.running()

    def step(self) -> list[Trajectory]:
        """One decode step; the trajectories that finished in it, unscored.

        Raises RuntimeError if vLLM failed a request.
        """
        # A new thread takes torch's thread count at its first torch operation on many values, but
        # vLLM's attention plans with OpenMP's before that: read it, which sets OpenMP's.
        torch.get_num_threads()
        return super().step()

    def load_of_step(self) -> StepLoad:
        """Return the work of the last step."""
        proposed, accepted = self.core.take_proposals()
        return replace(super().load_of_step(), proposed=proposed, accepted=accepted)

    # -- weights -----------------------------------------------------------------------------------

    def update_weights(self, version: int, weights: WeightStream, on_publish: OnPublish) -> None:
        """Load a whole set of weights as `version`, atomically between two steps.

        finish: decodes until the requests that have tokens are done (their trajectories come with
        the next `step`). abort: requests are resubmitted with the tokens they have. in_flight: they
        go on, see `kv_on_update`. Raises ValueError, the old weights untouched, for a set that is
        not the model's or a version that goes back.
        """
        if version < self.version and self._book.unfinished():
            raise ValueError(
                f"version {version} is older than {self.version} while requests are unfinished"
            )
        self._weights.check(weights.shapes)
        # Tokens of steps that are already scheduled belong to the old weights.
        self._ready += self._book.settle()
        if on_publish == "finish":
            self._book.begin_drain()
            self._finish_active()
            self._switch(version, weights, running=False)
            self._book.end_drain()
        elif on_publish == "abort":
            draws = self._book.withdraw(started=True)
            self._switch(version, weights, running=False)
            self._book.resubmit(draws)
        else:  # in_flight
            unstarted = self._book.withdraw(started=False) if self._keep_kv else []
            self._switch(version, weights, running=True)
            self._book.resubmit(unstarted)

    def _switch(self, version: int, weights: WeightStream, *, running: bool) -> None:
        if isinstance(weights.buckets, EngineTransfer):
            self._weights.receive(weights.buckets, weights.proven)
        else:
            self._weights.load(weights)
        self._book.set_version(version, weights.precise_layers)
        if running and self._keep_kv:
            return  # old keys and values stay on purpose; new requests carry another cache salt
        if not self.core.forget_prefixes(running=running):
            raise RuntimeError(
                "vLLM did not drop its prefix cache: keys and values of older weights would be "
                "reused"
            )

    def checksums(self, names: Iterable[str]) -> dict[str, int]:
        """Checksums of the weights as the engine holds them: see `HeldWeights.checksums`."""
        return self._weights.checksums(names)

    def names(self) -> list[str]:
        """Hugging Face names of all weights, tied ones once."""
        return self._weights.names()

    # -- memory ------------------------------------------------------------------------------------

    def _free(self) -> float:
        return self.core.sleep()

    def _take_back(self, what: Wake) -> None:
        self.core.wake(what)

    # -- start and end -----------------------------------------------------------------------------

    def _warm_up(self, logprobs_k: int) -> None:
        """The first step compiles and allocates: do it before the first request waits for it."""
        sampling = RolloutSpec(max_new_tokens=2, logprobs_k=logprobs_k).sampling()
        prompt = np.zeros(1, np.int32)
        self.add(
            [Request(-1, i, "warm-up", prompt, sampling, i, purpose="warm-up") for i in range(2)]
        )
        while self._book.active:
            self._book.decode()
        self.core.forget_prefixes()

    def close(self) -> None:
        """Stop the engine and free its memory."""
        self.core.close()
