"""The common keys of verl, TRL's GRPO, OpenRLHF, SkyRL and prime-rl next to ours: one table, which
`rlcore import-config` translates by and docs/coming-from.md prints. Names and defaults are from the
trainers' sources from January (verl), July (TRL) and August 2026 (the others). No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Source = Literal["verl", "trl", "openrlhf", "skyrl", "prime_rl"]
SOURCES: tuple[Source, ...] = ("verl", "trl", "openrlhf", "skyrl", "prime_rl")

LOSSES = {name: name for name in ("gspo", "cispo", "sapo", "gmpo", "reinforce")} | {
    "token": "ppo",
    "sequence": "gspo",
    "geo_mean": "gmpo",
    **{name: "ppo" for name in ("ppo", "vanilla", "regular", "dual_clip")},
}
LEVELS = {"token": "token", "sequence": "sequence"}
AGGREGATIONS = {
    "token-mean": "token-mean",
    "token_mean": "token-mean",
    "sequence_mean": "seq-mean-token-mean",
    "seq-mean-token-mean": "seq-mean-token-mean",
    "seq-mean-token-sum-norm": "seq-mean-token-sum-norm",
    "grpo": "seq-mean-token-mean",
    "bnpo": "token-mean",
    "dapo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
    "seq_mean_token_sum_norm": "seq-mean-token-sum-norm",
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
    "gae": "gae",
    "opo": "opo",
    "gpg": "gpg",
    "grpo_passk": "passk",
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
    """One of our keys and its names elsewhere; `|` stands before an older name.

    Example: ForeignKey("rollout.temperature", "actor_rollout_ref.rollout.temperature", "temp")
    """

    ours: str
    verl: str = ""
    trl: str = ""
    openrlhf: str = ""
    skyrl: str = ""
    prime_rl: str = ""
    # their values as ours, both in lower case; empty: the value is taken as it is
    values: Mapping[str, Any] = field(default_factory=dict)
    # a number below this means "off" or "default" there, and is left out
    least: float | None = None
    note: str = ""

    def of(self, source: Source) -> str:
        """The key's name in a trainer, or ""."""
        return self.names(source)[0]

    def names(self, source: Source) -> list[str]:
        """The key's names in a trainer, the newest first."""
        return str(getattr(self, source)).split("|")


