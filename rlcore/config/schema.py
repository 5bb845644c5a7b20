"""Every key of a run, with its type, unit and choices. Only the composition root (`runtime`, `cli`) reads these."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rlcore.config.correction_schema import CorrectionsConfig, Strict
from rlcore.config.launch_schema import LaunchConfig


class FreshModel(Strict):
    """A small Qwen3-architecture model made from nothing, with a tokenizer built from the task's alphabet."""

    hidden_size: int = Field(default=128, gt=0, description="width")
    layers: int = Field(default=4, gt=0, description="transformer blocks")
    heads: int = Field(default=4, gt=0, description="query heads")
    kv_heads: int = Field(default=2, gt=0, description="key and value heads")
    head_dim: int = Field(default=32, gt=0, description="width of a head")
    intermediate_size: int = Field(default=384, gt=0, description="width of the MLP")
    vocab_size: int | None = Field(default=None, gt=0, description="padded up to this; None: what the alphabet needs")
    tie_embeddings: bool = Field(default=True, description="LM head shares the embedding")


class WarmupConfig(Strict):
    """Supervised warm-up on the task's worked answers, kept in `cache_dir` and found again by its settings."""

    steps: int = Field(default=220, gt=0, description="supervised optimizer steps")
    batch_size: int = Field(default=128, gt=0, description="worked answers a step")
    lr: float = Field(default=1e-3, gt=0, description="peak learning rate")
    lr_warmup_steps: int = Field(default=20, ge=0, description="steps of linear warm-up")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(default="constant", description="after the warm-up")
    cache_dir: str = Field(default="cache/warmup", description="folder where warmed-up models are kept and found again")


class ModelConfig(Strict):
    path: str | None = Field(default=None, description="Hugging Face folder of the starting policy")
    fresh: FreshModel | None = Field(default=None, description="used by `sft` when path is null")
    max_len: int = Field(default=512, gt=1, description="prompt + response tokens an engine or learner must hold")
    chat_template: Literal["auto", "off"] = Field(default="auto", description="auto: the tokenizer's, if it has one")
    system_prompt: str | None = Field(default=None, description="put before every question")
    trust_remote_code: Literal[False] = Field(default=False, description="code from model folders is never run")
    warmup: WarmupConfig | None = Field(default=None, description="make the starting policy by `sft` when path is null")


class EvalTask(Strict):
    """A task that is only evaluated; the training task's graders grade it too."""

    name: str = Field(description="a task of rlcore.tasks, e.g. digits")
    args: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the task")
    max_prompt_tokens: int | None = Field(
        default=None, gt=0, description="longer prompts are refused; null: whatever leaves room for a response"
    )

    @property
    def label(self) -> str:
        """First part of its prompt ids: the name, or the class name of a user's own."""
        return self.name.rpartition(":")[2].lower() if ":" in self.name else self.name


class TaskConfig(EvalTask):
    grade_timeout_s: float = Field(default=10.0, gt=0, description="deadline of one grading")
    grader_processes: int = Field(default=1, gt=0, description="processes that grade")
    grader_memory_mib: int = Field(default=4096, ge=256, description="address space of each of them")


class SparseConfig(Strict):
    block_size: int = Field(default=16, gt=0, description="tokens a page")
    blocks: int | None = Field(default=None, gt=1, description="pages each query attends to")
    share: float | None = Field(default=None, gt=0, le=1, description="instead of blocks: share of the context's pages")
    sparse_prompt: bool = Field(default=True, description="false: prompt positions attend densely")


