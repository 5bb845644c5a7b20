"""Weights and Adam moments in and out of DeepSpeed's ZeRO optimizers, whole tensors at a time.

DeepSpeed keeps float32 masters and moments in flat partitions whose names differ from stage to
stage. Stage 0 has none: there the model's parameters are the masters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlcore.errors import StageError
from rlcore.learner.protocols import Schedule
from rlcore.learner.state_files import HeldTensor, Source, StateWriter, read_index, stored

ADAM_STATES = ("exp_avg", "exp_avg_sq")
# what the flat masters are called at stages 1 and 2 (both data types) and 3
_FLAT_MASTERS = (
    "fp32_groups_flat_partition",
    "single_partition_of_fp32_groups",
    "fp32_partitioned_groups_flat",
)


class ZeroState:
    """The state of one optimizer. Every method is collective.

    `trained`: what it trains, by parameter name. A key is "weight" (the float32 master) or one of
    ADAM_STATES.
    """

    def __init__(self, optimizer: Any, stage: int, trained: Mapping[str, nn.Parameter]) -> None:
        self._optimizer = optimizer
        self._stage = stage
        self._trained = trained

    # ----- whole states -----

    def save(self, folder: Path, optimizer_steps: int, run: Schedule | None) -> None:
        """Write weights, moments and the step count from rank 0; `run` schedules the writing.

        The learning rate is a function of the step and torch's generator is seeded by it, so
        neither has a state.
        """
        writer = StateWriter(folder, *([run] if run else [])) if dist.get_rank() == 0 else None
        if optimizer_steps:
            self._link_moments()
        for label, (p, key) in self._tensors(optimizer_steps).items():
            whole = self._read(p, key)
            if writer is not None:
                writer.add(label, whole)
        if writer is not None:
            writer.close(optimizer_steps=optimizer_steps)
        # no rank goes on to change weights before rank 0 has copied them
        dist.barrier()

    def load(self, folder: Path) -> int:
        """Take over what `save` wrote at any stage and number of ranks; its step count.

        Raises StageError if names or shapes do not match.
        """
        optimizer_steps = int(read_index(folder)["optimizer_steps"])
        expected = self._tensors(optimizer_steps)
        self._make_moments(optimizer_steps)
        for label, source in stored(folder):
            p, key = expected.pop(label, (None, ""))
            if p is None or source.shape != tuple(_whole_shape(p)):
                raise StageError(
                    f"learner state in {folder} does not fit the model: {label} {source.shape}"
                )
            self._write(p, key, source)
        if expected:
            raise StageError(
                f"learner state in {folder} lacks {len(expected)} tensors, e.g. {min(expected)}"
            )
        self._publish_masters()
        return optimizer_steps

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every (parameter name, whole float32 CPU copy)."""
        for name, p in self._trained.items():
            yield name, self._read(p, "weight").to("cpu", torch.float32, copy=True)

    def replace_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the weights, leaving moments and steps. Raises StageError for other names."""
        if set(tensors) != set(self._trained):
            raise StageError(
                f"weights do not fit the model: {sorted(set(tensors) ^ set(self._trained))[:3]}"
            )
        for name, tensor in tensors.items():
            self._write(self._trained[name], "weight", HeldTensor(tensor))
        self._publish_masters()

    def _tensors(self, optimizer_steps: int) -> dict[str, tuple[nn.Parameter, str]]:
        """Name in a saved state -> (parameter, key), in the order of the file."""
        keys = ("weight", *ADAM_STATES) if optimizer_steps else ("weight",)
        return {f"{key}:{name}": (p, key) for name, p in self._trained.items() for key in keys}

    # ----- single tensors -----

    def _read(self, p: nn.Parameter, key: str) -> Tensor:
        """The whole tensor of a parameter, in its shape."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        if self._stage == 0:
            stored = p.detach() if key == "weight" else self._optimizer.state[p][key]
        elif key == "weight":
            stored = safe_get_full_fp32_param(p)
        else:
            stored = safe_get_full_optimizer_state(p, key)
        return stored.reshape(_whole_shape(p))

    def _write(self, p: nn.Parameter, key: str, value: Source) -> None:
        """Replace the whole tensor of a parameter, of which this rank reads what it holds;
        `_publish_masters` then updates the model."""
        if self._stage == 0:
            mine = p.data if key == "weight" else self._optimizer.state[p][key]
            mine.copy_(value.whole())
        elif self._stage == 3:
            # DeepSpeed's own setter fails on a parameter that the ranks do not divide evenly
            part = self._optimizer.get_local_fp32_param(p, None if key == "weight" else key)
            start = dist.get_rank() * part.numel()
            # the last rank's partition may be padded beyond the parameter's end
            stop = min(start + part.numel(), _whole_shape(p).numel())
            if start < stop:
                part.data[: stop - start].copy_(value.part(start, stop))
        elif (
            fragment := getattr(p, "_hp_mapping", None)
        ) is not None:  # this rank holds some of it
            at = fragment.lp_fragment_address
            mine = fragment.get_hp_fragment(None if key == "weight" else key)
            mine.data.copy_(value.part(at.start, at.start + at.numel))

    def _make_moments(self, optimizer_steps: int) -> None:
        """Create zero moments: Adam does so at its first step, a loaded state needs them before.

        After 0 steps there are none.
        """
        inner = self._optimizer if self._stage == 0 else self._optimizer.optimizer
        if not optimizer_steps:
            inner.state.clear()
            return
        for flat in self._flat_masters():
            moments = {key: torch.zeros_like(flat) for key in ADAM_STATES}
            inner.state[flat] = {"step": torch.tensor(float(optimizer_steps)), **moments}
        self._link_moments()

    def _link_moments(self) -> None:
        """Let DeepSpeed find the moments of each parameter.

        It does so itself after the first step of its first parameter group, when the second group
        has no states yet.
        """
        if self._stage in (1, 2):
            self._optimizer._hp_optimizer_states_linked = False
            self._optimizer._lazy_init_hp_params_optimizer_state()

    def _flat_masters(self) -> list[Tensor]:
        """The tensors that torch's AdamW holds states for."""
        if self._stage == 0:
            return list(self._trained.values())
        for attribute in _FLAT_MASTERS:
            if hasattr(self._optimizer, attribute):
                return list(getattr(self._optimizer, attribute))
        raise StageError(
            f"unknown DeepSpeed optimizer {type(self._optimizer).__name__} at ZeRO stage "
            f"{self._stage}"
        )

    def _publish_masters(self) -> None:
        """Set the model's weights to the float32 masters."""
        if self._stage in (1, 2):
            self._optimizer.update_lp_params()
        elif self._stage == 3:
            optimizer = self._optimizer
            for i, master in enumerate(optimizer.fp32_partitioned_groups_flat):
                optimizer.fp16_partitioned_groups_flat[i].data.copy_(master.data)
                optimizer._unflatten_partitioned_parameters(i)
            # small parameters are kept whole on every rank: gather them again
            if persistent := optimizer.persistent_parameters:
                persistent[0].partition(persistent)
                persistent[0].all_gather(persistent)


def _whole_shape(p: nn.Parameter) -> torch.Size:
    """Shape of a parameter, also of one that ZeRO-3 has partitioned."""
    return getattr(p, "ds_shape", p.shape)
