"""Settings of rollout actors and of sampling. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from rlcore.attention.specs import SparseSpec
from rlcore.engine_facts import EngineFacts, facts_of
from rlcore.interfaces import RolloutEngine
from rlcore.models.specs import DiffusionSpec, FreshModelSpec
from rlcore.registry import load_object, resolve
from rlcore.spec import Fixed, Spec, Unread, parsed, refuse, setting
from rlcore.types import ActorKind, SamplingSpec, actor_label
from rlcore.weights.adapters import AdapterShape
from rlcore.weights.specs import BLOCK_FORMATS, ActivationRounding, Rounding, RoundingSpec


class RolloutSpec(Spec):
    """The sampling of responses to each prompt."""

    fixed: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("temperature", "top_p", "top_k", "min_p"), Fixed.SAMPLED
    )

    samples_per_prompt: int = setting(8, "n: group size", gt=0)
    temperature: float = setting(1.0, "of sampling; the learner applies the same", gt=0)
    top_p: float = setting(
        1.0,
        "1: off; with truncation the learner conditions on the set that was kept (logprobs_k)",
        gt=0,
        le=1,
    )
    top_k: int = setting(0, "0: off; at most logprobs_k", ge=0)
    min_p: float = setting(0.0, "0: off; DVP sets it", ge=0, le=1)
    max_new_tokens: int = setting(64, "longest response", unit="tokens", gt=0)
    stop: tuple[str, ...] = setting((), "strings that end a response")
    logprobs_k: int = setting(
        20, "top log-probs stored per token, at most the vocabulary; 0: the sampled one only", ge=0
    )
    group_kinds: Literal["one", "mixed"] = setting(
        "one", "kinds of actors that draw the samples of a group; mixed: several"
    )
    request_timeout_s: float = setting(
        600.0,
        "deadline of decoding 1024 tokens, more in proportion: after it another actor continues "
        "the request; a sample that vanished is requested again after the same time",
        unit="s",
        gt=0,
    )

    def sampling(self) -> SamplingSpec:
        """How tokens are drawn, before corrections constrain it."""
        return SamplingSpec(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            max_new_tokens=self.max_new_tokens,
            stop=self.stop,
            logprobs_k=self.logprobs_k,
        )


class SpeculateSpec(Spec):
    """A small model proposes tokens, and the actor's own model accepts or replaces them, so that
    they are distributed as its own (speculative decoding)."""

    path: str = setting(
        meaning="Hugging Face folder of the model that proposes; it stays as it is", names="model"
    )
    tokens: int = setting(3, "proposed at a time", unit="tokens", gt=0, le=16)


class ActorSpec(RoundingSpec):
    """Engines of one kind."""

    fixed: ClassVar[Mapping[str, str]] = dict.fromkeys(("draft_path", "draft_fresh"), Fixed.WEIGHTS)

    unread: ClassVar[tuple[Unread, ...]] = (
        Unread(("kv_cache_gib",), lambda spec: not spec.on_cpu, "num_gpus above 0 means a GPU"),
        Unread(("gpu_memory_utilization",), lambda spec: spec.on_cpu, "num_gpus=0 has no GPU"),
        Unread(
            ("fp32_head",),
            lambda spec: spec.compute_dtype == "float32",
            "dtype is float32, of the head as well",
        ),
        Unread(
            ("keep_high_precision",),
            lambda spec: spec.kind != "fp8" and spec.emulated == "none",
            "nothing is rounded (kind, rounding, activations)",
        ),
        Unread(
            ("precise_layers",),
            lambda spec: spec.emulated == "none",
            "rounding=none: weights are not rounded here (vLLM's FP8: keep_high_precision)",
        ),
    )

    #: settings that an engine reads if its facts say so; true: refused with another engine, which
    #: would sample from something else; false: named as not read
    engine_settings: ClassVar[Mapping[str, bool]] = {
        "kind": True,
        "rounding": True,
        "activations": True,
        "scales": True,
        "keep_high_precision": True,
        "precise_layers": True,
        "tensor_parallel": True,
        "fp8_kv_cache": True,
        "sparse": True,
        "speculate": True,
        "logit_noise": True,
        "probability_floor": True,
        "temperature_scale": True,
        "fp32_head": False,
        "max_num_seqs": False,
        "max_batched_tokens": False,
        "kv_cache_gib": False,
        "gpu_memory_utilization": False,
        "enforce_eager": False,
        "second_runner": False,
        "async_scheduling": False,
        "prefix_caching": False,
        "kv_on_update": False,
    }

    kind: Literal["bf16", "fp8", "sparse", "draft"] = setting("bf16", "what makes it cheap")
    activations: ActivationRounding = setting(
        "none", "emulated rounding (CPU) of what linear maps read, each token by itself"
    )
    engine: str = setting(
        "vllm", "rollout engine, or file.py:Class; diffusion: of model.diffusion", names="code"
    )
    engine_args: dict[str, Any] = setting(
        default_factory=dict, meaning="the engine's own settings, which its facts declare"
    )
    count: int = setting(1, "engines of this kind", gt=0)
    dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto", "auto: bfloat16 on GPU, float32 on CPU"
    )
    num_cpus: float = setting(1, "CPUs an engine", gt=0)
    num_gpus: float = setting(
        0, "GPUs a rank of an engine: 0 (CPU), 1, or a share of one that the learner has too", ge=0
    )
    tensor_parallel: int = setting(1, "ranks that share one engine's model, each on its GPU", gt=0)
    fp32_head: bool = setting(
        False, "logits from float32 products where the model is bfloat16 (see learner.fp32_head)"
    )
    max_num_seqs: int = setting(256, "sequences decoded together", gt=0)
    max_batched_tokens: int | None = setting(
        None, "size of one engine step; null: the engine's choice", unit="tokens", gt=0
    )
    kv_cache_gib: float = setting(
        1.0, "CPU: KV cache; GPU: ignored, see gpu_memory_utilization", unit="GiB", gt=0
    )
    gpu_memory_utilization: float = setting(
        0.85, "share of GPU memory for weights and KV cache", gt=0, le=1
    )
    enforce_eager: bool | None = setting(
        None, "false: compile and capture graphs, which takes minutes at the start; null: on GPUs"
    )
    second_runner: bool | None = setting(
        None,
        "vLLM's second model runner, whose seeds cost no loop over requests; null: on GPUs, unless "
        "its logits have errors on purpose",
    )
    async_scheduling: bool | None = setting(
        None,
        "schedule a step before the tokens of the one before are read; null: on GPUs, unless "
        "its logits have errors on purpose",
    )
    prefix_caching: bool = setting(True, "share the keys and values of equal prefixes")
    kv_on_update: Literal["recompute", "keep"] = setting(
        "recompute", "in flight: keep leaves stale KV"
    )
    fp8_kv_cache: bool = setting(False, "GPU: keys and values in FP8")
    sparse: SparseSpec | None = None
    speculate: SpeculateSpec | None = None
    draft_path: str | None = setting(None, "kind draft: its Hugging Face folder", names="model")
    draft_fresh: FreshModelSpec | None = None
    logit_noise: float = setting(0.0, "std of noise added to actor logits, to study mismatch", ge=0)
    probability_floor: float = setting(
        0.0,
        "e: actors sample from (p + e)/(1 + V e), as a softmax of low precision does, to study "
        "mismatch",
        ge=0,
        lt=1,
    )
    temperature_scale: float = setting(1.0, "actor temperature error, to study mismatch", gt=0)

    @property
    def own_model(self) -> bool:
        """True if it samples with another model than the policy's."""
        return self.kind == "draft"

    @property
    def on_cpu(self) -> bool:
        return self.num_gpus == 0

    def facts(self, key: str) -> type[EngineFacts]:
        """Facts of the engine. `key`: of this section, such as actor.bf16. Raises UserError for a
        user's own engine that cannot be loaded."""
        return facts_of(ENGINE_FACTS, ENGINES, self.engine, f"{key}.engine")

    def own_sections(self, key: str) -> Mapping[str, Spec]:
        """The engine's own settings, as its facts declare them, as "engine_args"."""
        owner = f"{key}.engine={self.engine}"
        own = parsed(self.facts(key).settings, self.engine_args, f"{key}.engine_args", owner)
        return {} if own is None else {"engine_args": own}

    @property
    def eager(self) -> bool:
        """`enforce_eager` with null resolved."""
        return self.on_cpu if self.enforce_eager is None else self.enforce_eager

    @property
    def wrong_logits(self) -> str:
        """Name of a setting that puts errors on the logits, by vLLM's first runner; "" for none."""
        return next((n for n in ("logit_noise", "probability_floor") if getattr(self, n)), "")

    @property
    def on_second_runner(self) -> bool:
        """`second_runner` with null resolved."""
        if self.second_runner is None:
            return not self.on_cpu and not self.wrong_logits and self.speculate is None
        return self.second_runner

    @property
    def schedules_ahead(self) -> bool:
        """`async_scheduling` with null resolved."""
        if self.async_scheduling is None:
            return not self.on_cpu and not self.wrong_logits and self.speculate is None
        return self.async_scheduling

    @property
    def compute_dtype(self) -> Literal["float32", "bfloat16"]:
        """`dtype` with auto resolved."""
        if self.dtype != "auto":
            return self.dtype
        return "float32" if self.on_cpu else "bfloat16"

    @property
    def emulated(self) -> Rounding:
        """The format that weights are rounded to here, or else activations."""
        return self.activations if self.rounding == "none" else self.rounding

    @property
    def reported_kind(self) -> ActorKind:
        """The kind on every trajectory: an emulated precision is reported under its own name, the
        weights' if activations are rounded, too."""
        emulated: dict[str, ActorKind] = {
            "fp8": "fp8_emulated",
            "int8": "int8_emulated",
            "int4": "int4_emulated",
            "int3": "int3_emulated",
            "mxfp4": "mxfp4_emulated",
            "nvfp4": "nvfp4_emulated",
        }
        return self.kind if self.emulated == "none" else emulated[self.emulated]

    @property
    def quantised_by_engine(self) -> bool:
        """True if the engine itself quantises the weights (FP8 on a GPU)."""
        return self.kind == "fp8" and not self.on_cpu

    def check(self, key: str) -> None:
        _check_sparse(self, key)
        _check_precision(self, key)
        if self.engine in ENGINE_FACTS:  # a user's own is asked after its class was imported
            self.facts(key).refuse(self, key)
        refuse(
            not self.own_model and (self.draft_path is not None or self.draft_fresh is not None),
            f"{key}.draft_path={self.draft_path} and {key}.draft_fresh cannot be combined with "
            f"{key}.kind={self.kind}: only a draft actor has its own model.",
        )
        refuse(
            self.own_model and (self.draft_path is None) == (self.draft_fresh is None),
            f"{key}.draft_path={self.draft_path}: a draft actor needs exactly one of draft_path, "
            "a model folder, and draft_fresh, a small model made and warmed up as the policy is.",
        )
        refuse(
            self.num_gpus > 1 or (self.tensor_parallel > 1 and self.num_gpus not in (0, 1)),
            f"{key}.num_gpus={self.num_gpus:g} is counted for each of the engine's "
            f"{key}.tensor_parallel={self.tensor_parallel} ranks: use 1 and raise "
            f"{key}.tensor_parallel or {key}.count.",
        )


