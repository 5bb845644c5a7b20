"""DeepSpeed's configuration of a learner's settings."""

from __future__ import annotations

from typing import Any

from rlcore.learner.engines.offload import offload_config
from rlcore.learner.specs import LearnerSpec


def deepspeed_config(spec: LearnerSpec) -> dict[str, Any]:
    """Without what depends on the model."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        # not used for accumulation: see `deepspeed.py`
        "gradient_accumulation_steps": 1,
        # between experts on other ranks its norm would be wrong: see `expert_parts.py`
        "gradient_clipping": 0.0 if spec.expert_parallel > 1 else spec.grad_clip,
        "steps_per_print": 2**31,
        "optimizer": {
            "type": "AdamW",
            "params": {
                # torch's AdamW: no C++ build, and the same arithmetic on CPU and GPU
                "torch_adam": True,
                # one kernel for all weights, where there is one: GPUs
                "fused": spec.num_gpus > 0,
                "lr": spec.lr,
                "betas": list(spec.betas),
                "weight_decay": spec.weight_decay,
            },
        },
        "zero_optimization": {
            "stage": spec.zero_stage,
            "overlap_comm": False,
            "contiguous_gradients": True,
            **offload_config(spec),
        },
    }
    if spec.compute_dtype == "bfloat16":
        # sums of many micro-batches in bfloat16 would lose the small ones
        config["bf16"] = {"enabled": True}
        config["data_types"] = {"grad_accum_dtype": "fp32"}
        config["communication_data_type"] = "fp32"
    return config
