"""Names of the other trainers' settings that change speed, memory, places and logs, and nothing
that is learned. Each is a whole name: `*` stands for one word between dots, and `**` at the end for
all below. A name that holds one of the words of `DANGER` is never harmless. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rlcore.extras.foreign_keys import Source

# Parts of the names of what decides how samples are weighed, cut off or how old they may be.
DANGER = re.compile(r"stale|async|correction|clip|ratio|is_|kl|len", re.IGNORECASE)

_MEGATRON = """
    tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size
    context_parallel_size expert_model_parallel_size expert_tensor_parallel_size param_offload
    optimizer_offload grad_offload use_mbridge vanilla_mbridge use_remove_padding
    use_dist_checkpointing dist_checkpointing_path empty_cuda_cache sequence_parallel
    override_transformer_config.recompute_granularity override_transformer_config.recompute_method
    override_transformer_config.recompute_num_layers override_transformer_config.apply_rope_fusion
    override_transformer_config.num_layers_in_first_pipeline_stage
    override_transformer_config.num_layers_in_last_pipeline_stage
    override_transformer_config.account_for_loss_in_pipeline_split
    override_transformer_config.account_for_embedding_in_pipeline_split
    override_transformer_config.use_flash_attn override_transformer_config.attention_backend
    override_transformer_config.gradient_accumulation_fusion
    override_transformer_config.masked_softmax_fusion
    override_transformer_config.bias_activation_fusion
    override_transformer_config.bias_dropout_fusion override_transformer_config.persist_layer_norm
    override_transformer_config.deallocate_pipeline_outputs
    override_transformer_config.moe_permute_fusion override_transformer_config.moe_grouped_gemm
    override_transformer_config.moe_enable_deepep
    override_transformer_config.moe_token_dispatcher_type
    override_transformer_config.context_parallel_size
    transformer_config_kwargs.recompute_granularity transformer_config_kwargs.recompute_method
    transformer_config_kwargs.recompute_num_layers
    transformer_config_kwargs.num_layers_in_last_pipeline_stage
"""
_FSDP = """
    param_offload optimizer_offload offload_policy fsdp_size reshard_after_forward strategy
    forward_prefetch use_orig_params ulysses_sequence_parallel_size use_torch_compile
    entropy_checkpointing cpu_offload wrap_policy.**
