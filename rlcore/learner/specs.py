"""Settings of the learner and of what is trained with the policy. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, ClassVar, Literal

from rlcore.attention.specs import SparseSpec
from rlcore.corrections.specs import CorrectionSpec, Shadow, Stratum
from rlcore.engine_facts import Divided, Division, EngineFacts, facts_of
from rlcore.learner.engines.deepspeed_specs import DeepSpeedSpec
from rlcore.learner.optimizer_specs import OptimizerSpec
from rlcore.models.specs import DiffusionSpec
from rlcore.objectives.specs import ObjectiveSpec, TeacherSpec, ValueSpec
from rlcore.spec import DeclaredMetric, Fixed, Spec, Unread, parsed, refuse, setting
from rlcore.types import SamplingSpec
from rlcore.weights.specs import RoundingSpec

CRITIC = "critic"  # a companion that is not published
SPARSE_COPY = "sparse"  # theta + phi of DistillSparse, among the sets that are published
DRAFT = "draft"  # a co-trained draft's weights, among them
LARGEST_RANK = 512  # of an adapter that vLLM computes (vllm/config/lora.py: MaxLoRARanks)


class LoraSpec(Spec):
    """Low-rank adapters, trained instead of the model."""

    fixed: ClassVar[Mapping[str, str]] = dict.fromkeys(("rank", "alpha", "targets"), Fixed.WEIGHTS)

    rank: int = setting(16, "of the adapters", gt=0)
    alpha: float = setting(32.0, "scale: alpha / rank", gt=0)
    targets: tuple[str, ...] = setting(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        "names of the adapted linear layers",
        min_length=1,
    )
    publish: Literal["merged", "adapter"] = setting(
        "merged",
        "what actors are sent: the sum of weights and adapter, or the adapter alone, which they "
        "compute separately (less to send, slower to decode on CPU)",
    )

    def check(self, key: str) -> None:
        whole = [t for t in self.targets if t.rpartition(".")[2] in ("lm_head", "embed_tokens")]
        refuse(
            bool(whole),
            f"{key}.targets={list(self.targets)} holds {' and '.join(whole)}, whose weights the "
            "head pass and the embedding read without an adapter: name layers of the blocks.",
        )
        refuse(
            self.publish == "adapter" and self.rank > LARGEST_RANK,
            f"{key}.publish=adapter with {key}.rank={self.rank} is beyond what vLLM serves: use at "
            f"most rank={LARGEST_RANK}, or publish=merged.",
        )


class DistillSpec(Spec):
    """DistillSparse: adapters phi that make the sparse actors follow the dense policy theta."""

    metrics: ClassVar[tuple[DeclaredMetric, ...]] = (
        DeclaredMetric(
            "loss/sparse_policy",
            "1",
            "policy loss of the sparse copy (DistillSparse)",
            healthy="any",
            otherwise="look at `loss/distill_kl`",
        ),
        DeclaredMetric(
            "loss/distill_kl",
            "nats",
            "KL of the sparse copy to the dense policy on the actors' samples, unscaled",
            healthy="falls",
            otherwise="raise `learner.distill.lr` or its `lora.rank`",
        ),
        DeclaredMetric(
            "distill/grad_norm",
            "1",
            "norm of the sparse copy's gradient before clipping",
            healthy="no jumps",
            otherwise="lower `learner.distill.lr`",
        ),
        DeclaredMetric(
            "distill/actor_abs_dlogp_mean",
            "nats",
            "mean |log p of the sparse copy - log p_inf| on the actors' samples",
        ),
        DeclaredMetric(
            "distill/clip_share", "share", "tokens of the sparse copy's loss outside its clip range"
        ),
        DeclaredMetric(
            "time/learner_distill_s", "s", "the step of the sparse copy (DistillSparse)", "sum"
        ),
    )

    unread: ClassVar[tuple[Unread, ...]] = (
        Unread(("kl",), lambda spec: spec.kl_coef == 0, "kl_coef=0 leaves no KL"),
    )

    kl: Literal["k1", "k3", "topk", "full"] = setting(
        "k3", "estimator of KL(sparse || dense) on the actors' samples"
    )
    kl_coef: float = setting(1.0, "lambda: its weight, added to the sparse policy loss", ge=0)
    lr: float = setting(1e-3, "peak learning rate of the adapters", gt=0)
    lora: LoraSpec = LoraSpec()


class DraftLearnerSpec(Spec):
    """A second learner: the draft, by policy gradient and reverse KL to the policy."""

    metrics: ClassVar[tuple[DeclaredMetric, ...]] = (
        DeclaredMetric("draft/loss_policy", "1", "policy loss of the co-trained draft"),
        DeclaredMetric(
            "draft/loss_kl",
            "nats",
            "KL of the draft to the policy, unscaled",
            healthy="falls",
            otherwise="[Drafts](cheap-actors.md#drafts): `learner.draft.lr`, `.kl_coef`",
        ),
        DeclaredMetric(
            "draft/grad_norm",
            "1",
            "norm of the draft's gradient before clipping",
            healthy="no jumps",
            otherwise="lower `learner.draft.lr`",
        ),
        DeclaredMetric("draft/entropy", "nats", "mean entropy of the draft over trained tokens"),
        DeclaredMetric("draft/mismatch_kl_k1", "nats", "mismatch/kl_k1 of the draft"),
        DeclaredMetric(
            "draft/mismatch_abs_dlogp_mean", "nats", "mismatch/abs_dlogp_mean of the draft"
        ),
    )

    ranks: int = setting(1, "data-parallel ranks", gt=0)
    lr: float = setting(1e-4, "peak learning rate of the draft", gt=0)
    kl_coef: float = setting(0.1, "weight of the reverse KL to the policy", gt=0)
    kl_estimator: Literal["k2", "full"] = setting(
        "full",
        "k2 (sampled; its gradient is the reverse KL's) or full (over the vocabulary)",
    )


class CriticSpec(ValueSpec):
    """A model of values next to the policy, for `algorithm.advantage=gae`."""

    metrics: ClassVar[tuple[DeclaredMetric, ...]] = (
        DeclaredMetric(
            "loss/value",
            "reward²",
            "half the mean squared error of a critic's values to their targets, clipped as in the "
            "loss",
            healthy="falls, then steady",
            otherwise="raise `critic.lr`, or `critic.warmup_steps`",
        ),
        DeclaredMetric(
            "critic/explained_variance",
            "share",
            "of its targets' variance, what the critic's values of the phase's start explain",
            healthy="rises above 0",
            otherwise="raise `critic.lr`, or use `critic=model`",
        ),
        DeclaredMetric("critic/value_mean", "reward", "mean value of the batch's states"),
        DeclaredMetric("critic/target_mean", "reward", "mean target of these values"),
        DeclaredMetric(
            "critic/advantage_rms",
            "reward",
            "root of the mean square of the advantages of tokens that have a target; 1 where "
            "whitened",
        ),
        DeclaredMetric(
            "critic/untargeted_share",
            "share",
            "tokens without a target, so without an advantage: of the last state of an answer that "
            "was cut off, under `critic.bootstrap`",
            healthy="below 0.1",
            otherwise="`algorithm.credit=token`, or longer answers",
        ),
        DeclaredMetric(
            "critic/clip_share", "share", "values outside `critic.clip` of the phase's start"
        ),
        DeclaredMetric(
            "critic/grad_norm",
            "1",
            "norm of the critic's gradient before clipping",
            healthy="no jumps",
            otherwise="lower `critic.lr`",
        ),
        DeclaredMetric("critic/lr", "1", "learning rate of the critic's step"),
        DeclaredMetric("time/learner_critic_s", "s", "the step of the critic", "sum"),
    )

    unread: ClassVar[tuple[Unread, ...]] = (
        Unread(
            (*ValueSpec.model_fields, "lr", "warmup_steps", "lora"),
            lambda spec: not spec.trained,
            "kind=none has no critic",
        ),
        Unread(
            ("rho_cap", "c_cap"),
            lambda spec: spec.trained and spec.traces == "gae",
            "traces=gae has no ratio",
        ),
    )
    fixed: ClassVar[Mapping[str, str]] = {"kind": Fixed.WEIGHTS}

    kind: Literal["none", "value_head", "model"] = setting(
        "none",
        "value_head: a linear map of the policy's last hidden states, which do not learn from it; "
        "model: the starting policy with such a head, trained whole or by adapters",
    )
    lr: float = setting(1e-4, "peak learning rate of the critic", gt=0)
    warmup_steps: int = setting(
        0, "first optimizer steps that train the critic and not the policy", ge=0
    )
    lora: LoraSpec | None = setting(None, "kind=model: adapters, trained instead of the copy")

    @property
    def trained(self) -> bool:
        """True if the run has a critic."""
        return self.kind != "none"

    def check(self, key: str) -> None:
        refuse(
            self.kind == "value_head" and self.lora is not None,
            f"{key}.lora adapts the copy of {key}.kind=model, and value_head trains its head "
            f"alone: leave {key}.lora=null, or use {key}.kind=model.",
        )


class LearnerSpec(OptimizerSpec, DeepSpeedSpec):
    """The ranks that train the policy, and its companions."""

    metrics: ClassVar[tuple[DeclaredMetric, ...]] = (
        DeclaredMetric(
            "rounding/relative_error",
            "share",
            "`learner.round_as`: norm of what rounding moved the weights by, over the norm of the "
            "rounded weights, as the step began",
            healthy="steady: 0.002 in INT8, 0.1 in four bits, 0.3 in INT3",
            otherwise="rises: a few weights have grown and set the scale; finer "
            "`actor.*.scales`, or `keep_high_precision`",
        ),
    )

    unread: ClassVar[tuple[Unread, ...]] = (
        Unread(
            ("fp32_head",),
            lambda spec: spec.compute_dtype == "float32",
            "dtype is float32, of the head as well",
        ),
    )
    fixed: ClassVar[Mapping[str, str]] = {
        "engine": Fixed.WEIGHTS,
        "router_replay": Fixed.SAMPLED,
    }
    fixed_presence: ClassVar[Mapping[str, str]] = {"draft": Fixed.WEIGHTS}

    engine: str = setting("deepspeed", "training engine, or file.py:Class", names="code")
    engine_args: dict[str, Any] = setting(
        default_factory=dict, meaning="the engine's own settings, which its facts declare"
    )
    ranks: int = setting(1, "processes that train, a GPU each", gt=0)
    num_cpus: float = setting(1, "per rank; also its compute threads", gt=0)
    max_threads: Literal["auto"] | int | None = setting(
        "auto",
        "on CPU: most compute threads of a rank; asynchronous schedules use those above num_cpus "
        "while cores idle, synchronous ones always. auto: all cores in synchronous ones",
    )
    num_gpus: float = setting(0, "per rank: 0 or 1", ge=0)
    dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto", "auto: bfloat16 on GPU, float32 on CPU"
    )
    micro_batch_tokens: Literal["auto"] | int = setting(
        8192,
        "most positions of a micro-batch, padding included; auto: what 512 MiB of activations hold "
        "on CPU (1024 to 4096), 4 GiB on GPU (1024 to 16384)",
        unit="tokens",
    )
    layout: Literal["auto", "packed", "sorted"] = setting(
        "auto",
        "auto: packed with a variable-length kernel where that changes nothing on the run's model, "
        "else sorted",
    )
    share_prefix: Literal["auto", "off"] = setting(
        "auto",
        "auto: compute the common prefix of a group's sequences once where that is less work and "
        "the attention allows it (whole context; CPU: sdpa, sparse.prompt=sparse; GPU: not sparse)",
    )
    attention: Literal["auto", "sdpa", "varlen", "fa4", "flash_attention_2"] = setting(
        "auto",
        "auto: on GPU flash-attn where it is installed, else torch's own kernel (varlen); on CPU "
        "sdpa. fa4: FlashAttention 4 of vLLM's wheel, for Hopper and Blackwell. Sparse attention: "
        "masks over tokens with sdpa, else FlexAttention's blocks",
    )
    layers: Literal["torch", "liger", "compiled"] = setting(
        "torch",
        "liger: norms, MLPs and rotary embeddings of Qwen3 and Llama by kernels of liger-kernel; "
        "compiled: norms, MLPs and maps of fp8 by torch's compiler",
    )
    fp8: Literal["none", "tensor", "row"] = setting(
        "none",
        "linear maps multiply FP8 numbers, forward and backward, by torchao, with a scale a tensor "
        "or a row (emulated on CPU); weights and optimizer stay as they are",
    )
    step_bound: float | None = setting(
        0.5,
        "how far the steps in flight may move the policy together: KL of an answer, of at most 128 "
        "tokens; a step that would lead beyond is shortened or held. null: off",
        unit="nats",
        gt=0,
    )
    gradient_checkpointing: bool = setting(False, "recompute activations")
    router_replay: bool = setting(
        False,
        "mixtures of experts: a token's experts are the ones that its actor chose, weighed by the "
        "learner's scores; false: the learner's own choice",
    )
    head_chunk_tokens: int = setting(
        1024, "most positions per chunk of the LM-head pass", unit="tokens", gt=0
    )
    fp32_head: bool | None = setting(
        None,
        "logits from float32 sums where the model is bfloat16 (see actor.*.fp32_head); null: on "
        "GPUs, whose tensor cores have them at no cost",
    )
    fused_head: bool = setting(
        False,
        "scores of the LM head by one kernel for GPUs, with exact logits (not of safe or kept "
        "sets); not proven yet",
    )
    ref_pass: Literal["auto", "always"] = setting(
        "auto", "auto: p_ref is p_new detached when both coincide"
    )
    activation_cache_mib: int = setting(
        0,
        "where corrections need the whole batch and it takes several micro-batches: keep their "
        "differentiated passes up to this size on a rank, instead of a pass for p_ref",
        unit="MiB",
        ge=0,
    )
    port: int = setting(0, "rendezvous port of the ranks; 0: any free one", ge=0, lt=65536)
    lora: LoraSpec | None = None
    distill: DistillSpec | None = None
    draft: DraftLearnerSpec | None = None
    round_as: str | None = setting(
        None,
        "label of an actor with rounded weights (actor.LABEL.rounding): forward passes round as it "
        "does, gradients pass straight through, and float32 is trained; null: no rounding",
    )
    train_sparse: bool = setting(
        False,
        "sparse actors: the policy itself is trained through their sparse attention",
    )

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        return "cuda" if self.num_gpus else "cpu"

    @property
    def facts(self) -> type[EngineFacts]:
        """Facts of the engine. Raises UserError for a user's own that cannot be loaded."""
        return facts_of(ENGINE_FACTS, ENGINES, self.engine, "learner.engine")

    def own_sections(self, key: str = "learner") -> Mapping[str, Spec]:
        """The engine's own settings, as its facts declare them: `own_sections()["engine_args"]`."""
        owner = f"{key}.engine={self.engine}"
        own = parsed(self.facts.settings, self.engine_args, f"{key}.engine_args", owner)
        return {} if own is None else {"engine_args": own}

    @property
    def shortcuts(self) -> tuple[str, ...]:
        """The shortcuts that the learner tries on its model as it starts (`learner/probes.py`)."""
        named = {
            "repeated passes and the LM head": True,
            "layout": self.layout == "packed" or (self.layout == "auto" and self.device == "cuda"),
            "share_prefix": self.share_prefix == "auto",
            f"layers={self.layers}": self.layers != "torch",
            "router_replay": self.router_replay,
            **{d.name: True for d in self.divisions if d.of == "sequences"},
            "sparse attention": self.train_sparse or self.distill is not None,
            "merged adapters": self.lora is not None and self.lora.publish == "merged",
        }
        return tuple(name for name, used in named.items() if used)

    @property
    def shares(self) -> int:
        """Shares of a batch; ranks that hold parts of the same sequences have one together."""
        return self.ranks // self.parts

    @property
    def parts(self) -> int:
        """Ranks that have a share of a batch together."""
        return self.holders("sequences") * self.holders("layers")

    @property
    def divisions(self) -> tuple[Division, ...]:
        """The things that the engine's ranks hold parts of."""
        return tuple(d for d in self.facts.divisions(self) if d.ranks > 1)

    def holders(self, of: Divided) -> int:
        """Ranks that hold parts of the same sequences, layers or experts."""
        return prod(d.ranks for d in self.divisions if d.of == of)

    @property
    def threads(self) -> int:
        """Compute threads of a rank."""
        return max(1, int(self.num_cpus))

    @property
    def compute_dtype(self) -> Literal["float32", "bfloat16"]:
        """`dtype` with auto resolved."""
        if self.dtype != "auto":
            return self.dtype
        return "bfloat16" if self.num_gpus else "float32"

    @property
    def exact_head(self) -> bool:
        """`fp32_head` with null resolved."""
        return self.num_gpus > 0 if self.fp32_head is None else self.fp32_head

    def check(self, key: str) -> None:
        refuse(
            not all(0 <= beta < 1 for beta in self.betas),
            f"{key}.betas={list(self.betas)} is not accepted: both must be at least 0 and below 1.",
        )
        refuse(
            self.attention not in ("auto", "sdpa") and self.num_gpus == 0,
            f"{key}.attention={self.attention} needs a GPU: set {key}.num_gpus=1 or "
            f"{key}.attention=sdpa.",
        )
        refuse(
            self.attention not in ("auto", "sdpa") and self.compute_dtype == "float32",
            f"{key}.attention={self.attention} has no float32 kernel: set {key}.dtype=bfloat16 or "
            f"{key}.attention=sdpa.",
        )
        refuse(
            self.num_gpus > 1,
            f"{key}.num_gpus={self.num_gpus:g} is per rank, of one GPU: raise {key}.ranks instead.",
        )
        refuse(
            self.fused_head and (self.num_gpus == 0 or not self.exact_head),
            f"{key}.fused_head=true is a kernel for GPUs with exact logits, and {key}.num_gpus="
            f"{self.num_gpus:g} with {key}.fp32_head={str(self.exact_head).lower()} asks for "
            "others: leave it false.",
        )
        given = self.micro_batch_tokens
        refuse(
            given != "auto" and given < 1,
            f"{key}.micro_batch_tokens={given} must be above 0, or auto.",
        )
        if self.engine in ENGINE_FACTS:  # a user's own is asked after its class was imported
            self.facts.refuse(self, key)


