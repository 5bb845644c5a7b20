"""Which of a model's parameters decay."""

from __future__ import annotations

from typing import Any

from torch import nn

from rlcore.learner.specs import LearnerSpec


def parameter_groups(policy: nn.Module, spec: LearnerSpec) -> list[dict[str, Any]]:
    """Matrices decay, vectors (norms, biases) do not."""
    params = [p for p in policy.parameters() if p.requires_grad]
    # a parameter that ZeRO-3 has divided has one dimension itself
    matrices = [p for p in params if len(getattr(p, "ds_shape", p.shape)) >= 2]
    vectors = [p for p in params if len(getattr(p, "ds_shape", p.shape)) < 2]
    groups = [
        {"params": matrices, "weight_decay": spec.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    if spec.expert_parallel > 1:  # DeepSpeed makes groups of experts of them, by name
        groups = [{"name": name, **g} for name, g in zip(("matrices", "vectors"), groups)]
    return [g for g in groups if g["params"]]
