"""The float32 tensors that DeepSpeed's optimizers update."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rlcore.errors import StageError

# what they are called at stages 1 and 2 (both data types) and 3
_FLAT_MASTERS = (
    "fp32_groups_flat_partition",
    "single_partition_of_fp32_groups",
    "fp32_partitioned_groups_flat",
)


def flat_masters(optimizer: Any, stage: int) -> list[Tensor]:
    """The tensors that torch's AdamW holds states for; at stage 0 they are the parameters.

    Raises StageError for an optimizer that has none under a known name.
    """
    if stage == 0:
        return [p for group in optimizer.param_groups for p in group["params"]]
    for attribute in _FLAT_MASTERS:
        if hasattr(optimizer, attribute):
            return list(getattr(optimizer, attribute))
    raise StageError(
        f"unknown DeepSpeed optimizer {type(optimizer).__name__} at ZeRO stage {stage}"
    )