class ActorConfig(Strict):
    kind: Literal["bf16", "fp8", "sparse", "draft"] = Field(default="bf16", description="what makes it cheap")
    count: int = Field(default=1, gt=0, description="engines of this kind")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="auto: bfloat16 on GPU, float32 on CPU"
    )
    num_cpus: float = Field(default=1, gt=0, description="CPUs an engine")
    num_gpus: float = Field(default=0, ge=0, description="GPUs a rank of an engine: 0 (CPU) or 1")
    tensor_parallel: int = Field(default=1, gt=0, description="ranks that share one engine's model, each on its GPU")
    max_num_seqs: int = Field(default=256, gt=0, description="sequences decoded together")
    max_batched_tokens: int | None = Field(
        default=None, gt=0, description="tokens of one engine step; null: vLLM's choice"
    )
    kv_cache_gib: float = Field(
        default=1.0, gt=0, description="CPU: KV cache; GPU: ignored, see gpu_memory_utilization"
    )
    gpu_memory_utilization: float = Field(
        default=0.85, gt=0, le=1, description="share of GPU memory for weights and KV cache"
    )
    enforce_eager: bool = Field(default=True, description="false: compile and capture graphs")
    prefix_caching: bool = Field(default=True, description="share the keys and values of equal prefixes")
    kv_on_update: Literal["recompute", "keep"] = Field(
        default="recompute", description="in flight: keep leaves stale KV"
    )
    rounding: Literal["none", "fp8", "int8", "int4"] = Field(
        default="none", description="emulated weight rounding (CPU)"
    )
    scales: Literal["tensor", "channel", "block"] = Field(
        default="tensor", description="of quantised weights: one a tensor, an output channel or a 128 x 128 block"
    )
    fp8_kv_cache: bool = Field(default=False, description="GPU: keys and values in FP8")
    keep_high_precision: list[str] = Field(
        default_factory=lambda: ["lm_head", "embed_tokens"],
        description="name patterns of layers that are not quantised",
    )
    sparse: SparseConfig | None = None
    draft_path: str | None = Field(default=None, description="kind draft: its Hugging Face folder")
    draft_fresh: FreshModel | None = None
    logit_noise: float = Field(default=0.0, ge=0, description="std of noise added to actor logits, to study mismatch")
    temperature_scale: float = Field(default=1.0, gt=0, description="actor temperature error, to study mismatch")


class RolloutConfig(Strict):
    samples_per_prompt: int = Field(default=8, gt=0, description="n: group size")
    temperature: float = Field(default=1.0, gt=0, description="of sampling; the learner applies the same")
    top_p: float = Field(default=1.0, gt=0, le=1, description="1: off")
    top_k: int = Field(default=0, ge=0, description="0: off")
    min_p: float = Field(default=0.0, ge=0, le=1, description="0: off; DVP sets it")
    max_new_tokens: int = Field(default=64, gt=0, description="longest response")
    stop: list[str] = Field(default_factory=list, description="strings that end a response")
    logprobs_k: int = Field(default=20, ge=0, description="top log-probs stored per token; 0: the sampled one only")
    request_timeout_s: float = Field(default=600.0, gt=0, description="a group not finished by then is reissued")


class AlgorithmConfig(Strict):
    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce", "group_mean"] = Field(
        default="grpo", description="how rewards become advantages"
    )
    loss: Literal["ppo", "gspo", "cispo", "reinforce"] = Field(default="ppo", description="policy loss")
    eps_low: float = Field(default=0.2, ge=0, description="clip the ratio below 1 - eps_low")
    eps_high: float = Field(default=0.2, ge=0, description="clip the ratio above 1 + eps_high")
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = Field(
        default="token-mean", description="of token losses over the global batch"
    )
    kl_coef: float = Field(default=0.0, ge=0, description="KL to the frozen starting policy")
    kl_estimator: Literal["k1", "k2", "k3", "full"] = Field(default="k3", description="of that KL")
    entropy_coef: float = Field(default=0.0, description="weight of the entropy bonus")
    dynamic_sampling: bool = Field(default=False, description="groups with all-equal rewards are filtered and replaced")
    overlong_share: float = Field(
        default=0.0, ge=0, lt=1, description="DAPO's soft overlong penalty: over this share of max_new_tokens; 0: off"
    )
    overlong_penalty: float = Field(default=1.0, ge=0, description="its largest value")
    keep_best: int | None = Field(
        default=None, gt=0, description="oversampling: of each group the n best are trained on"
    )


