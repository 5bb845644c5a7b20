"""Every key of a run, with its type, unit and choices. Only the composition root (`runtime`, `cli`) reads these."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rlcore.config.correction_schema import CorrectionsConfig, Strict


class FreshModel(Strict):
    """A small Qwen3-architecture model made from nothing, with a tokenizer built from the task's alphabet."""

    hidden_size: int = Field(default=128, gt=0)
    layers: int = Field(default=4, gt=0)
    heads: int = Field(default=4, gt=0)
    kv_heads: int = Field(default=2, gt=0)
    head_dim: int = Field(default=32, gt=0)
    intermediate_size: int = Field(default=384, gt=0)
    vocab_size: int | None = Field(default=None, gt=0, description="padded up to this; None: what the alphabet needs")
    tie_embeddings: bool = True


class WarmupConfig(Strict):
    """Supervised warm-up on the task's worked answers, kept in `cache_dir` and found again by its settings."""

    steps: int = Field(default=220, gt=0)
    batch_size: int = Field(default=128, gt=0)
    lr: float = Field(default=1e-3, gt=0)
    lr_warmup_steps: int = Field(default=20, ge=0)
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    cache_dir: str = "cache/warmup"


class ModelConfig(Strict):
    path: str | None = Field(default=None, description="Hugging Face folder of the starting policy")
    fresh: FreshModel | None = Field(default=None, description="used by `sft` when path is null")
    max_len: int = Field(default=512, gt=1, description="prompt + response tokens an engine or learner must hold")
    chat_template: Literal["auto", "off"] = Field(default="auto", description="auto: the tokenizer's, if it has one")
    system_prompt: str | None = None
    trust_remote_code: Literal[False] = False
    warmup: WarmupConfig | None = Field(default=None, description="make the starting policy by `sft` when path is null")


class TaskConfig(Strict):
    name: str = Field(description="a task of rlcore.tasks, e.g. digits")
    args: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the task")
    grade_timeout_s: float = Field(default=10.0, gt=0, description="deadline of one grading")
    grader_processes: int = Field(default=1, gt=0)
    max_prompt_tokens: int | None = Field(default=None, gt=0)


class SparseConfig(Strict):
    block_size: int = Field(default=16, gt=0, description="tokens a page")
    blocks: int | None = Field(default=None, gt=1, description="pages each query attends to")
    share: float | None = Field(default=None, gt=0, le=1, description="instead of blocks: share of the context's pages")
    sparse_prompt: bool = Field(default=True, description="false: prompt positions attend densely")


class ActorConfig(Strict):
    kind: Literal["bf16", "fp8", "sparse", "draft"] = "bf16"
    count: int = Field(default=1, gt=0, description="engines of this kind")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="auto: bfloat16 on GPU, float32 on CPU"
    )
    num_cpus: float = Field(default=1, gt=0)
    num_gpus: float = Field(default=0, ge=0)
    tensor_parallel: int = Field(default=1, gt=0)
    max_num_seqs: int = Field(default=256, gt=0)
    max_batched_tokens: int | None = Field(default=None, gt=0)
    kv_cache_gib: float = Field(
        default=1.0, gt=0, description="CPU: KV cache; GPU: ignored, see gpu_memory_utilization"
    )
    gpu_memory_utilization: float = Field(default=0.85, gt=0, le=1)
    enforce_eager: bool = True
    prefix_caching: bool = True
    kv_on_update: Literal["recompute", "keep"] = Field(
        default="recompute", description="in flight: keep leaves stale KV"
    )
    rounding: Literal["none", "fp8", "int8", "int4"] = Field(
        default="none", description="emulated weight rounding (CPU)"
    )
    fp8_kv_cache: bool = False
    keep_high_precision: list[str] = Field(default_factory=lambda: ["lm_head", "embed_tokens"])
    sparse: SparseConfig | None = None
    draft_path: str | None = None
    logit_noise: float = Field(default=0.0, ge=0, description="std of noise added to actor logits, to study mismatch")
    temperature_scale: float = Field(default=1.0, gt=0, description="actor temperature error, to study mismatch")


class RolloutConfig(Strict):
    samples_per_prompt: int = Field(default=8, gt=0, description="n: group size")
    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0, description="0: off")
    min_p: float = Field(default=0.0, ge=0, le=1)
    max_new_tokens: int = Field(default=64, gt=0)
    stop: list[str] = Field(default_factory=list)
    logprobs_k: int = Field(default=20, ge=0, description="top log-probs stored per token; 0: the sampled one only")
    request_timeout_s: float = Field(default=600.0, gt=0, description="a group not finished by then is reissued")


class AlgorithmConfig(Strict):
    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce", "group_mean"] = "grpo"
    loss: Literal["ppo", "gspo", "cispo", "reinforce"] = "ppo"
    eps_low: float = Field(default=0.2, ge=0)
    eps_high: float = Field(default=0.2, ge=0)
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = "token-mean"
    kl_coef: float = Field(default=0.0, ge=0, description="KL to the frozen starting policy")
    kl_estimator: Literal["k1", "k2", "k3", "full"] = "k3"
    entropy_coef: float = 0.0
    dynamic_sampling: bool = Field(default=False, description="groups with all-equal rewards are filtered and replaced")
    overlong_buffer: int = Field(
        default=0, ge=0, description="DAPO's soft overlong penalty over the last n tokens; 0: off"
    )
    overlong_penalty: float = Field(default=1.0, ge=0)
    keep_best: int | None = Field(
        default=None, gt=0, description="oversampling: of each group the n best are trained on"
    )