def _check_sparse(actor: ActorSpec, key: str) -> None:
    refuse(
        (actor.kind == "sparse") != (actor.sparse is not None),
        f"{key}.kind={actor.kind} {'needs' if actor.kind == 'sparse' else 'takes no'} "
        f"{key}.sparse section: choose actor=sparse for both.",
    )
    refuse(
        actor.tensor_parallel != 1 and actor.kind == "sparse",
        f"{key}.tensor_parallel={actor.tensor_parallel} cannot be combined with {key}.kind=sparse, "
        f"whose attention lives in one process: use 1 and raise {key}.count.",
    )


def _check_precision(actor: ActorSpec, key: str) -> None:
    refuse(
        actor.fp8_kv_cache and actor.on_cpu,
        f"{key}.fp8_kv_cache=true needs a GPU: CPUs have no FP8 kernels (set {key}.num_gpus=1).",
    )
    refuse(
        actor.fp8_kv_cache and actor.kind not in ("bf16", "fp8"),
        f"{key}.fp8_kv_cache=true cannot be combined with {key}.kind={actor.kind}: choose "
        "kind=bf16 or fp8.",
    )
    for name, used in (("rounding", actor.rounding), ("activations", actor.activations)):
        refuse(
            used != "none" and actor.kind not in ("bf16", "fp8"),
            f"{key}.{name}={used} would hide {key}.kind={actor.kind} in what trajectories say of "
            f"their actor: use {name}=none, or kind=bf16 or fp8.",
        )
        refuse(
            used != "none" and not actor.on_cpu and actor.engine != "diffusion",
            f"{key}.{name}={used} emulates low precision on CPU, and {key}.num_gpus="
            f"{actor.num_gpus:g} has the real thing: use {name}=none with kind=fp8.",
        )
    refuse(
        actor.precise_layers > 0 and actor.engine == "diffusion",
        f"{key}.precise_layers={actor.precise_layers} cannot be combined with {key}.engine="
        f"diffusion: name the layers in {key}.keep_high_precision.",
    )
    refuse(
        actor.scales != "tensor" and actor.rounding == "none" and actor.kind != "fp8",
        f"{key}.scales={actor.scales} is about quantised weights, and {key}.kind={actor.kind} has "
        "none: leave it tensor.",
    )
    refuse(
        actor.scales != "tensor" and actor.rounding in BLOCK_FORMATS,
        f"{key}.scales={actor.scales} is of formats without their own scales, and {key}."
        f"rounding={actor.rounding} has one for {BLOCK_FORMATS.get(actor.rounding)} entries of a "
        "row: leave it tensor.",
    )
    refuse(
        actor.kind == "fp8" and actor.on_cpu and actor.rounding == "none",
        f"{key}.kind=fp8 on CPU has to be emulated: set {key}.rounding to one of "
        f"{', '.join(kind for kind in get_args(Rounding) if kind != 'none')}, or {key}.num_gpus=1.",
    )


