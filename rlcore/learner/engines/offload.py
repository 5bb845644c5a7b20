"""DeepSpeed's offload at ZeRO-3: AdamW's masters and moments in host memory or on NVMe, where the
step is then computed, and the parameters in host memory.

Stages 1 and 2 are refused (`OffloadSpec`): there DeepSpeed 0.19 keeps offloaded gradients in the
model's dtype from one micro-batch to the next (`accumulated_grads_in_cpu` in stage_1_and_2.py),
which loses small ones in bfloat16. Stage 3 adds them up in float32.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from rlcore.errors import UserError
from rlcore.learner.specs import LearnerSpec

_PREFIX = "rlcore-swap-"
_LOCK = "in_use"
_locks: list[int] = []  # descriptors that hold this process's folders until it ends


def offload_config(spec: LearnerSpec) -> dict[str, dict[str, Any]]:
    """Entries of DeepSpeed's `zero_optimization`; of NVMe without its folder."""
    offload = spec.offload
    pinned = offload.pin_memory and spec.num_gpus > 0  # there is no faster copy to a CPU
    found: dict[str, dict[str, Any]] = {}
    if offload.optimizer != "none":
        found["offload_optimizer"] = {"device": offload.optimizer, "pin_memory": pinned}
    if offload.parameters != "none":
        found["offload_param"] = {"device": offload.parameters, "pin_memory": pinned}
    return found


def swap_folder(parent: Path) -> str:
    """A new folder for this process's files; those of processes that have died are removed.

    DeepSpeed names its files by rank alone, and leaves them. Raises UserError if it has no
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