class ScheduleConfig(Strict):
    steps: int = Field(default=20, gt=0, description="optimizer steps of the run")
    groups_per_step: int = Field(default=64, gt=0)
    steps_per_publish: int = Field(default=1, gt=0, description="H")
    max_staleness: int = Field(default=0, ge=0, description="eta, in optimizer steps beyond the H-1 of a phase")
    on_publish: Literal["finish", "abort", "in_flight"] = "finish"
    sampling: Literal["fifo", "uniform", "by_task"] = "fifo"
    max_uses: int = Field(default=1, gt=0, description="uniform: times a group may be trained on")
    wait_data_timeout_s: float = Field(default=600.0, gt=0)
    publish_timeout_s: float = Field(default=300.0, gt=0)
    step_timeout_s: float = Field(default=1800.0, gt=0)


class LoraConfig(Strict):
    rank: int = Field(default=16, gt=0)
    alpha: float = Field(default=32.0, gt=0)
    targets: list[str] = Field(
        default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        description="names of the adapted linear layers",
    )


class LearnerConfig(Strict):
    ranks: int = Field(default=1, gt=0)
    num_cpus: float = Field(default=1, gt=0, description="per rank; also its compute threads")
    num_gpus: float = Field(default=0, ge=0, description="per rank")
    zero_stage: Literal[0, 1, 2, 3] = 0
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="auto: bfloat16 on GPU, float32 on CPU"
    )
    lr: float = Field(default=2e-4, gt=0)
    lr_warmup_steps: int = Field(default=5, ge=0)
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(default=0.0, ge=0)
    grad_clip: float = Field(default=1.0, gt=0)
    micro_batch_tokens: int = Field(default=8192, gt=0, description="tokens of a micro-batch, padding included")
    layout: Literal["auto", "packed", "sorted"] = Field(
        default="auto", description="auto: packed with flash-attn, else sorted"
    )
    attention: Literal["auto", "sdpa", "flash_attention_2"] = Field(
        default="auto", description="auto: flash-attn on GPU"
    )
    gradient_checkpointing: bool = False
    head_chunk_tokens: int = Field(default=1024, gt=0, description="positions per chunk of the LM-head pass")
    ref_pass: Literal["auto", "always"] = Field(
        default="auto", description="auto: p_ref is p_new detached when both coincide"
    )
    port: int = Field(default=0, ge=0, lt=65536, description="rendezvous port of the ranks; 0: any free one")
    lora: LoraConfig | None = None


class ClusterConfig(Strict):
    address: str | None = Field(default=None, description="Ray address; null: RAY_ADDRESS or a local cluster")
    num_cpus: int | None = Field(
        default=None, gt=0, description="local cluster; null: all, at least what the roles ask"
    )
    object_store_mib: int = Field(default=512, gt=75)
    start_timeout_s: float = Field(default=300.0, gt=0, description="deadline for every role to come up")
    heartbeat_s: float = Field(default=5.0, gt=0)
    hang_timeout_s: float = Field(default=120.0, gt=0, description="an actor silent for longer is replaced")
    max_restarts: int = Field(default=10, ge=0, description="replacements of rollout actors before the run gives up")
    buffer_mib: int = Field(default=1024, gt=0, description="payload bytes the buffer may hold")
    transport: Literal["object_store", "disk", "nccl"] = "object_store"
    verify_weights: Literal["sampled", "full"] = Field(
        default="sampled", description="arrival check after every publish"
    )


class EvalConfig(Strict):
    every: int = Field(default=5, ge=0, description="steps between evaluations; 0: only at the end")
    at_start: bool = True
    prompts: int = Field(default=128, gt=0, description="held-out prompts, at most what the task has")
    samples: int = Field(default=1, gt=0, description="k of mean@k and pass@k (sampled)")
    greedy: bool = True
    temperature: float = Field(default=1.0, gt=0)
    timeout_s: float = Field(default=600.0, gt=0)
    tasks: dict[str, TaskConfig] = Field(default_factory=dict, description="further held-out tasks, by label")


class CheckpointConfig(Strict):
    every: int = Field(default=0, ge=0, description="steps between checkpoints; 0: only at the end")
    keep: int = Field(default=2, gt=0, description="newest checkpoints kept")
    at_end: bool = True


class LoggingConfig(Strict):
    console: Literal["live", "plain", "off"] = "live"
    wandb: Literal["offline", "online", "disabled"] = "offline"
    project: str = "rlcore"
    samples_per_step: int = Field(default=4, ge=0, description="decoded trajectories kept each step under samples/")
    report: bool = True


class RunConfig(Strict):
    run_dir: str
    seed: int = 0
    resume: Literal["never", "auto"] = "never"
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
