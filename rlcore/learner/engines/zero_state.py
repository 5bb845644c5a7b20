"""Weights and Adam moments in and out of DeepSpeed's ZeRO optimizers, one tensor at a time.

DeepSpeed keeps float32 masters and moments in flat partitions whose names differ from stage to
stage. Stage 0 has none: there the model's parameters are the masters, and the ranks, which all hold
them, divide the writing.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlcore.errors import StageError, UserError
from rlcore.learner.engines.deepspeed_patches import MOMENTS_LINKED
from rlcore.learner.specs import LearnerSpec
from rlcore.learner.state_files import (
    HeldTensor,
    Part,
    Schedule,
    Source,
    open_state,
    read_index,
    write_parts,
)
from rlcore.weights.storages import EmptiedStorages

# what they are called at stages 1 and 2 (both data types) and 3
_FLAT_MASTERS = (
    "fp32_groups_flat_partition",
    "single_partition_of_fp32_groups",
    "fp32_partitioned_groups_flat",
)


class ModelParts(Protocol):
    """The parameters that are split over ranks, and their whole tensors. Methods that make whole
    tensors are collective."""

    #: of torch's: the ranks that hold all parts of a tensor together
    group: Any

    def shape(self, p: Tensor) -> torch.Size:
        """Of the whole parameter."""

    def whole(self, p: Tensor, read: Callable[[Any], Tensor]) -> Tensor:
        """The whole tensor of a parameter: all ranks' parts, each given by `read` for the part
        held."""

    def own(self, p: nn.Parameter, whole: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
        """(parameter held here, its part of a whole tensor)."""

    def squares(self, pairs: Iterator[tuple[Tensor, Tensor]], *, all_held: bool) -> Tensor:
        """Sum of squares of gradients (parameter, gradient), such that the sum over ranks counts
        every entry once. That sum is over the ranks of `group` if `all_held`, where a rank has
        whole gradients of its parameters. It is over all ranks where ZeRO has divided them."""


def whole_shape(p: nn.Parameter) -> torch.Size:
    """Shape of a parameter, also of one that ZeRO-3 has partitioned."""
    return getattr(p, "ds_shape", p.shape)


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


_PREFIX = "rlcore-swap-"
_LOCK = "in_use"
_locks: list[int] = []  # descriptors that hold this process's folders until it ends


# DeepSpeed's offload at ZeRO-3: AdamW's masters and moments in host memory or on NVMe, where the
# step is then computed, and the parameters in host memory.
#
# Stages 1 and 2 are refused (`OffloadSpec`): there DeepSpeed 0.19 keeps offloaded gradients in the
# model's dtype from one micro-batch to the next (`accumulated_grads_in_cpu` in stage_1_and_2.py),
# which loses small ones in bfloat16. Stage 3 adds them up in float32.


def offload_config(spec: LearnerSpec) -> dict[str, dict[str, Any]]:
    """Entries of DeepSpeed's `zero_optimization`; for NVMe without the folder."""
    offload = spec.offload
    pinned = offload.pin_memory and spec.num_gpus > 0  # there is no faster copy to a CPU
    found: dict[str, dict[str, Any]] = {}
    if offload.optimizer != "none":
        found["offload_optimizer"] = {"device": offload.optimizer, "pin_memory": pinned}
    if offload.parameters != "none":
        found["offload_param"] = {"device": offload.parameters, "pin_memory": pinned}
    return found


def swap_folder(parent: Path) -> str:
    """A new folder for this process's files; folders of processes that have died are removed.
    DeepSpeed names its files by rank alone and leaves them behind. Raises UserError if it has no
    asynchronous file access here.
    """
    _refuse_without_aio()
    parent.mkdir(parents=True, exist_ok=True)
    for old in parent.glob(f"{_PREFIX}*"):
        held = _lock(old)
        if held is not None:
            shutil.rmtree(old, ignore_errors=True)
            os.close(held)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    (folder / _LOCK).touch()
    held = _lock(folder)
    assert held is not None
    _locks.append(held)
    return str(folder)


