"""The buffer on disk: one folder with the state as JSON and the payloads as safetensors.

    state.json              {"format", "version", "checksum", "state"}: checksum of the state's JSON text
    payloads.safetensors    payload uint8 [total], ends int64 [n]: n trajectories of `rlcore.serialization`, end to end

`save` writes a folder beside, flushes it to disk and renames it, so a folder under the final name is whole. `load`
verifies both checksums (BLAKE2b) before anything is believed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays

from rlcore.buffer.store import ReplayBuffer

FORMAT = "rlcore.buffer"
VERSION = 2
STATE, PAYLOADS = "state.json", "payloads.safetensors"


class JournalError(ValueError):
    """A journal that is missing, damaged, or of another format; nothing of it was used."""


def save(directory: str | Path, snapshot: tuple[dict[str, Any], Sequence[bytes]]) -> None:
    """Write `ReplayBuffer.snapshot()` to a folder that must not exist yet. Safe to run in another thread.

    Raises FileExistsError if the folder exists, OSError (a full disk) with nothing under the final name.
    """
    directory = Path(directory)
    if directory.exists():
        raise FileExistsError(f"{directory} already holds a buffer journal")
    state, payloads = snapshot
    beside = directory.with_name(directory.name + ".partial")
    shutil.rmtree(beside, ignore_errors=True)  # what a killed writer left
    beside.mkdir(parents=True)
    ends = np.cumsum([len(p) for p in payloads], dtype=np.int64)
    blob = save_arrays({"payload": np.frombuffer(b"".join(payloads), np.uint8), "ends": ends})
    text = json.dumps({**state, "payloads_checksum": _checksum(blob)}, separators=(",", ":"))
    document = {"format": FORMAT, "version": VERSION, "checksum": _checksum(text.encode()), "state": text}
    _write(beside / PAYLOADS, blob)
    _write(beside / STATE, json.dumps(document).encode())
    _sync_folder(beside)
    os.rename(beside, directory)
    _sync_folder(directory.parent)


def load(directory: str | Path, buffer: ReplayBuffer) -> None:
    """Restore a fresh buffer from a folder written by `save`. Raises JournalError if it is missing or damaged.

    Groups in flight keep their ids and admitted versions and are listed by `buffer.reissue()`.
    """
    directory = Path(directory)
    try:
        document = json.loads((directory / STATE).read_bytes())
        blob = (directory / PAYLOADS).read_bytes()
        if (document["format"], document["version"]) != (FORMAT, VERSION):
            raise JournalError(f"{directory}: not a journal of format {FORMAT} {VERSION}")
        if _checksum(document["state"].encode()) != document["checksum"]:
            raise JournalError(f"{directory}: {STATE} does not match its checksum")
        state = json.loads(document["state"])
        if _checksum(blob) != state["payloads_checksum"]:
            raise JournalError(f"{directory}: {PAYLOADS} does not match its checksum")
        arrays = load_arrays(blob)
    except JournalError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise JournalError(f"{directory}: no readable buffer journal: {type(error).__name__}: {error}") from error
    payload, ends = arrays["payload"].tobytes(), arrays["ends"].tolist()
    buffer.restore(state, [payload[start:end] for start, end in zip([0, *ends[:-1]], ends)])


def _checksum(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _write(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
