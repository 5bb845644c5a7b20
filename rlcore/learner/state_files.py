"""Learner state on disk: safetensors shards and a JSON index, without pickle.

The files hold whole float32 tensors under Hugging Face names, so a state saved by four ranks at
ZeRO-3 opens on one rank at ZeRO-1 as well. Tensors are written one by one, and each rank reads only
the part of them that it holds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

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
    a thread; nothing else touches the disk. The tensors are copies on the CPU, so a state that is
    written in a thread is held in memory until it is on disk.
    """

    def __init__(self, folder: Path, run: Schedule = _now) -> None:
        self.folder = folder
        self._run = run
        run(partial(folder.mkdir, parents=True, exist_ok=True))
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


class StoredTensor:
    """One tensor of a file, of which only what is asked for is read."""

    def __init__(self, file: Any, name: str) -> None:
        """`file`: an open safetensors file."""
        self._file = file
        self._name = name
        self.shape = tuple(file.get_slice(name).get_shape())

    def part(self, start: int, stop: int) -> Tensor:
        """[stop - start]: these entries of the flattened tensor; reads the rows they are in."""
        if not self.shape:
            return self._file.get_tensor(self._name).flatten()[start:stop]
        row = math.prod(self.shape[1:])
        first, last = start // row, -(-stop // row)
        rows = self._file.get_slice(self._name)[first:last]
        return rows.flatten()[start - first * row : stop - first * row]

    def whole(self) -> Tensor:
        """The tensor in its shape."""
        return self._file.get_tensor(self._name)


class HeldTensor:
    """The same of a tensor in memory."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self.shape = tuple(tensor.shape)

    def part(self, start: int, stop: int) -> Tensor:
        """[stop - start]: these entries of the flattened tensor."""
        return self._tensor.flatten()[start:stop]

    def whole(self) -> Tensor:
        """The tensor in its shape."""
        return self._tensor


Source = StoredTensor | HeldTensor


def stored(folder: Path) -> Iterator[tuple[str, Source]]:
    """Every (name, tensor) of a state in the order in which it was written; use each before the
    next."""
    for shard in read_index(folder)["shards"]:
        with safe_open(str(folder / shard), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                yield name, StoredTensor(file, name)