@dataclass(frozen=True, slots=True)
class LearnerJob:
    """The arguments that the ranks of a learner are built from; equal on every rank."""

    model_path: str
    learner: LearnerSpec
    objective: ObjectiveSpec
    corrections: Mapping[str, CorrectionSpec]  # by name, in the order in which they apply
    sampling: SamplingSpec  # what actors sample from, before corrections constrain it
    total_steps: int  # optimizer steps of the run, for the learning-rate schedule
    run_seed: int
    pad_id: int
    in_flight: int = 0  # steps that samples may be behind as their phase begins
    threads: int | None = None  # compute threads of a rank; None: learner.threads
    follows_load: bool = False  # more threads, up to learner.max_threads, while cores idle
    cpu_fast_paths: bool = True  # `learner/cpu/` computes what it can, on a CPU
    sparse: SparseSpec | None = None  # the actors' rule, where the learner attends by it
    # of each group, the responses of highest dense acceptance that are trained on; None: all
    keep_by_acceptance: int | None = None
    # advantage of each of several tasks, by label; empty: objective.advantage of all episodes
    task_advantages: Mapping[str, str] = field(default_factory=dict)
    # at which each of several tasks is sampled, by label; empty: sampling.temperature
    task_temperatures: Mapping[str, float] = field(default_factory=dict)
    frozen_path: str | None = None  # the policy that KL is taken to; None: the starting one
    diffusion: DiffusionSpec | None = None  # the model is a masked-diffusion one
    critic: CriticSpec = field(default_factory=CriticSpec)
    rounding: RoundingSpec | None = None  # of the policy's forward passes
    # most positions of a sequence, where log-probs are to the bit the engines'; 0: they are not
    bitwise_positions: int = 0
    teacher: TeacherSpec = field(default_factory=TeacherSpec)
    # of a run whose actors are of several kinds, each in one stratum; empty: they are of one
    strata: tuple[Stratum, ...] = ()
    # some actors keep pages by position, whose mismatch is measured by these stretches
    by_position: bool = False
    # lists whose weights are measured beside
    shadow: Shadow = field(default_factory=Shadow)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Labels of the actors, where they are of several kinds."""
        return tuple(kind for stratum in self.strata for kind in stratum.kinds)


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The number of a rank, and the address where the ranks join.

    Example: RankPlace(0, 2, "127.0.0.1", 29500, 1800)
    """

    rank: int
    world_size: int
    host: str
    port: int
    timeout_s: float  # of a collective


# of log-probs that are not exact, by the section of `model` that such a model has
ESTIMATORS: dict[str, str] = {"diffusion": "rlcore.extras.diffusion.estimates:MaskedEstimator"}
ENGINES: dict[str, str] = {"deepspeed": "rlcore.learner.engines.deepspeed:ZeroEngine"}
ENGINE_FACTS: dict[str, str] = {
    "deepspeed": "rlcore.learner.engines.deepspeed_facts:DeepSpeedFacts"
}