def _lock(folder: Path) -> int | None:
    """A descriptor that locks the folder, which the kernel undoes when the process ends; None if it
    is locked, or another process is about to lock it."""
    try:
        descriptor = os.open(folder / _LOCK, os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _refuse_without_aio() -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible():
        raise UserError(
            "learner.offload.optimizer=nvme needs libaio with its headers (package libaio-dev) and "
            "a C++ compiler on every learner node: install them, or choose cpu or none."
        )
    cards = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
    read = all(re.fullmatch(r"\d+\.\d+(\+PTX)?", card) for card in re.findall(r"[^;\s]+", cards))
    if torch.cuda.is_available() and not read:
        raise UserError(
            f"TORCH_CUDA_ARCH_LIST={cards} cannot be combined with learner.offload.optimizer=nvme: "
            "DeepSpeed, which compiles for it, reads numbers alone, such as 9.0 or 9.0+PTX. Set "
            "them on every learner node, or choose cpu or none."
        )


ADAM_STATES = ("exp_avg", "exp_avg_sq")


class ZeroState:
    """The state of one optimizer. Every method is collective. `trained`: its parameters by name. A
    key is "weight" (the float32 master) or one of ADAM_STATES.
    """

    def __init__(
        self,
        optimizer: Any,
        stage: int,
        trained: Mapping[str, nn.Parameter],
        parts: ModelParts | None = None,
    ) -> None:
        """`parts`: says which of them are parts of larger parameters, whose whole tensors are
        saved."""
        self._parts = parts
        self._optimizer = optimizer
        self._stage = stage
        self._trained = trained
        self._parked: EmptiedStorages | None = None
        self._host: dict[int, Tensor] = {}  # host memory of what was parked before
        # what `_held` gave before that: no view of an empty storage can be made
        self._parked_views: dict[tuple[nn.Parameter, str], tuple[int, Tensor] | None] = {}

    # ----- memory -----

    def park(self) -> int:
        """Move the memory of masters, moments and buffers of gradients to the host, and return its
        bytes. The tensors stay valid and can be saved. Not collective."""
        if self._parked is None:
            inner = self._optimizer if self._stage == 0 else self._optimizer.optimizer
            keys = ("weight", *ADAM_STATES) if inner.state else ("weight",)
            if inner.state:
                self._link_moments()
            self._parked_views = {
                (p, key): self._held(p, key) for p in self._trained.values() for key in keys
            }
            self._parked = EmptiedStorages(self._parkable(), keep=True, copies=self._host)
        return self._parked.size

    def unpark(self) -> None:
        """Move them back to the device, if they are on the host."""
        if self._parked is not None:
            self._parked.restore()
            self._parked = None
            self._parked_views = {}

    def _parkable(self) -> Iterator[Tensor]:
        inner = self._optimizer if self._stage == 0 else self._optimizer.optimizer
        for state in inner.state.values():
            yield from (state[key] for key in ADAM_STATES if key in state)
        if self._stage:  # there the masters are not the weights that are published
            yield from flat_masters(self._optimizer, self._stage)
            yield from getattr(self._optimizer, "fp32_groups_gradients_flat", ())
            buffer = getattr(self._optimizer, "grad_partitions_flat_buffer", None)
            yield from () if buffer is None else (buffer,)

    # ----- states -----

    def save(
        self, folder: Path, optimizer_steps: int, run: Schedule | None, *, held: int = 0
    ) -> None:
        """Write this rank's part of weights and moments, and the step count, also of parts that had
        no update; `run` schedules the writing.

        The learning rate is a function of the step and torch's generator is seeded by it, so
        neither has a state.
        """
        updates = optimizer_steps - held
        if updates and self._parked is None:
            self._link_moments()
        parts: dict[str, Part | None] = {}
        for group, own in self._groups():
            with self._in_memory(group):
                tensors = self._tensors(own, updates)
                parts |= {label: self._part(p, key) for label, (p, key) in tensors.items()}
        write_parts(folder, parts, run, optimizer_steps=optimizer_steps, held_steps=held)

    def load(self, folder: Path) -> tuple[int, int]:
        """Load what `save` wrote at any stage and number of ranks; returns its step count, and the
        held ones of them.

        Raises StageError if names or shapes do not match.
        """
        index = read_index(folder)
        optimizer_steps, held = int(index["optimizer_steps"]), int(index.get("held_steps", 0))
        updates = optimizer_steps - held
        with open_state(folder) as sources:
            self._refuse_other(folder, sources, self._tensors(self._trained, updates))
            for group, own in self._groups():
                with self._in_memory(group, changed=True):
                    self._make_moments(group, updates)
                    for label, (p, key) in self._tensors(own, updates).items():
                        self._write(p, key, sources[label])
        self._publish_masters()
        return optimizer_steps, held

    def _refuse_other(
        self,
        folder: Path,
        sources: Mapping[str, Source],
        expected: Mapping[str, tuple[nn.Parameter, str]],
    ) -> None:
        for label, source in sources.items():
            p, _ = expected.get(label, (None, ""))
            if p is None or source.shape != tuple(self._shape(p)):
                raise StageError(
                    f"learner state in {folder} does not fit the model: {label} {source.shape}"
                )
        if lacking := expected.keys() - sources.keys():
            raise StageError(
                f"learner state in {folder} lacks {len(lacking)} tensors, e.g. {min(lacking)}"
            )

    def weights(self, *, wanted: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Every (parameter name, whole float32 CPU copy); nothing on ranks where they are not
        `wanted`."""
        for group, held in self._groups():
            with self._in_memory(group):
                for name, p in held.items():
                    whole = self._read(p)
                    if wanted:
                        yield name, whole.to("cpu", torch.float32, copy=True)

    def held_weights(self) -> dict[str, Part]:
        """This rank's part of every weight by parameter name, float32 copies on the CPU."""
        found: dict[str, Part | None] = {}
        for group, held in self._groups():
            with self._in_memory(group):
                found |= {name: self._part(p, "weight") for name, p in held.items()}
        return {name: part for name, part in found.items() if part is not None}

    def replace_weights(self, sources: Mapping[str, Source]) -> None:
        """Replace the weights, leaving moments and steps. Raises StageError for other names."""
        if set(sources) != set(self._trained):
            raise StageError(
                f"weights do not fit the model: {sorted(set(sources) ^ set(self._trained))[:3]}"
            )
        for group, held in self._groups():
            with self._in_memory(group, changed=True):
                for name, p in held.items():
                    self._write(p, "weight", sources[name])
        self._publish_masters()

    def _tensors(
        self, params: Mapping[str, nn.Parameter], updates: int
    ) -> dict[str, tuple[nn.Parameter, str]]:
        """Name in a saved state -> (parameter, key), in the order of the file."""
        keys = ("weight", *ADAM_STATES) if updates else ("weight",)
        return {f"{key}:{name}": (p, key) for name, p in params.items() for key in keys}

    # ----- groups of parameters that are updated together -----

    def _groups(self) -> list[tuple[int, Mapping[str, nn.Parameter]]]:
        """(group, its parameters by name), by ZeRO-3's sub-groups; one group at other stages."""
        if self._stage != 3:
            return [(0, self._trained)]
        groups: dict[int, dict[str, nn.Parameter]] = {}
        for name, p in self._trained.items():
            groups.setdefault(self._place(p)[0], {})[name] = p
        return sorted(groups.items())

    def _place(self, p: nn.Parameter) -> tuple[int, int, int]:
        """(sub-group, first entry in its flat tensors, entries) of a partition of ZeRO-3."""
        found: tuple[int, int, int] = self._optimizer.grad_position[self._optimizer.get_param_id(p)]
        return found

    def _on_disk(self, group: int) -> bool:
        return self._stage == 3 and bool(self._optimizer._swappable_optimizer_subgroup(group))

    @contextmanager
    def _in_memory(self, group: int, *, changed: bool = False) -> Iterator[None]:
        """A context in which masters and moments of the group are in memory. DeepSpeed's own access
        to one tensor would read the whole group for each."""
        if not self._on_disk(group):
            yield
            return
        self._optimizer._optimizer_states_and_gradient_swap_in(group)
        try:
            yield
        finally:
            if changed:
                self._optimizer._optimizer_states_and_gradient_swap_out(group)
            else:
                self._optimizer._release_swap_buffers(group)

    # ----- single tensors -----

    def _shape(self, p: nn.Parameter) -> torch.Size:
        return whole_shape(p) if self._parts is None else self._parts.shape(p)

    def _read(self, p: nn.Parameter, key: str = "weight") -> Tensor:
        """A parameter's whole float32 master or moment, in its shape."""
        if self._parked is not None:
            raise StageError("the learner's masters are on the host while engines sample")
        if self._parts is not None:
            return self._parts.whole(p, lambda piece: self._read_own(piece, key))
        return self._read_own(p, key)

    def _read_own(self, p: nn.Parameter, key: str) -> Tensor:
        """The float32 master or moment of a parameter that this rank holds."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        if self._stage == 0:
            held = p.detach() if key == "weight" else self._optimizer.state[p][key]
        elif self._stage == 3:
            part = self._partition(p, None if key == "weight" else key).detach().to(p.device)
            held = self._optimizer._fp32_state_allgather(p, part)
        elif key == "weight":
            held = safe_get_full_fp32_param(p)
        else:
            held = safe_get_full_optimizer_state(p, key)
        return held.reshape(whole_shape(p))

    def _partition(self, p: nn.Parameter, state: str | None) -> Tensor:
        """[n]: ZeRO-3's partition of a master, or of its `state`, in place."""
        group, start, entries = self._place(p)
        flat = flat_masters(self._optimizer, self._stage)[group]
        whole = flat if state is None else self._optimizer.optimizer.state[flat][state]
        return whole.narrow(0, start, entries)

    def _write(self, p: nn.Parameter, key: str, value: Source) -> None:
        """Replace the whole tensor of a parameter, of which this rank reads its own part;
        `_publish_masters` then updates the model."""
        for piece, own in self._own(p, value):
            held = self._held(piece, key)
            if held is not None:
                start, mine = held
                mine.copy_(own.part(start, start + mine.numel()))

    def _own(self, p: nn.Parameter, value: Source) -> list[tuple[nn.Parameter, Source]]:
        if self._parts is None:
            return [(p, value)]
        return [(piece, HeldTensor(own)) for piece, own in self._parts.own(p, value.whole())]

    def _part(self, p: nn.Parameter, key: str) -> Part | None:
        """Return the part of a tensor that this rank writes: a float32 copy on the CPU. The entries
        of a part of a matrix are not contiguous, so such parts are gathered first."""
        held = self._held(p, key) if self._parts is None else (0, self._read(p, key).flatten())
        if held is None:
            return None
        start, mine = held
        if self._parked is not None:
            mine = self._parked.read(mine)
        if self._stage == 0 or self._parts is not None:
            rank, world = dist.get_rank(), dist.get_world_size()
            start, stop = (mine.numel() * r // world for r in (rank, rank + 1))
            mine = mine[start:stop]
        if not mine.numel():
            return None
        copy = mine.detach().to("cpu", torch.float32, copy=True)
        return Part(start, tuple(self._shape(p)), copy)

    def _held(self, p: nn.Parameter, key: str) -> tuple[int, Tensor] | None:
        """(first entry, entries in place, flat) of this rank's part of a tensor; None without
        one."""
        if self._parked is not None:
            return self._parked_views[p, key]
        state = None if key == "weight" else key
        if self._stage == 0:
            whole = p.data if state is None else self._optimizer.state[p][state]
            return 0, whole.view(-1)
        if self._stage == 3:
            # in place: DeepSpeed's getter copies what is offloaded, and its setter fails on a
            # parameter that the ranks do not divide evenly
            part = self._partition(p, state)
            start = dist.get_rank() * part.numel()
            # the last rank's partition may be padded beyond the parameter's end
            stop = min(start + part.numel(), whole_shape(p).numel())
            return (start, part.data[: stop - start]) if start < stop else None
        fragment = getattr(p, "_hp_mapping", None)
        if fragment is None:
            return None
        return fragment.lp_fragment_address.start, fragment.get_hp_fragment(state).data

    def _make_moments(self, group: int, updates: int) -> None:
        """Create zero moments: Adam creates them at its first update, a loaded state needs them
        before. After 0 updates there are none.
        """
        inner = self._optimizer if self._stage == 0 else self._optimizer.optimizer
        flats = flat_masters(self._optimizer, self._stage)
        for flat in flats[group : group + 1] if self._stage == 3 else flats:
            # DeepSpeed's files on disk belong to the tensors that were there first
            old = inner.state.pop(flat, None) if self._on_disk(group) else None
            inner.state.pop(flat, None)
            if not updates and not old:
                continue
            moments = {k: old[k].zero_() if old else torch.zeros_like(flat) for k in ADAM_STATES}
            # the fused kernel wants the count beside the tensors, others want it on the host
            place = flat.device if inner.defaults.get("fused") else None
            count = torch.tensor(float(updates), device=place)
            inner.state[flat] = {"step": count, **moments}
        if updates:
            self._link_moments()

    def _link_moments(self) -> None:
        """Let DeepSpeed find the moments of each parameter.

        It does so itself after the first step of its first parameter group, when the second group
        has no states yet.
        """
        if self._stage in (1, 2):
            MOMENTS_LINKED.replace(False, of=self._optimizer)
            self._optimizer._lazy_init_hp_params_optimizer_state()

    def _publish_masters(self) -> None:
        """Set the model's weights to the float32 masters."""
        if self._stage in (1, 2):
            self._optimizer.update_lp_params()
        elif self._stage == 3:
            optimizer = self._optimizer
            for i, master in enumerate(optimizer.fp32_partitioned_groups_flat):
                with self._in_memory(i):
                    optimizer.fp16_partitioned_groups_flat[i].data.copy_(master.data)
                optimizer._unflatten_partitioned_parameters(i)
            # small parameters are kept whole on every rank: gather them again
            if persistent := optimizer.persistent_parameters:
                persistent[0].partition(persistent)
                persistent[0].all_gather(persistent)