ACTOR, MODEL, SAMPLING = (f"actor_rollout_ref.{part}" for part in ("actor", "model", "rollout"))
SKY_LOSS, SKY_POLICY, SKY_ENGINE = (
    "trainer.algorithm",
    "trainer.policy",
    "generator.inference_engine",
)
BATCHES = "prompts of an optimizer step, from their batch sizes; see below"
ENTRIES: tuple[ForeignKey, ...] = (
    ForeignKey(
        "model.path",
        f"{MODEL}.path",
        "model_name_or_path",
        "actor.model_name_or_path|pretrain",
        skyrl=f"{SKY_POLICY}.model.path",
        prime_rl="model.name",
        note="a local folder",
    ),
    ForeignKey(
        "task.args.train_path",
        "data.train_files",
        "dataset_name",
        "data.prompt_dataset|prompt_data",
        skyrl="data.train_data",
    ),
    ForeignKey(
        "task.args.heldout_path",
        "data.val_files",
        "",
        "eval.dataset|eval_dataset",
        skyrl="data.val_data",
    ),
    ForeignKey("task.args.question_field", "data.prompt_key", "", "data.input_key|input_key"),
    ForeignKey("task.args.answer_field", "", "", "data.label_key|label_key"),
    ForeignKey(
        "rollout.samples_per_prompt",
        f"{SAMPLING}.n",
        "num_generations",
        "rollout.n_samples_per_prompt|n_samples_per_prompt",
        skyrl="generator.n_samples_per_prompt",
        prime_rl="orchestrator.group_size",
    ),
    ForeignKey(
        "rollout.max_new_tokens",
        "data.max_response_length",
        "max_completion_length",
        "rollout.max_new_tokens|generate_max_len",
        skyrl="generator.sampling_params.max_generate_length",
        prime_rl="orchestrator.train.sampling.max_completion_tokens",
    ),
    ForeignKey(
        "task.max_prompt_tokens",
        "data.max_prompt_length",
        "max_prompt_length",
        "prompt_max_len",
        skyrl="trainer.max_prompt_length",
    ),
    ForeignKey(
        "rollout.temperature",
        f"{SAMPLING}.temperature",
        "temperature",
        "rollout.temperature|temperature",
        skyrl="generator.sampling_params.temperature",
        prime_rl="orchestrator.train.sampling.temperature",
    ),
    ForeignKey(
        "rollout.top_p",
        f"{SAMPLING}.top_p",
        "top_p",
        "rollout.top_p|top_p",
        skyrl="generator.sampling_params.top_p",
    ),
    ForeignKey(
        "rollout.top_k",
        f"{SAMPLING}.top_k",
        "top_k",
        skyrl="generator.sampling_params.top_k",
        least=1,
    ),
    ForeignKey("rollout.min_p", "", "min_p", skyrl="generator.sampling_params.min_p"),
    ForeignKey(
        "schedule.groups_per_step",
        f"{ACTOR}.ppo_mini_batch_size",
        "per_device_train_batch_size",
        "train.batch_size|train_batch_size",
        skyrl="trainer.policy_mini_batch_size",
        prime_rl="orchestrator.batch_size",
        note=BATCHES,
    ),
    ForeignKey(
        "schedule.steps_per_publish",
        "data.train_batch_size",
        "steps_per_generation",
        "rollout.batch_size|rollout_batch_size",
        skyrl="trainer.train_batch_size",
        note="H: their batch of a rollout phase over a step's",
    ),
    ForeignKey(
        "schedule.epochs",
        f"{ACTOR}.ppo_epochs",
        "num_iterations",
        "train.max_epochs|max_epochs",
        skyrl="trainer.update_epochs_per_batch",
    ),
    ForeignKey(
        "schedule.steps",
        "trainer.total_training_steps",
        "max_steps",
        skyrl="trainer.max_training_steps",
        prime_rl="max_steps",
        least=1,
    ),
    ForeignKey(
        "schedule.max_staleness",
        "",
        "max_staleness",
        "train.async_queue_size|async_queue_size",
        skyrl="trainer.fully_async.max_staleness_steps",
        prime_rl="orchestrator.max_off_policy_steps",
        note="in optimizer steps; verl: async_training.* and trainer.v1.*",
    ),
    ForeignKey(
        "algorithm.advantage",
        "algorithm.adv_estimator",
        "scale_rewards",
        "algo.advantage.estimator|advantage_estimator",
        skyrl=f"{SKY_LOSS}.advantage_estimator",
        prime_rl="orchestrator.algo.type",
        values=ADVANTAGES | SCALES,
    ),
    ForeignKey(
        "algorithm.loss",
        f"{ACTOR}.policy_loss.loss_mode",
        "importance_sampling_level",
        "actor.policy_loss_type|policy_loss_type",
        skyrl=f"{SKY_LOSS}.policy_loss_type",
        prime_rl="trainer.loss.type",
        values=LOSSES,
    ),
    ForeignKey(
        "algorithm.eps_low",
        f"{ACTOR}.clip_ratio_low",
        "epsilon",
        "actor.eps_clip|eps_clip",
        skyrl=f"{SKY_LOSS}.eps_clip_low",
    ),
    ForeignKey(
        "algorithm.eps_high",
        f"{ACTOR}.clip_ratio_high",
        "epsilon_high",
        "actor.eps_clip_low_high|eps_clip_low_high",
        skyrl=f"{SKY_LOSS}.eps_clip_high",
        note="as eps_low where it is not given",
    ),
    ForeignKey(
        "algorithm.dual_clip",
        f"{ACTOR}.clip_ratio_c",
        "delta",
        "actor.dual_clip|dual_clip",
        skyrl=f"{SKY_LOSS}.clip_ratio_c",
    ),
    ForeignKey(
        "algorithm.aggregation",
        f"{ACTOR}.loss_agg_mode",
        "loss_type",
        skyrl=f"{SKY_LOSS}.loss_reduction",
        values=AGGREGATIONS,
    ),
    ForeignKey(
        "algorithm.kl_coef",
        f"{ACTOR}.kl_loss_coef",
        "beta",
        "algo.kl.init_coef|init_kl_coef",
        skyrl=f"{SKY_LOSS}.kl_loss_coef",
        note="only with use_kl_loss; OpenRLHF: without it in the reward (algorithm.kl_in)",
    ),
    ForeignKey(
        "algorithm.kl_estimator",
        f"{ACTOR}.kl_loss_type",
        "",
        "algo.kl.estimator|kl_estimator",
        skyrl=f"{SKY_LOSS}.kl_estimator_type",
        values=KLS,
    ),
    ForeignKey(
        "algorithm.entropy_coef",
        f"{ACTOR}.entropy_coeff",
        "",
        "actor.entropy_coef|entropy_loss_coef",
        skyrl=f"{SKY_LOSS}.entropy_loss_coef",
    ),
    ForeignKey(
        "algorithm.dynamic_sampling",
        "algorithm.filter_groups.enable",
        "",
        "algo.dynamic_filtering_enable|dynamic_filtering",
        prime_rl="orchestrator.train.filter_zero_advantages",
    ),
    ForeignKey(
        "algorithm.overlong_filter",
        "",
        "mask_truncated_completions",
        skyrl="generator.apply_overlong_filtering",
    ),
    ForeignKey(
        "learner.lr",
        f"{ACTOR}.optim.lr",
        "learning_rate",
        "actor.adam.lr|actor_learning_rate",
        skyrl=f"{SKY_POLICY}.optimizer_config.lr",
        prime_rl="trainer.optim.lr",
    ),
    ForeignKey(
        "learner.lr_warmup_steps",
        f"{ACTOR}.optim.lr_warmup_steps",
        "warmup_steps",
        skyrl=f"{SKY_POLICY}.optimizer_config.num_warmup_steps",
        prime_rl="trainer.scheduler.warmup_steps",
        least=0,
    ),
    ForeignKey(
        "learner.lr_schedule",
        f"{ACTOR}.optim.lr_scheduler_type|{ACTOR}.optim.warmup_style|{ACTOR}.optim.lr_decay_style",
        "lr_scheduler_type",
        "actor.lr_scheduler|lr_scheduler",
        skyrl=f"{SKY_POLICY}.optimizer_config.scheduler",
        prime_rl="trainer.scheduler.type",
        values=SCHEDULES,
    ),
    ForeignKey(
        "learner.weight_decay",
        f"{ACTOR}.optim.weight_decay",
        "weight_decay",
        "actor.adam.weight_decay|l2",
        skyrl=f"{SKY_POLICY}.optimizer_config.weight_decay",
        prime_rl="trainer.optim.weight_decay",
    ),
    ForeignKey(
        "learner.betas",
        f"{ACTOR}.optim.betas",
        "",
        "actor.adam.betas|adam_betas",
        skyrl=f"{SKY_POLICY}.optimizer_config.adam_betas",
    ),
    ForeignKey("learner.eps", "", "adam_epsilon"),
    ForeignKey(
        "learner.grad_clip",
        f"{ACTOR}.grad_clip|{ACTOR}.optim.clip_grad",
        "max_grad_norm",
        "actor.max_norm|max_norm",
        skyrl=f"{SKY_POLICY}.optimizer_config.max_grad_norm",
        prime_rl="trainer.optim.max_norm",
    ),
    ForeignKey(
        "learner.gradient_checkpointing",
        f"{MODEL}.enable_gradient_checkpointing",
        "gradient_checkpointing",
        "actor.gradient_checkpointing_enable|gradient_checkpointing",
        skyrl="trainer.gradient_checkpointing",
    ),
    ForeignKey(
        "learner.micro_batch_tokens",
        f"{ACTOR}.ppo_max_token_len_per_gpu",
        "",
        "train.max_tokens_per_gpu|train_max_tokens_per_gpu",
    ),
    ForeignKey("learner.zero_stage", "", "", "ds.zero_stage|zero_stage"),
    ForeignKey(
        "learner.lora.rank",
        f"{MODEL}.lora_rank|{MODEL}.lora.rank",
        "lora_r",
        "ds.lora.rank|lora_rank",
        skyrl=f"{SKY_POLICY}.model.lora.rank",
        prime_rl="trainer.model.lora.rank",
        least=1,
    ),
    ForeignKey(
        "learner.lora.alpha",
        f"{MODEL}.lora_alpha|{MODEL}.lora.alpha",
        "lora_alpha",
        "ds.lora.alpha|lora_alpha",
        skyrl=f"{SKY_POLICY}.model.lora.alpha",
        prime_rl="trainer.model.lora.alpha",
        note="with a rank",
    ),
    ForeignKey(
        "actor.bf16.gpu_memory_utilization",
        f"{SAMPLING}.gpu_memory_utilization",
        "vllm_gpu_memory_utilization",
        "vllm.gpu_memory_utilization|vllm_gpu_memory_utilization",
        skyrl=f"{SKY_ENGINE}.gpu_memory_utilization",
        prime_rl="inference.vllm.gpu_memory_utilization",
    ),
    ForeignKey(
        "actor.bf16.tensor_parallel",
        f"{SAMPLING}.tensor_model_parallel_size",
        "vllm_tensor_parallel_size",
        "vllm.tensor_parallel_size|vllm_tensor_parallel_size",
        skyrl=f"{SKY_ENGINE}.tensor_parallel_size",
        prime_rl="inference.vllm.tensor_parallel_size",
    ),
    ForeignKey(
        "actor.bf16.count",
        "",
        "",
        "vllm.num_engines|vllm_num_engines",
        skyrl=f"{SKY_ENGINE}.num_engines",
    ),
    ForeignKey(
        "actor.bf16.max_num_seqs",
        f"{SAMPLING}.max_num_seqs",
        skyrl=f"{SKY_ENGINE}.max_num_seqs",
        prime_rl="inference.vllm.max_num_seqs",
    ),
    ForeignKey(
        "actor.bf16.max_batched_tokens",
        f"{SAMPLING}.max_num_batched_tokens",
        skyrl=f"{SKY_ENGINE}.max_num_batched_tokens",
    ),
    ForeignKey(
        "actor.bf16.enforce_eager",
        f"{SAMPLING}.enforce_eager",
        "",
        "vllm.enforce_eager|enforce_eager",
        skyrl=f"{SKY_ENGINE}.enforce_eager",
        prime_rl="inference.vllm.enforce_eager",
    ),
    ForeignKey(
        "correction.tis.cap",
        "algorithm.rollout_correction.rollout_is_threshold",
        "vllm_importance_sampling_clip_max|vllm_importance_sampling_cap",
        "algo.advantage.is_correction_threshold|vllm_is_truncated_threshold",
        skyrl=f"{SKY_LOSS}.off_policy_correction.token_tis_ratio_clip_high",
        note="with their switch of the correction; TRL's masking modes become `mis`",
    ),
    ForeignKey(
        "correction.tis.level",
        "algorithm.rollout_correction.rollout_is",
        "vllm_importance_sampling_mode",
        "algo.advantage.is_correction_type",
        skyrl=f"{SKY_LOSS}.off_policy_correction.tis_ratio_type",
        values=LEVELS,
    ),
    ForeignKey("correction.opsm.delta", "", "off_policy_mask_threshold"),
    ForeignKey(
        "evaluation.every",
        "trainer.test_freq",
        "eval_steps",
        "eval.steps|eval_steps",
        skyrl="trainer.eval_interval",
        prime_rl="orchestrator.eval.interval",
        least=1,
    ),
    ForeignKey(
        "evaluation.at_start", "trainer.val_before_train", skyrl="trainer.eval_before_train"
    ),
    ForeignKey(
        "evaluation.samples",
        f"{SAMPLING}.val_kwargs.n",
        "",
        "eval.n_samples_per_prompt|eval_n_samples_per_prompt",
        skyrl="generator.eval_n_samples_per_prompt",
        prime_rl="orchestrator.eval.group_size",
    ),
    ForeignKey(
        "evaluation.temperature",
        f"{SAMPLING}.val_kwargs.temperature",
        "",
        "eval.temperature|eval_temperature",
        skyrl="generator.eval_sampling_params.temperature",
        prime_rl="orchestrator.eval.sampling.temperature",
        least=1e-6,
    ),
    ForeignKey(
        "evaluation.top_p",
        f"{SAMPLING}.val_kwargs.top_p",
        skyrl="generator.eval_sampling_params.top_p",
        prime_rl="orchestrator.eval.sampling.top_p",
    ),
    ForeignKey(
        "evaluation.top_k",
        f"{SAMPLING}.val_kwargs.top_k",
        skyrl="generator.eval_sampling_params.top_k",
        least=1,
    ),
    ForeignKey(
        "evaluation.max_new_tokens",
        skyrl="generator.eval_sampling_params.max_generate_length",
        prime_rl="orchestrator.eval.sampling.max_completion_tokens",
    ),
    ForeignKey(
        "learner.lr_decay_steps",
        f"{ACTOR}.optim.lr_decay_steps|{ACTOR}.optim.total_training_steps",
        least=1,
    ),
    ForeignKey(
        "algorithm.sapo_tau_pos",
        f"{ACTOR}.policy_loss.tau_pos|{ACTOR}.tau_pos",
        "sapo_temperature_pos",
        skyrl=f"{SKY_LOSS}.sapo.tau_pos",
    ),
    ForeignKey(
        "algorithm.sapo_tau_neg",
        f"{ACTOR}.policy_loss.tau_neg|{ACTOR}.tau_neg",
        "sapo_temperature_neg",
        skyrl=f"{SKY_LOSS}.sapo.tau_neg",
    ),
    ForeignKey(
        "critic.discount",
        "algorithm.gamma",
        "",
        "algo.advantage.gamma|gamma",
        skyrl=f"{SKY_LOSS}.gamma",
        note="with `gae` and a critic",
    ),
    ForeignKey(
        "critic.lam",
        "algorithm.lam",
        "",
        "algo.advantage.lambd|lambd",
        skyrl=f"{SKY_LOSS}.lambd",
        note="with `gae` and a critic",
    ),
    ForeignKey(
        "algorithm.overlong_penalty",
        "reward.reward_kwargs.overlong_buffer_cfg.penalty_factor"
        "|reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor",
        "",
        "reward.overlong_penalty_factor|overlong_penalty_factor",
        skyrl=f"{SKY_LOSS}.overlong_buffer_penalty_factor",
        note="with their buffer",
    ),
    ForeignKey(
        "algorithm.overlong_share",
        "reward.reward_kwargs.overlong_buffer_cfg.len"
        "|reward_model.reward_kwargs.overlong_buffer_cfg.len",
        "",
        "reward.overlong_buffer_len|overlong_buffer_len",
        skyrl=f"{SKY_LOSS}.overlong_buffer_len",
        note="the buffer over max_new_tokens",
    ),
    ForeignKey(
        "model.chat_template_args",
        "data.apply_chat_template_kwargs",
        "chat_template_kwargs",
        skyrl="generator.chat_template_kwargs",
        prime_rl="orchestrator.train.sampling.extra_body.chat_template_kwargs",
    ),
    ForeignKey(
        "checkpoint.every",
        "trainer.save_freq",
        "save_steps",
        "ckpt.save_steps|save_steps",
        skyrl="trainer.ckpt_interval",
        prime_rl="ckpt.interval",
        least=1,
    ),
    ForeignKey(
        "checkpoint.keep",
        "trainer.max_actor_ckpt_to_keep",
        "save_total_limit",
        "ckpt.max_num|max_ckpt_num",
        skyrl="trainer.max_ckpts_to_keep",
        prime_rl="ckpt.keep_last",
        least=1,
    ),
    ForeignKey(
        "logging.project",
        "trainer.project_name",
        "",
        "logger.wandb.project|wandb_project",
        skyrl="trainer.project_name",
        prime_rl="monitors.wandb.project",
    ),
    ForeignKey("seed", "data.seed", "seed", "train.seed|seed", skyrl="trainer.seed"),
    ForeignKey(
        "task.overlong_rows",
        "data.filter_overlong_prompts",
        values={"true": "skip", "false": "refuse"},
    ),
    ForeignKey(
        "model.max_len",
        f"{SAMPLING}.max_model_len",
        "vllm_max_model_length",
        "data.max_len",
        skyrl="generator.inference_engine.engine_init_kwargs.max_model_len",
        prime_rl="seq_len",
        note="of prompt and answer",
    ),
    ForeignKey(
        "learner.router_replay",
        prime_rl="trainer.enable_router_replay",
        values={"true": True, "false": False},
    ),
)
