"""Learner state on disk: safetensors shards and a JSON index, without pickle.

The files hold whole float32 tensors under Hugging Face names, so a state saved by four ranks at
ZeRO-3 opens on one rank at ZeRO-1 as well. Tensors are written and read one by one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlcore.files import replace_file
from rlcore.learner.protocols import Schedule, Write

INDEX = "learner.json"
SHARD_BYTES = 2**31


def _now(write: Write) -> None:
    write()


class StateWriter:
    """Collects tensors and flushes a shard whenever `SHARD_BYTES` are held. Call `close` to write
    the index.

    `run` receives the writing of each file as a job, to be done in order: at once by default, or in
    a thread. The tensors are copies on the CPU, so a state that is written in a thread is held in
    memory until it is on disk.
    """

    def __init__(self, folder: Path, run: Schedule = _now) -> None:
        self.folder = folder
        self._run = run
        folder.mkdir(parents=True, exist_ok=True)
        self._held: dict[str, Tensor] = {}
        self._bytes = 0
        self._shards: list[str] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Keep a CPU copy of `tensor` for the current shard."""
        self._held[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._bytes += tensor.numel() * tensor.element_size()
        if self._bytes >= SHARD_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._held:
            self._shards.append(f"learner-{len(self._shards):05d}.safetensors")
            self._run(partial(save_file, self._held, str(self.folder / self._shards[-1])))
            self._held, self._bytes = {}, 0

    def close(self, **facts: int | str) -> None:
        """Write what remains, then the index that makes the state readable."""
        self._flush()
        text = json.dumps({"shards": self._shards, **facts}, indent=1)
        # last, and whole: a folder without it holds no state
        self._run(partial(replace_file, self.folder / INDEX, text))


def read_index(folder: Path) -> dict:
    """Facts given to `StateWriter.close`.

    Raises FileNotFoundError for a folder without a finished state.
    """
    return json.loads((folder / INDEX).read_text())


def read_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every (name, CPU tensor) in the order in which it was written, one in memory at a time."""
    for shard in read_index(folder)["shards"]:
        with safe_open(str(folder / shard), framework="pt") as f:
            for name in f.keys():  # noqa: SIM118 (not a dict)
                yield name, f.get_tensor(name)