class TeacherEngineSpec(Spec):
    """Engines that hold a teacher (`teacher.kind=engine`)."""

    unread: ClassVar[tuple[Unread, ...]] = (
        Unread(("kv_cache_gib",), lambda spec: spec.num_gpus > 0, "num_gpus=1 means a GPU"),
        Unread(("gpu_memory_utilization",), lambda spec: not spec.num_gpus, "num_gpus=0: no GPU"),
    )

    count: int = setting(1, "engines, which take turns", gt=0)
    dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto", "auto: bfloat16 on GPU, float32 on CPU"
    )
    num_cpus: float = setting(1, "CPUs an engine", gt=0)
    num_gpus: Literal[0, 1] = setting(0, "GPUs a rank of an engine")
    tensor_parallel: int = setting(1, "ranks that share one engine's model, each on its GPU", gt=0)
    max_num_seqs: int | None = setting(
        None,
        "records scored together; null: 64 on GPUs, 1 on CPU, where scores then do not depend on "
        "which records arrive together",
        gt=0,
    )
    kv_cache_gib: float = setting(0.5, "num_gpus=0: KV cache", unit="GiB", gt=0)
    gpu_memory_utilization: float = setting(
        0.7,
        "num_gpus=1: share of GPU memory for weights and KV cache; logits of whole records come on "
        "top",
        gt=0,
        le=1,
    )
    timeout_s: float = setting(
        120.0,
        "to score what a rollout actor hands over at once; records beyond go without a teacher",
        unit="s",
        gt=0,
    )

    @property
    def actor(self) -> ActorSpec:
        """The settings of a plain engine."""
        given = self.model_dump(exclude={"timeout_s"})
        given["max_num_seqs"] = self.max_num_seqs or (64 if self.num_gpus else 1)
        return ActorSpec(**given, prefix_caching=False)

    def check(self, key: str) -> None:
        refuse(
            self.tensor_parallel > 1 and self.num_gpus == 0,
            f"{key}.tensor_parallel={self.tensor_parallel} needs GPUs: set {key}.num_gpus=1, or "
            "tensor_parallel=1.",
        )


