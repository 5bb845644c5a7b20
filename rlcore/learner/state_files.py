"""Learner state on disk: safetensors files and a JSON index, without pickle.

Every rank writes the part of each tensor that it holds, flattened, and the index says which entries
are where. A state of four ranks at ZeRO-3 opens on one rank at ZeRO-1 as well, and each rank reads
only what it holds there. `join_state` makes a state of whole tensors of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlcore.errors import StageError
from rlcore.files import follow_umask, replace_file
from rlcore.learner.ranks import gather_objects, is_first_rank

INDEX = "learner.json"
SHARD_BYTES = 2**31
Write = Callable[[], object]  # one job of writing state to disk
Schedule = Callable[[Write], object]  # runs such a job, now or behind training


class Part(NamedTuple):
    """Entries of a tensor that one rank holds. Example: Part(12, (4, 6), torch.zeros(12)), the
    second half of a [4, 6]."""

    start: int  # of the flattened tensor
    shape: tuple[int, ...]  # of the whole tensor
    values: Tensor  # [n]

    @classmethod
    def whole(cls, tensor: Tensor) -> Part:
        """All entries of a tensor, in place where it is contiguous."""
        return cls(0, tuple(tensor.shape), tensor.detach().flatten())


@dataclass(frozen=True, slots=True)
class Listing:
    """The tensors that one rank has written, by name."""

    shapes: dict[str, list[int]]  # of whole tensors
    files: dict[str, dict[str, tuple[int, int]]]  # file -> first entry held and the one after


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    save_file(tensors, str(path))
    follow_umask(path)


class StateWriter:
    """Collects one rank's parts and flushes a file whenever `SHARD_BYTES` are held.

    `run` receives the writing of each file as a job, to be done in order: at once by default, or in
    a thread; nothing else touches the disk. A state that is written in a thread is held in memory
    until it is on disk.
    """

    def __init__(
        self, folder: Path, run: Schedule = lambda write: write(), *, rank: int = 0
    ) -> None:
        self.folder = folder
        self._run = run
        self._rank = rank
        run(partial(folder.mkdir, parents=True, exist_ok=True))
        self._held: dict[str, Tensor] = {}
        self._places: dict[str, tuple[int, int]] = {}
        self._bytes = 0
        self._listing = Listing({}, {})

    def add(self, name: str, part: Part) -> None:
        """Keep a part for the current file: its tensor, which must not change until it is
        written."""
        self._listing.shapes[name] = list(part.shape)
        self._held[name] = part.values.contiguous()
        self._places[name] = (part.start, part.start + part.values.numel())
        self._bytes += part.values.numel() * part.values.element_size()
        if self._bytes >= SHARD_BYTES:
            self._flush()

    def _flush(self) -> None:
        if not self._held:
            return
        file = f"learner-{self._rank:05d}-{len(self._listing.files):05d}.safetensors"
        self._run(partial(_save, self._held, self.folder / file))
        self._listing.files[file] = self._places
        self._held = {}
        self._places = {}
        self._bytes = 0

    def finish(self) -> Listing:
        """Write the last file; returns what all files hold."""
        self._flush()
        return self._listing

    def close(self, listings: Sequence[Listing], **facts: int | str) -> None:
        """Write the index that makes the state readable, of what all ranks have written."""
        shapes: dict[str, list[int]] = {}
        files: dict[str, dict[str, tuple[int, int]]] = {}
        for listing in listings:
            shapes |= listing.shapes
            files |= listing.files
        text = json.dumps({**facts, "shapes": shapes, "files": files})
        # last, and whole: a folder without it holds no state
        self._run(partial(replace_file, self.folder / INDEX, text))


def read_index(folder: Path) -> dict[str, Any]:
    """The facts that `StateWriter.close` was given.

    Raises FileNotFoundError for a folder without a finished state.
    """
    return dict(json.loads((folder / INDEX).read_text()))


class _Piece(NamedTuple):
    """Entries of a flattened tensor, in an open safetensors file."""

    start: int
    stop: int
    slice: Any


class StoredTensor:
    """One tensor of a state, of which only the entries asked for are read."""

    def __init__(self, shape: Sequence[int], pieces: Sequence[_Piece]) -> None:
        """`pieces`: in order."""
        self.shape = tuple(shape)
        self._pieces = pieces

    def part(self, start: int, stop: int) -> Tensor:
        """[stop - start]: these entries of the flattened tensor."""
        found = [
            piece.slice[max(start, piece.start) - piece.start : min(stop, piece.stop) - piece.start]
            for piece in self._pieces
            if piece.start < stop and piece.stop > start
        ]
        if not found:
            return torch.empty(0)
        return found[0] if len(found) == 1 else torch.cat(found)

    def whole(self) -> Tensor:
        """The tensor in its shape."""
        return self.part(0, math.prod(self.shape)).reshape(self.shape)


class HeldTensor:
    """A `Source` whose tensor is in memory."""

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


@contextmanager
def open_state(folder: Path) -> Iterator[dict[str, StoredTensor]]:
    """The tensors of a state by name, readable until it is closed.

    Raises StageError if entries are missing, FileNotFoundError for a missing file.
    """
    index = read_index(folder)
    if "files" not in index:
        raise StageError(
            f"learner state in {folder} was written by an earlier version, as whole tensors: "
            "continue it with that version, or export its model and start from that"
        )
    with ExitStack() as stack:
        pieces: dict[str, list[_Piece]] = {name: [] for name in index["shapes"]}
        for name, held in index["files"].items():
            file = stack.enter_context(safe_open(str(folder / name), framework="pt"))
            for label, (start, stop) in held.items():
                pieces[label].append(_Piece(start, stop, file.get_slice(label)))
        ordered = {label: sorted(found, key=itemgetter(0)) for label, found in pieces.items()}
        for label, shape in index["shapes"].items():
            _refuse_gaps(folder, label, math.prod(shape), ordered[label])
        yield {
            label: StoredTensor(shape, ordered[label]) for label, shape in index["shapes"].items()
        }


def _refuse_gaps(folder: Path, name: str, entries: int, pieces: Sequence[_Piece]) -> None:
    at = 0
    for piece in pieces:
        if piece.start != at:
            break
        at = piece.stop
    if at != entries:
        raise StageError(f"learner state in {folder} lacks entries of {name} from {at} on")


def join_state(folder: Path, out: Path) -> None:
    """Write the state of `folder` to `out` with whole tensors, one in memory at a time, besides the
    file of `SHARD_BYTES` that is being collected."""
    writer = StateWriter(out)
    with open_state(folder) as sources:
        for name, source in sources.items():
            writer.add(name, Part.whole(source.whole()))
    facts = {k: v for k, v in read_index(folder).items() if k not in ("shapes", "files")}
    writer.close([writer.finish()], **facts)


def write_parts(
    folder: Path,
    parts: Mapping[str, Part | None],
    run: Schedule | None = None,
    **facts: int | str,
) -> None:
    """Have every rank write its parts by name, and rank 0 the index. Collective.

    `run` schedules the writing of each rank's files, so that the index may be there before the
    files of other ranks are; without it all is written on return. `parts` must not change until
    they are written.
    """
    writer = StateWriter(folder, *([run] if run else []), rank=dist.get_rank())
    for name, part in parts.items():
        if part is not None:
            writer.add(name, part)
    listings = gather_objects(writer.finish())
    if is_first_rank():
        writer.close(listings, **facts)
    if run is None:
        dist.barrier()  # the index is there for all