class ScheduleConfig(Strict):
    steps: int = Field(default=20, gt=0, description="optimizer steps of the run")
    groups_per_step: int = Field(default=64, gt=0, description="prompts trained on in one optimizer step")
    steps_per_publish: int = Field(default=1, gt=0, description="H")
    max_staleness: int = Field(default=0, ge=0, description="eta, in optimizer steps beyond the H-1 of a phase")
    on_publish: Literal["finish", "abort", "in_flight"] = Field(
        default="finish", description="what actors do with running samples when new weights come"
    )
    sampling: Literal["fifo", "uniform"] = Field(
        default="fifo", description="order in which the buffer gives groups out"
    )
    max_uses: int = Field(default=1, gt=0, description="uniform: times a group may be trained on")
    wait_data_timeout_s: float = Field(
        default=600.0, gt=0, description="a learner without data for longer ends the run"
    )
    publish_timeout_s: float = Field(default=300.0, gt=0, description="deadline of a publish")
    step_timeout_s: float = Field(default=1800.0, gt=0, description="deadline of an optimizer step")


class LoraConfig(Strict):
    rank: int = Field(default=16, gt=0, description="of the adapters")
    alpha: float = Field(default=32.0, gt=0, description="scale: alpha / rank")
    targets: list[str] = Field(
        default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        description="names of the adapted linear layers",
    )


class DistillConfig(Strict):
    """DistillSparse: adapters phi that make the sparse actors follow the dense policy theta; published merged."""

    kl: Literal["k1", "k3", "topk", "full"] = Field(
        default="k3", description="estimator of KL(sparse || dense) on the actors' samples"
    )
    kl_coef: float = Field(default=1.0, ge=0, description="lambda: its weight beside the sparse policy loss")
    lr: float = Field(default=1e-3, gt=0, description="peak learning rate of the adapters")
    lora: LoraConfig = LoraConfig()


class DraftLearnerConfig(Strict):
    """A second learner that trains the draft on its own rollouts with policy gradient and reverse KL to the policy."""

    ranks: int = Field(default=1, gt=0, description="data-parallel ranks")
    lr: float = Field(default=1e-4, gt=0, description="peak learning rate of the draft")
    kl_coef: float = Field(default=0.1, gt=0, description="weight of the reverse KL to the policy")
    kl_estimator: Literal["k2", "full"] = Field(
        default="full", description="k2 (sampled; its gradient is the reverse KL's) or full (over the vocabulary)"
    )


class LearnerConfig(Strict):
    ranks: int = Field(default=1, gt=0, description="data-parallel ranks")
    num_cpus: float = Field(default=1, gt=0, description="per rank; also its compute threads")
    num_gpus: float = Field(default=0, ge=0, description="per rank")
    zero_stage: Literal[0, 1, 2, 3] = Field(
        default=0, description="what DeepSpeed shards: 1 optimizer, 2 and gradients, 3 and parameters"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="auto: bfloat16 on GPU, float32 on CPU"
    )
    lr: float = Field(default=2e-4, gt=0, description="peak learning rate")
    lr_warmup_steps: int = Field(default=5, ge=0, description="steps of linear warm-up")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="after the warm-up, until lr_decay_steps"
    )
    lr_decay_steps: int | None = Field(
        default=None, gt=0, description="null: schedule.steps; a number keeps the rate when a run is made longer later"
    )
    lr_final: float = Field(default=0.0, ge=0, le=1, description="share of lr that linear and cosine end at")
    betas: tuple[float, float] = Field(default=(0.9, 0.95), description="of AdamW")
    weight_decay: float = Field(default=0.0, ge=0, description="of AdamW")
    grad_clip: float = Field(default=1.0, gt=0, description="largest gradient norm")
    micro_batch_tokens: int = Field(default=8192, gt=0, description="tokens of a micro-batch, padding included")
    layout: Literal["auto", "packed", "sorted"] = Field(
        default="auto", description="auto: packed with flash-attn, else sorted"
    )
    attention: Literal["auto", "sdpa", "flash_attention_2"] = Field(
        default="auto", description="auto: flash-attn on GPU"
    )
    gradient_checkpointing: bool = Field(default=False, description="recompute activations")
    head_chunk_tokens: int = Field(default=1024, gt=0, description="most positions per chunk of the LM-head pass")
    ref_pass: Literal["auto", "always"] = Field(
        default="auto", description="auto: p_ref is p_new detached when both coincide"
    )
    port: int = Field(default=0, ge=0, lt=65536, description="rendezvous port of the ranks; 0: any free one")
    lora: LoraConfig | None = None
    distill: DistillConfig | None = None
    draft: DraftLearnerConfig | None = None
    train_sparse: bool = Field(
        default=False, description="sparse actors: the policy itself is trained through their sparse attention"
    )


