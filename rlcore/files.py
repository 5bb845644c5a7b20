"""Files and folders that are either whole or absent: written aside, then renamed."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO


def shipped(name: str) -> Path:
    """A folder that comes with rlcore, `configs` or `launchers`: a checkout's, or a wheel's."""
    package = Path(__file__).resolve().parent
    inside = package / "shipped" / name
    return inside if inside.is_dir() else package.parent / name


def replace_file(path: str | Path, data: bytes | str, *, durable: bool = False) -> None:
    """Write a file so that a reader sees the old content or the new, never a part of it.

    `durable`: flushed to disk before and after the rename. Raises OSError, the old file untouched.
    """
    with new_file(path, durable=durable) as file:
        file.write(data.encode() if isinstance(data, str) else data)


FULL = (errno.ENOSPC, errno.EDQUOT)


def refusal(error: OSError) -> str:
    """A clause that says which file could not be written or read and why; of a full disk, with the
    space that is left there."""
    why = error.strerror or str(error)
    if error.filename is None:
        return why
    path = Path(os.fsdecode(error.filename)).absolute()
    if error.errno not in FULL:
        return f"{path}: {why}"
    there = next(folder for folder in path.parents if folder.is_dir())
    mib = shutil.disk_usage(there).free / 2**20
    return f"{path} could not be written: {why} ({mib:,.1f} MiB are free in {there})"


@contextmanager
def new_file(path: str | Path, *, durable: bool = False) -> Iterator[BinaryIO]:
    """An empty file to fill, renamed to `path` when the block succeeds, otherwise removed.

    As `replace_file`, for content that is written in pieces.
    """
    path = Path(path)
    beside = path.with_name(f".{path.name}.partial")
    try:
        with beside.open("wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        beside.replace(path)
    except BaseException as e:
        beside.unlink(missing_ok=True)
        if isinstance(e, OSError) and e.filename is None:  # what `write` raises names no file
            e.filename = str(path)
        raise
    if durable:
        sync(path.parent)


@contextmanager
def new_folder(path: str | Path, *, replace: bool = False) -> Iterator[Path]:
    """An empty folder to fill, renamed to `path` when the block succeeds, otherwise removed.

    Remains of an interrupted writer are removed first. The caller flushes the files inside. Raises
    FileExistsError if `path` exists, unless it is to `replace` that one at the end.
    """
    path = Path(path)
    if path.exists() and not replace:
        raise FileExistsError(f"{path} already exists")
    beside = path.with_name(f".{path.name}.partial")
    stale = path.with_name(f".{path.name}.stale")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        yield beside
        sync(beside)
        shutil.rmtree(stale, ignore_errors=True)
        if path.exists():
            path.rename(stale)
        beside.rename(path)
        shutil.rmtree(stale, ignore_errors=True)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file or a folder's entries to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def follow_umask(path: Path) -> None:
    """Give a file, or every file below a folder, the mode that the process's umask gives new ones:
    safetensors makes them readable by their owner alone."""
    status = Path("/proc/self/status").read_text()  # os.umask would have to change it
    mask = int(next(line for line in status.splitlines() if line.startswith("Umask:"))[6:], 8)
    for file in [path] if path.is_file() else path.rglob("*"):
        if file.is_file() and not file.is_symlink():
            file.chmod(0o666 & ~mask)


PIECE = 100  # entries of a list
CHARACTERS = 1 << 20  # of a text
_encode = json.JSONEncoder(separators=(",", ":")).encode


def dump_large(document: Mapping[str, Any]) -> str:
    """The JSON text of a document, of which large members are lists or texts, in the least of
    characters."""
    members = (f"{_encode(name)}:{_member(value)}" for name, value in document.items())
    return "{" + ",".join(members) + "}"


def _member(value: Any) -> str:
    if isinstance(value, list):
        pieces = (value[i : i + PIECE] for i in range(0, len(value), PIECE))
        return "[" + ",".join(_encode(piece)[1:-1] for piece in pieces) + "]"
    if isinstance(value, str):
        texts = (value[i : i + CHARACTERS] for i in range(0, len(value), CHARACTERS))
        return '"' + "".join(_encode(text)[1:-1] for text in texts) + '"'
    return _encode(value)


# -- the local cache of Hugging Face ---------------------------------------------------------------

CACHED = "hf:"  # before the name of a data set in the local cache
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")  # OWNER/NAME


def hub_folders(kind: str, name: str) -> tuple[Path, Path]:
    """(the repository's folder in the local cache, with its newest downloaded files), which may
    not exist. `kind`: models or datasets."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    folder = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    folder = folder / f"{kind}--{name.replace('/', '--')}"
    main = folder / "refs" / "main"
    revision = main.read_text().strip() if main.is_file() else "none"
    return folder, folder / "snapshots" / revision


def prepared_set(name: str) -> Path:
    """The folder of a set that `datasets` has prepared, which may not exist."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    datasets = Path(os.environ.get("HF_DATASETS_CACHE", home / "datasets"))
    return datasets / name.replace("/", "___")


PACKAGED = "smollm2-135m"  # the model of model=smollm2, out of the package registry


def not_here(name: str, kind: str) -> str:
    """A clause for a path that does not exist: with the command that brings it, if the user wrote
    OWNER/NAME. `name`: as given, or made absolute. `kind`: model or dataset."""
    written = name
    if os.path.isabs(name) and (below := os.path.relpath(name)) and not below.startswith(".."):
        written = below
    if os.path.basename(written) == PACKAGED:
        return f"rlcore fetch name={PACKAGED} out={written} makes it"
    if HUB_NAME.fullmatch(written) is None:
        return "rlcore fetch OWNER/NAME brings one of the Hugging Face Hub"
    also = " kind=dataset" if kind == "dataset" else ""
    return f"if {written} is of the Hugging Face Hub, rlcore fetch {written}{also} brings it"
