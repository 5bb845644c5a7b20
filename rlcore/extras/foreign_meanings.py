"""Meanings of the other trainers' settings beside the table of keys: switches, defaults, settings
that are harmless to lose, and advice on the rest. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rlcore.extras.foreign_keys import ACTOR, SAMPLING, SKY_LOSS, SKY_POLICY, Source

# Read where an entry above is decided, and not keys of ours themselves.
SWITCHES: Mapping[Source, tuple[str, ...]] = {
    "verl": (
        f"{ACTOR}.use_kl_loss",
        f"{ACTOR}.clip_ratio",
        "algorithm.norm_adv_by_std_in_grpo",
        "custom_reward_function.path",
        "custom_reward_function.name",
        "custom_reward_function.reward_kwargs",
    ),
    "trl": (
        "gradient_accumulation_steps",
        "vllm_importance_sampling_correction",
        "use_vllm",
        "use_peft",
        "reward_funcs",
        "reward_weights",
    ),
    "openrlhf": (
        "algo.kl.use_loss|use_kl_loss",
        "train.async_enable|async_train",
        "train.partial_rollout_enable|partial_rollout",
        "algo.advantage.is_correction_enable|enable_vllm_is_correction",
        "algo.advantage.no_std_norm|no_advantage_std_norm",
        "data.apply_chat_template|apply_chat_template",
        "data.max_len",
        "reward.remote_url|remote_rm_url",
    ),
    "skyrl": (
        f"{SKY_LOSS}.use_kl_loss",
        f"{SKY_LOSS}.use_entropy_loss",
        f"{SKY_LOSS}.grpo_norm_by_std",
        f"{SKY_LOSS}.off_policy_correction.sequence_tis_ratio_clip_high",
        "trainer.fully_async.enabled",
    ),
    "prime_rl": ("trainer.loss.dppo_mask_low", "trainer.loss.dppo_mask_high"),
}
# Values that a trainer takes where a file gives none, of keys that decide what is learned.
DEFAULTS: Mapping[Source, Mapping[str, Any]] = {
    "verl": {
        f"{ACTOR}.loss_agg_mode": "token-mean",
        f"{ACTOR}.clip_ratio": 0.2,
        f"{ACTOR}.optim.lr": 1e-6,
        f"{ACTOR}.optim.weight_decay": 0.01,
        f"{ACTOR}.grad_clip": 1.0,
        f"{SAMPLING}.temperature": 1.0,
        "algorithm.adv_estimator": "gae",
    },
    "trl": {
        "learning_rate": 1e-6,
        "lr_scheduler_type": "linear",
        "num_generations": 8,
        "per_device_train_batch_size": 8,
        "max_completion_length": 512,
        "loss_type": "dapo",
        "scale_rewards": "group",
        "epsilon": 0.2,
        "max_grad_norm": 1.0,
        "weight_decay": 0.0,
        "temperature": 1.0,
    },
    "openrlhf": {
        "actor.adam.lr": 1e-6,
        "actor.lr_scheduler": "cosine_with_min_lr",
        "actor.lr_warmup_ratio": 0.03,
        "actor.adam.betas": [0.9, 0.95],
        "actor.adam.weight_decay": 0.0,
        "actor.eps_clip": 0.2,
        "actor.max_norm": 1.0,
        "algo.advantage.estimator": "gae",
        "algo.kl.init_coef": 0.01,
        "rollout.temperature": 1.0,
    },
    "skyrl": {
        f"{SKY_LOSS}.advantage_estimator": "grpo",
        f"{SKY_LOSS}.loss_reduction": "token_mean",
        f"{SKY_LOSS}.eps_clip_low": 0.2,
        f"{SKY_LOSS}.eps_clip_high": 0.2,
        f"{SKY_LOSS}.use_kl_loss": True,
        f"{SKY_LOSS}.kl_loss_coef": 0.001,
        f"{SKY_LOSS}.kl_estimator_type": "k3",
        f"{SKY_POLICY}.optimizer_config.lr": 1e-6,
        f"{SKY_POLICY}.optimizer_config.weight_decay": 0.01,
        "generator.n_samples_per_prompt": 5,
        "generator.sampling_params.max_generate_length": 1024,
        "trainer.train_batch_size": 1024,
        "trainer.policy_mini_batch_size": 256,
    },
    "prime_rl": {
        "trainer.optim.lr": 1e-6,
        "trainer.optim.weight_decay": 0.01,
        "trainer.loss.type": "default",
        "trainer.loss.dppo_mask_low": 0.2,
        "trainer.loss.dppo_mask_high": 0.2,
        "orchestrator.algo.type": "grpo",
        "orchestrator.max_off_policy_steps": 8,
    },
}
# Parts of names of what changes speed, memory, places and logs, and nothing that is learned.
HARMLESS = re.compile(
    r"micro_(\w+_)?batch|export_path|offload|fsdp|megatron|num_nodes|nnodes|num_gpus|"
    r"gpus_per_node|num_train_gpus|num_infer_gpus|remove_padding|packing|logger|logging|"
    r"wandb|tensorboard|trackio|report_to|(experiment|run|exp)_name|\.name$|ckpt|checkpoint|"
    r"output_dir|default_local_dir|save_|resume|colocate|sleep|sync|backend|dtype|bf16|"
    r"flash_attn|attn_impl|liger|compile|num_workers|max_tokens_per_gpu|max_token_len|"
    r"dynamic_bsz|dynamic_batch|prefix_caching|chunked_prefill|log_prob|profile|push_to_hub|"
    r"dataloader|strategy|placement|critic|parallel|ring_attn|run_engines_locally|batched|"
    r"eval_batch_size|log_completions|num_completions|vllm_mode|vllm_server|"
    r"vllm_max_model_length|max_model_len|^inference$|^ckpt$|deployment|monitors|"
    r"^config(_file)?$|reshard|^ref\.|\.ref\.|deepspeed|reentrant|adam_offload|project_name|"
    r"project$"
)
# "key": why it has no counterpart, or what to do about it.
REASONS: Mapping[str, str] = {
    "reward_model.enable": "a reward model is task.rewards.LABEL.classifier",
    "reward_pretrain": "a reward model is task.rewards.LABEL.classifier",
    "reward.model_name_or_path": "a reward model is task.rewards.LABEL.classifier",
    "agent_func_path": "an agent is an environment: docs/environments.md",
    "train.agent_func_path": "an agent is an environment: docs/environments.md",
    "environment.env_class": "its environment rewards there: give task.args.grader",
    "orchestrator.train.source": "its environments: give a task or an environment",
    "trainer.total_epochs": "a run has optimizer steps: schedule.steps",
    "trainer.epochs": "a run has optimizer steps: schedule.steps",
    "num_train_epochs": "a run has optimizer steps: schedule.steps",
    "num_episodes": "a run has optimizer steps: schedule.steps",
    "train.num_episodes": "a run has optimizer steps: schedule.steps",
    "actor.lr_warmup_ratio": "give learner.lr_warmup_steps, in optimizer steps",
    "warmup_ratio": "give learner.lr_warmup_steps, in optimizer steps",
    "algorithm.use_kl_in_reward": "algorithm.kl_in=reward with algorithm.kl_coef has it",
    "algorithm.kl_ctrl.target_kl": "is of a token there, algorithm.kl_target of an answer",
    "kl_target": "is of a token there, algorithm.kl_target of an answer",
    "data.max_samples": "give a file of so many rows",
    "algo.dynamic_filtering_range": "only groups of equal rewards are left out",
}
# "key=value" that say what is so in rlcore, too.
NEUTRAL = frozenset(
    (
        "algorithm.use_kl_in_reward=False",
        "data.truncation=error",
        "trainer.critic_warmup=0",
        "algo.dynamic_filtering_range=[0, 1]",
        "algo.advantage.gamma=1",
        "algo.advantage.lambd=1",
        "algorithm.gamma=1",
        "generator.max_turns=1",
        "generator.use_conversation_multi_turn=False",
        "generator.eval_sampling_params.top_p=1",
        "data.prompt_split=train",
    )
)
