"""Rows of local data files: JSONL, Parquet, and the Arrow files of Hugging Face data sets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlcore.tasks.arguments import ArgumentError

Row = dict[str, Any]
# What `datasets.save_to_disk` writes: beside the files of one split, and above those of several.
STATE, SPLITS = "state.json", "dataset_dict.json"


def rows(argument: str, path: str) -> Iterator[tuple[int, Row]]:
    """(row number from 1, row) of a file, or of a folder that `save_to_disk` wrote; in a JSONL file
    the row number is the line number. Raises ArgumentError for `argument`."""
    file = Path(str(path)).expanduser()
    if file.is_dir():
        yield from enumerate(_saved(argument, file), 1)
        return
    readers = {".jsonl": _jsonl, ".parquet": _parquet, ".arrow": _arrow}
    if file.suffix not in readers:
        raise ArgumentError(
            argument,
            path,
            "is not accepted: give a .jsonl, .parquet or .arrow file, or a folder that a Hugging "
            "Face data set was saved to.",
        )
    if not file.is_file():
        raise ArgumentError(argument, path, f"names no file (looked for {file.absolute()}).")
    yield from readers[file.suffix](argument, file)


def _saved(argument: str, folder: Path) -> Iterator[Row]:
    """Rows of a split's folder, in the order of its state."""
    if (folder / SPLITS).is_file():
        splits = sorted(p.name for p in folder.iterdir() if (p / STATE).is_file())
        raise ArgumentError(
            argument,
            folder,
            f"holds the splits {', '.join(splits) or 'of a data set, but none of their folders'}: "
            f"name one of them, such as {folder / splits[0] if splits else folder / 'train'}.",
        )
    if not (folder / STATE).is_file():
        found = ", ".join(sorted(p.name for p in folder.iterdir())[:8])
        raise ArgumentError(
            argument,
            folder,
            f"is no folder that a Hugging Face data set was saved to: it has no {STATE} (it has: "
            f"{found or 'nothing'}).",
        )
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        files = [str(entry["filename"]) for entry in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArgumentError(argument, folder, f"has a {STATE} that cannot be read.") from error
    for name in files:
        for _, row in _arrow(argument, folder / name):
            yield row


def _jsonl(argument: str, file: Path) -> Iterator[tuple[int, Row]]:
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise ArgumentError(
                            argument, file, f"has a bad row: row {number} is not a JSON object."
                        )
                    yield number, row
    except json.JSONDecodeError as error:
        raise ArgumentError(
            argument, file, f"has a bad row: row {number} is not JSON ({error.msg})."
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(argument, file, f"cannot be read: {error}.") from error


def _parquet(argument: str, file: Path) -> Iterator[tuple[int, Row]]:
    import pyarrow
    import pyarrow.parquet

    try:
        yield from enumerate(pyarrow.parquet.read_table(file).to_pylist(), 1)
    except (OSError, pyarrow.ArrowException) as error:
        raise ArgumentError(argument, file, f"cannot be read as Parquet: {error}.") from error


def _arrow(argument: str, file: Path) -> Iterator[tuple[int, Row]]:
    """Of Arrow's stream format, which `datasets` writes, or its file format."""
    import pyarrow
    import pyarrow.ipc

    try:
        with pyarrow.memory_map(str(file)) as source:
            seekable = source.read(6) == b"ARROW1"
            source.seek(0)
            opened = pyarrow.ipc.open_file if seekable else pyarrow.ipc.open_stream
            table = opened(source).read_all()
            yield from enumerate(table.to_pylist(), 1)
    except (OSError, pyarrow.ArrowException) as error:
        raise ArgumentError(argument, file, f"cannot be read as Arrow: {error}.") from error
