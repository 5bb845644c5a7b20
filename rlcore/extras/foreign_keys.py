"""The common keys of verl, TRL's GRPO and OpenRLHF beside ours: one table, which
`rlcore import-config` translates by and docs/coming-from.md prints. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Source = Literal["verl", "trl", "openrlhf"]
SOURCES: tuple[Source, ...] = ("verl", "trl", "openrlhf")

LOSSES = {"vanilla": "ppo", "ppo": "ppo", "gspo": "gspo", "cispo": "cispo"}
AGGREGATIONS = {
    "token-mean": "token-mean",
    "seq-mean-token-mean": "seq-mean-token-mean",
    "seq-mean-token-sum-norm": "seq-mean-token-sum-norm",
    "grpo": "seq-mean-token-mean",
    "bnpo": "token-mean",
    "dapo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
}
ADVANTAGES = {
    "grpo": "grpo",
    "rloo": "rloo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    "reinforce": "reinforce_pp",
    "reinforce_baseline": "reinforce_pp_baseline",
    "group_norm": "grpo",
    "dr_grpo": "dr_grpo",
}
SCALES = {
    "true": "grpo",
    "group": "grpo",
    "false": "dr_grpo",
    "none": "dr_grpo",
    "batch": "reinforce_pp_baseline",
}
KLS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
SCHEDULES = {name: name for name in ("constant", "linear", "cosine")} | {
    "constant_with_warmup": "constant"
}


@dataclass(frozen=True, slots=True)
class ForeignKey:
    """One of our keys and what it is called elsewhere.

    Example: ForeignKey("rollout.temperature", "actor_rollout_ref.rollout.temperature", "temp")
    """

    ours: str
    verl: str = ""
    trl: str = ""
    openrlhf: str = ""
    # their values as ours, both in lower case; empty: the value is taken as it is
    values: Mapping[str, Any] = field(default_factory=dict)
    # a number below this means "off" or "default" there, and is left out
    least: float | None = None
    note: str = ""

    def of(self, source: Source) -> str:
        """Its name there, or ""."""
        return {"verl": self.verl, "trl": self.trl, "openrlhf": self.openrlhf}[source]


ACTOR, MODEL, SAMPLING = (f"actor_rollout_ref.{part}" for part in ("actor", "model", "rollout"))
BATCHES = "prompts of an optimizer step, from their batch sizes; see below"
ENTRIES: tuple[ForeignKey, ...] = (
    ForeignKey(
        "model.path", f"{MODEL}.path", "model_name_or_path", "pretrain", note="a local folder"
    ),
    ForeignKey("task.args.train_path", "data.train_files", "dataset_name", "prompt_data"),
    ForeignKey("task.args.heldout_path", "data.val_files", "", "eval_dataset"),
    ForeignKey("task.args.question_field", "data.prompt_key", "", "input_key"),
    ForeignKey("task.args.answer_field", "", "", "label_key"),
    ForeignKey(
        "rollout.samples_per_prompt", f"{SAMPLING}.n", "num_generations", "n_samples_per_prompt"
    ),
    ForeignKey(
        "rollout.max_new_tokens",
        "data.max_response_length",
        "max_completion_length",
        "generate_max_len",
    ),
    ForeignKey(
        "task.max_prompt_tokens", "data.max_prompt_length", "max_prompt_length", "prompt_max_len"
    ),
    ForeignKey("rollout.temperature", f"{SAMPLING}.temperature", "temperature", "temperature"),
    ForeignKey("rollout.top_p", f"{SAMPLING}.top_p", "top_p", "top_p"),
    ForeignKey("rollout.top_k", f"{SAMPLING}.top_k", "top_k", least=1),
    ForeignKey("rollout.min_p", "", "min_p"),
    ForeignKey(
        "schedule.groups_per_step",
        f"{ACTOR}.ppo_mini_batch_size",
        "per_device_train_batch_size",
        "train_batch_size",
        note=BATCHES,
    ),
    ForeignKey(
        "schedule.steps_per_publish",
        "data.train_batch_size",
        "steps_per_generation",
        "rollout_batch_size",
        note="H: their batch of a rollout phase over that of a step",
    ),
    ForeignKey("schedule.epochs", f"{ACTOR}.ppo_epochs", "num_iterations", "max_epochs"),
    ForeignKey("schedule.steps", "trainer.total_training_steps", "max_steps", least=1),
    ForeignKey(
        "schedule.max_staleness", "", "", "async_queue_size", note="with their --async_train"
    ),
    ForeignKey(
        "algorithm.advantage",
        "algorithm.adv_estimator",
        "scale_rewards",
        "advantage_estimator",
        values=ADVANTAGES | SCALES,
    ),
    ForeignKey(
        "algorithm.loss",
        f"{ACTOR}.policy_loss.loss_mode",
        "importance_sampling_level",
        "policy_loss_type",
        values=LOSSES | {"token": "ppo", "sequence": "gspo"},
    ),
    ForeignKey("algorithm.eps_low", f"{ACTOR}.clip_ratio_low", "epsilon", "eps_clip"),
    ForeignKey(
        "algorithm.eps_high",
        f"{ACTOR}.clip_ratio_high",
        "epsilon_high",
        "eps_clip_low_high",
        note="as eps_low where it is not given",
    ),
    ForeignKey("algorithm.dual_clip", f"{ACTOR}.clip_ratio_c", "delta", "dual_clip"),
    ForeignKey(
        "algorithm.aggregation",
        f"{ACTOR}.loss_agg_mode",
        "loss_type",
        values=AGGREGATIONS,
    ),
    ForeignKey(
        "algorithm.kl_coef",
        f"{ACTOR}.kl_loss_coef",
        "beta",
        "init_kl_coef",
        note="verl, OpenRLHF: only with use_kl_loss",
    ),
    ForeignKey("algorithm.kl_estimator", f"{ACTOR}.kl_loss_type", "", "kl_estimator", values=KLS),
    ForeignKey("algorithm.entropy_coef", f"{ACTOR}.entropy_coeff", "", "entropy_loss_coef"),
    ForeignKey(
        "algorithm.dynamic_sampling", "algorithm.filter_groups.enable", "", "dynamic_filtering"
    ),
    ForeignKey("algorithm.overlong_filter", "", "mask_truncated_completions"),
    ForeignKey("learner.lr", f"{ACTOR}.optim.lr", "learning_rate", "actor_learning_rate"),
    ForeignKey(
        "learner.lr_warmup_steps", f"{ACTOR}.optim.lr_warmup_steps", "warmup_steps", least=0
    ),
    ForeignKey(
        "learner.lr_schedule",
        f"{ACTOR}.optim.warmup_style",
        "lr_scheduler_type",
        "lr_scheduler",
        values=SCHEDULES,
    ),
    ForeignKey("learner.weight_decay", f"{ACTOR}.optim.weight_decay", "weight_decay", "l2"),
    ForeignKey("learner.betas", f"{ACTOR}.optim.betas", "", "adam_betas"),
    ForeignKey("learner.eps", "", "adam_epsilon"),
    ForeignKey("learner.grad_clip", f"{ACTOR}.grad_clip", "max_grad_norm", "max_norm"),
    ForeignKey(
        "learner.gradient_checkpointing",
        f"{MODEL}.enable_gradient_checkpointing",
        "gradient_checkpointing",
        "gradient_checkpointing",
    ),
    ForeignKey(
        "learner.micro_batch_tokens",
        f"{ACTOR}.ppo_max_token_len_per_gpu",
        "",
        "train_max_tokens_per_gpu",
    ),
    ForeignKey("learner.zero_stage", "", "", "zero_stage"),
    ForeignKey("learner.lora.rank", f"{MODEL}.lora_rank", "lora_r", "lora_rank", least=1),
    ForeignKey(
        "learner.lora.alpha",
        f"{MODEL}.lora_alpha",
        "lora_alpha",
        "lora_alpha",
        note="with a rank",
    ),
    ForeignKey(
        "actor.bf16.gpu_memory_utilization",
        f"{SAMPLING}.gpu_memory_utilization",
        "vllm_gpu_memory_utilization",
        "vllm_gpu_memory_utilization",
    ),
    ForeignKey(
        "actor.bf16.tensor_parallel",
        f"{SAMPLING}.tensor_model_parallel_size",
        "vllm_tensor_parallel_size",
        "vllm_tensor_parallel_size",
    ),
    ForeignKey("actor.bf16.count", "", "", "vllm_num_engines"),
    ForeignKey("actor.bf16.max_num_seqs", f"{SAMPLING}.max_num_seqs"),
    ForeignKey("actor.bf16.max_batched_tokens", f"{SAMPLING}.max_num_batched_tokens"),
    ForeignKey("actor.bf16.enforce_eager", f"{SAMPLING}.enforce_eager", "", "enforce_eager"),
    ForeignKey(
        "correction.tis.cap",
        "algorithm.rollout_correction.rollout_is_threshold",
        "vllm_importance_sampling_cap",
        "vllm_is_truncated_threshold",
        note="with their switch of the correction; TRL's masking modes become `mis`",
    ),
    ForeignKey(
        "correction.tis.level",
        "algorithm.rollout_correction.rollout_is",
        "vllm_importance_sampling_mode",
        "",
        values={"token": "token", "sequence": "sequence"},
    ),
    ForeignKey("correction.opsm.delta", "", "off_policy_mask_threshold"),
    ForeignKey("evaluation.every", "trainer.test_freq", "eval_steps", "eval_steps", least=1),
    ForeignKey("evaluation.at_start", "trainer.val_before_train"),
    ForeignKey("evaluation.samples", f"{SAMPLING}.val_kwargs.n", "", "eval_n_samples_per_prompt"),
    ForeignKey("evaluation.temperature", "", "", "eval_temperature"),
    ForeignKey("checkpoint.every", "trainer.save_freq", "save_steps", "save_steps", least=1),
    ForeignKey(
        "checkpoint.keep",
        "trainer.max_actor_ckpt_to_keep",
        "save_total_limit",
        "max_ckpt_num",
        least=1,
    ),
    ForeignKey("logging.project", "trainer.project_name", "", "wandb_project"),
    ForeignKey("seed", "data.seed", "seed", "seed"),
)
# Read where an entry above is decided, and not keys of ours themselves.
SWITCHES: Mapping[Source, tuple[str, ...]] = {
    "verl": (f"{ACTOR}.use_kl_loss", f"{ACTOR}.clip_ratio", "algorithm.norm_adv_by_std_in_grpo"),
    "trl": (
        "gradient_accumulation_steps",
        "vllm_importance_sampling_correction",
        "use_vllm",
        "use_peft",
    ),
    "openrlhf": (
        "use_kl_loss",
        "async_train",
        "partial_rollout",
        "enable_vllm_is_correction",
        "no_advantage_std_norm",
        "apply_chat_template",
    ),
}
# "key": why it has no counterpart, or what to do about it.
REASONS: Mapping[str, str] = {
    "custom_reward_function.path": "write grade(item, response) and give task.args.grader",
    "reward_model.enable": "a reward model is task.rewards.LABEL.classifier",
    "reward_funcs": "write grade(item, response) and give task.args.grader",
    "remote_rm_url": "a reward behind HTTP is task.rewards.LABEL.http",
    "reward_pretrain": "a reward model is task.rewards.LABEL.classifier",
    "agent_func_path": "an agent is an environment: docs/environments.md",
    "trainer.n_gpus_per_node": "choose learner.ranks, actor.bf16.count and cluster.launch",
    "trainer.nnodes": "choose cluster.launch.nodes",
    "trainer.total_epochs": "a run has optimizer steps: schedule.steps",
    "num_train_epochs": "a run has optimizer steps: schedule.steps",
    "num_episodes": "a run has optimizer steps: schedule.steps",
    "colocate_all_models": "engines and learner take turns on GPUs with schedule.colocated=true",
}