@dataclass(frozen=True, slots=True)
class EngineJob:
    """The arguments that one engine is built from.

    Example: EngineJob(ActorSpec(), "bf16-0", "/models/policy", max_len=512, logprobs_k=20)
    """

    actor: ActorSpec
    actor_id: str  # "<label>-<index>"
    model_path: str  # folder of the model that samples: the policy's or the draft's
    max_len: int  # tokens of an episode
    logprobs_k: int  # largest logprobs_k of a request
    policy_path: str | None = None  # the learner's model, if the actor has another
    version: int = 0  # policy version of the weights in model_path
    # how its workers receive weights by themselves; None: they are given them
    transfer: Literal["nccl", "ipc"] | None = None
    # published by itself, over the weights in model_path; None: whole weights are published
    adapter: AdapterShape | None = None
    # how a masked-diffusion model denoises; None: the model is causal
    diffusion: DiffusionSpec | None = None
    routes: bool = False  # records carry the experts that a mixture chose (`models/routes.py`)
    # it has its GPU in turns with a learner rank (schedule.colocated), and sleeps as it starts
    sleeps: bool = False
    bitwise: bool = False  # log-probs are to the bit the learner's
    cpu_fast_paths: bool = True  # `engines/vllm/cpu/` computes what it can, on a CPU

    @property
    def key(self) -> str:
        """The configuration key of `actor`, for messages."""
        return f"actor.{actor_label(self.actor_id)}"


def start_teacher(job: EngineJob) -> Any:
    """The engine of a teacher, `engines/vllm/teacher.py: TeacherEngine`."""
    return load_object(TEACHER_ENGINE)(job)


TEACHER_ENGINE = "rlcore.rollout.engines.vllm.teacher_scores:TeacherEngine"
ENGINES: dict[str, str] = {
    "vllm": "rlcore.rollout.engines.vllm.engine:VllmEngine",
    "diffusion": "rlcore.extras.diffusion.engine:DiffusionEngine",
}
ENGINE_FACTS: dict[str, str] = {
    "vllm": "rlcore.rollout.engines.vllm_facts:VllmFacts",
    "diffusion": "rlcore.extras.diffusion.checks:DiffusionFacts",
}


def start_engine(job: EngineJob) -> RolloutEngine:
    """The engine that `job.actor.engine` names, started. Raises UserError if it cannot work."""
    cls = resolve(ENGINES, job.actor.engine, key=f"{job.key}.engine", like=RolloutEngine)
    engine: RolloutEngine = cls(job)
    return engine