class ClusterConfig(Strict):
    address: str | None = Field(default=None, description="Ray address; null: RAY_ADDRESS or a local cluster")
    num_cpus: int | None = Field(
        default=None, gt=0, description="local cluster; null: all, at least what the roles ask"
    )
    object_store_mib: int = Field(default=512, gt=75, description="Ray's shared memory on a local cluster")
    start_timeout_s: float = Field(default=300.0, gt=0, description="deadline for every role to come up")
    heartbeat_s: float = Field(default=5.0, gt=0, description="between two looks at every role")
    hang_timeout_s: float = Field(default=120.0, gt=0, description="an actor silent for longer is replaced")
    max_restarts: int = Field(
        default=10, ge=0, description="times an hour that a rollout actor is replaced before the run ends"
    )
    max_recoveries: int = Field(
        default=3,
        ge=0,
        description="times that a run whose learner, buffer or Ray head died goes on from the same checkpoint",
    )
    buffer_mib: int = Field(default=1024, gt=0, description="payload bytes the buffer may hold")
    transport: Literal["object_store", "disk", "nccl", "gloo"] = Field(
        default="object_store", description="how weights travel to actors"
    )
    verify_weights: Literal["sampled", "full"] = Field(
        default="sampled", description="arrival check after every publish"
    )
    launch: LaunchConfig = LaunchConfig()


class EvalConfig(Strict):
    every: int = Field(default=5, ge=0, description="steps between evaluations; 0: only at the end")
    at_start: bool = Field(default=True, description="also evaluate the starting policy")
    prompts: int = Field(default=128, gt=0, description="held-out prompts, at most what the task has")
    samples: int = Field(default=1, gt=0, description="k of mean@k and pass@k (sampled)")
    greedy: bool = Field(default=True, description="also the greedy answer")
    temperature: float = Field(default=1.0, gt=0, description="of the sampled answers")
    timeout_s: float = Field(default=600.0, gt=0, description="deadline of an evaluation")
    dense_actor: bool | None = Field(
        default=None,
        description="evaluate the policy on an engine of its own, plain and dense; null: only where actors are drafts",
    )
    tasks: dict[str, EvalTask] = Field(default_factory=dict, description="further held-out tasks, by label")


class CheckpointConfig(Strict):
    every: int = Field(default=0, ge=0, description="steps between checkpoints; 0: only at the end")
    keep: int = Field(default=2, gt=0, description="newest checkpoints kept")
    keep_every: int = Field(default=0, ge=0, description="also keep, for ever, those of every so many steps; 0: none")
    keep_best: str | None = Field(default=None, description="also keep the one with the best value of this metric")
    best_is: Literal["max", "min"] = Field(default="max", description="which value of keep_best is the best")
    at_end: bool = Field(default=True, description="a last checkpoint")


class LoggingConfig(Strict):
    console: Literal["live", "plain", "off"] = Field(
        default="live", description="live table, a line a step, or nothing"
    )
    wandb: Literal["offline", "online", "disabled"] = Field(default="offline", description="offline needs no account")
    project: str = Field(default="rlcore", description="W&B project")
    samples_per_step: int = Field(default=4, ge=0, description="decoded trajectories kept each step under samples/")
    report: bool = Field(default=True, description="write report.html at the end")


class RunConfig(Strict):
    run_dir: str = Field(
        min_length=1, description="folder of this run: configuration, metrics, checkpoints, samples, report"
    )
    seed: int = Field(default=0, description="of everything random")
    resume: Literal["never", "auto"] = Field(
        default="never", description="auto: continue from the newest valid checkpoint in run_dir"
    )
    model: ModelConfig
    task: TaskConfig
    actor: dict[str, ActorConfig] = Field(min_length=1, description="by label; several make a mixed fleet")
    rollout: RolloutConfig = RolloutConfig()
    correction: CorrectionsConfig = CorrectionsConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    learner: LearnerConfig = LearnerConfig()
    cluster: ClusterConfig = ClusterConfig()
    evaluation: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