"""

NAMES: Mapping[Source, str] = {
    "verl": """
        trainer.logger trainer.experiment_name trainer.nnodes trainer.n_gpus_per_node trainer.device
        trainer.default_local_dir trainer.default_hdfs_dir trainer.resume_mode
        trainer.resume_from_path trainer.rollout_data_dir trainer.validation_data_dir
        trainer.max_critic_ckpt_to_keep trainer.max_ckpt_to_keep
        trainer.del_local_ckpt_after_load trainer.ray_wait_register_center_timeout
        trainer.esi_redundant_time
        actor_rollout_ref.nccl_timeout actor_rollout_ref.actor.strategy
        actor_rollout_ref.actor.use_dynamic_bsz actor_rollout_ref.actor.use_torch_compile
        actor_rollout_ref.actor.use_fused_kernels
        actor_rollout_ref.actor.ppo_micro_batch_size
        actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu
        actor_rollout_ref.actor.ulysses_sequence_parallel_size
        actor_rollout_ref.actor.entropy_checkpointing
        actor_rollout_ref.actor.entropy_from_logits_with_chunking
        actor_rollout_ref.actor.checkpoint.save_contents
        actor_rollout_ref.actor.checkpoint.load_contents actor_rollout_ref.actor.checkpoint.strict
        actor_rollout_ref.ref.strategy actor_rollout_ref.ref.use_torch_compile
        actor_rollout_ref.ref.ulysses_sequence_parallel_size
        actor_rollout_ref.ref.log_prob_use_dynamic_bsz
        actor_rollout_ref.ref.log_prob_micro_batch_size
        actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu
        actor_rollout_ref.ref.entropy_from_logits_with_chunking
        actor_rollout_ref.model.use_remove_padding actor_rollout_ref.model.use_liger
        actor_rollout_ref.model.use_fused_kernels actor_rollout_ref.model.use_shm
        actor_rollout_ref.model.enable_activation_offload
        actor_rollout_ref.model.fused_kernel_options.impl_backend
        actor_rollout_ref.rollout.name actor_rollout_ref.rollout.mode
        actor_rollout_ref.rollout.nnodes actor_rollout_ref.rollout.n_gpus_per_node
        actor_rollout_ref.rollout.log_prob_use_dynamic_bsz
        actor_rollout_ref.rollout.log_prob_micro_batch_size
        actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu
        actor_rollout_ref.rollout.calculate_log_probs actor_rollout_ref.rollout.free_cache_engine
        actor_rollout_ref.rollout.enable_chunked_prefill
        actor_rollout_ref.rollout.enable_prefix_caching
        actor_rollout_ref.rollout.disable_log_stats actor_rollout_ref.rollout.load_format
        actor_rollout_ref.rollout.layered_summon actor_rollout_ref.rollout.multi_stage_wake_up
        actor_rollout_ref.rollout.data_parallel_size actor_rollout_ref.rollout.expert_parallel_size
        actor_rollout_ref.rollout.pipeline_model_parallel_size
        actor_rollout_ref.rollout.agent.num_workers
        actor_rollout_ref.rollout.checkpoint_engine.backend
        actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes
        actor_rollout_ref.rollout.prometheus.** actor_rollout_ref.rollout.trace.**
        actor_rollout_ref.*.profiler.** global_profiler.** ray_kwargs.** transfer_queue.**
        rollout.nnodes rollout.n_gpus_per_node
        data.dataloader_num_workers data.filter_overlong_prompts_workers data.use_shm
        data.val_batch_size reward.num_workers
    """,
    "trl": """
        output_dir run_name project trackio_space_id report_to push_to_hub hub_model_id
        logging_steps logging_strategy logging_first_step log_completions num_completions_to_print
        save_strategy bf16 tf32 fp16 dataloader_num_workers dataloader_pin_memory ddp_timeout
        deepspeed fsdp fsdp_config use_liger_kernel gradient_checkpointing_kwargs
        per_device_eval_batch_size resume_from_checkpoint vllm_mode vllm_server_base_url
        vllm_server_host vllm_server_port vllm_server_timeout request_timeout config config_file
        vllm_enable_sleep_mode torch_compile attn_implementation
    """,
    "openrlhf": """
        ckpt.output_dir ckpt.path ckpt.save_hf ckpt.load_enable ckpt.disable_ds ckpt.max_mem
        logger.logging_steps logger.tensorboard_dir logger.wandb.key logger.wandb.org
        logger.wandb.group logger.wandb.run_name train.micro_batch_size rollout.micro_batch_size
        rollout.max_tokens_per_gpu train.dynamic_batch_enable train.colocate_all
        train.colocate_actor_ref train.colocate_all_models ref.num_nodes ref.num_gpus_per_node
        actor.num_nodes actor.num_gpus_per_node reward.num_nodes reward.num_gpus_per_node
        critic.num_nodes critic.num_gpus_per_node vllm.sync_backend vllm.sync_with_ray
        vllm.enable_sleep vllm.enable_prefix_caching ds.enable_sleep ds.packing_samples
        ds.adam_offload ds.attn_implementation ds.ring_attn_size ds.ring_attn_head_stride
        ds.overlap_comm ds.use_liger_kernel ds.param_dtype
        save_path ckpt_path load_checkpoint micro_train_batch_size micro_rollout_batch_size
        packing_samples bf16 flash_attn adam_offload colocate_all_models colocate_actor_ref
        vllm_sync_backend vllm_enable_sleep deepspeed_enable_sleep use_wandb wandb_run_name
        actor_num_nodes actor_num_gpus_per_node ref_num_nodes ref_num_gpus_per_node
        reward_num_nodes reward_num_gpus_per_node critic_num_nodes critic_num_gpus_per_node
        logging_steps use_tensorboard gradient_checkpointing_use_reentrant save_hf_ckpt address
        runtime_env_json
    """,
    "skyrl": """
        trainer.logger trainer.run_name trainer.export_path trainer.ckpt_path trainer.log_path
        trainer.resume_mode trainer.resume_path trainer.hf_save_interval trainer.strategy
        trainer.flash_attn trainer.use_sample_packing trainer.remove_microbatch_padding
        trainer.micro_forward_batch_size_per_gpu trainer.micro_train_batch_size_per_gpu
        trainer.eval_batch_size trainer.dump_data_batch trainer.dump_eval_results
        trainer.placement.** trainer.policy.sequence_parallel_size
        trainer.ref.sequence_parallel_size
        trainer.policy.torch_profiler_config.** trainer.policy.record_memory
        trainer.policy.optimizer_config.offload_after_step
        generator.batched generator.inference_engine.backend
        generator.inference_engine.run_engines_locally
        generator.inference_engine.weight_sync_backend
        generator.inference_engine.data_parallel_size
        generator.inference_engine.expert_parallel_size
        generator.inference_engine.enable_prefix_caching
        generator.inference_engine.distributed_executor_backend
        generator.inference_engine.served_model_name isolated extra
    """,
    "prime_rl": """
        output_dir run.name resume resume.step ckpt ckpt.skip_optimizer ckpt.skip_scheduler
        trainer.ckpt.skip_optimizer deployment.** monitors.prime monitors.wandb.name log.level clean
        slurm.** env_vars.** inference inference.deployment.** inference.env_vars.**
        inference.kv_cache_offload.** inference.vllm.data_parallel_size
        inference.vllm.enable_expert_parallel inference.vllm.enable_prefix_caching
        inference.vllm.safetensors_load_strategy trainer.model.compile trainer.model.attn
        trainer.model.ac trainer.model.ac.freq trainer.model.ac_offloading.** trainer.model.ep
        trainer.model.cp trainer.model.full_offload trainer.model.optim_cpu_offload
        dist_timeout_seconds trainer.dist_timeout_seconds weight_broadcast.port
        weight_broadcast.timeout weight_broadcast.type orchestrator.renderer.name
    """,
}


def _families(source: Source) -> list[str]:
    """Names of the parts of trainers that shard, one for each role."""
    if source == "verl":
        roles = [f"actor_rollout_ref.{role}" for role in ("actor", "ref")]
        return [f"{r}.fsdp_config.{n}" for r in roles for n in _FSDP.split()] + [
            f"{r}.megatron.{n}" for r in roles for n in _MEGATRON.split()
        ]
    if source == "skyrl":
        roles = [f"trainer.{role}" for role in ("policy", "ref")]
        return [f"{r}.fsdp_config.{n}" for r in roles for n in _FSDP.split()] + [
            f"{r}.megatron_config.{n}" for r in roles for n in _MEGATRON.split()
        ]
    return []


def _pattern(name: str) -> str:
    """A name as a regular expression."""
    return re.escape(name).replace(r"\*\*", ".+").replace(r"\*", "[^.]+")


_HARMLESS: Mapping[Source, re.Pattern[str]] = {
    source: re.compile("|".join(map(_pattern, [*names.split(), *_families(source)])))
    for source, names in NAMES.items()
}


def harmless(source: Source, key: str) -> bool:
    """True if a setting changes nothing that is learned."""
    return not DANGER.search(key) and _HARMLESS[source].fullmatch(key) is not None
