"""Rows of local data: files of JSON, JSON Lines, CSV, Parquet and Arrow, folders that a Hugging
Face data set was saved to, and sets in the local cache of Hugging Face."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from rlcore.files import hub_folders, prepared_set
from rlcore.tasks.arguments import ArgumentError

Row = dict[str, Any]
# Files of `datasets.save_to_disk`: beside the data of one split, and above the folders of several.
STATE, SPLITS = "state.json", "dataset_dict.json"
CACHED = "hf:"  # before the name of a data set in the local cache
SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".arrow")
MOST_DIGITS = 4300  # of an integer: Python converts no longer ones to text
DEEPEST = 100  # levels of lists and objects in a row
_PIECE = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]')


@dataclass(frozen=True, slots=True)
class Meaningless:
    """Replaces a JSON value that has no meaning; `why` completes "field x ..."."""

    why: str


def fault(value: Any, path: str) -> str | None:
    """The first fault of a value, such as "field answer is NaN"; None: it is text, a finite number,
    true, false, null, or lists and objects of these. `path`: the dotted path of the value."""
    pending, root = [(value, path, 0)], path
    while pending:
        value, path, depth = pending.pop()
        if depth > DEEPEST:
            return f"field {root} is nested more than {DEEPEST} levels deep"
        why = _fault(value)
        if why is not None:
            return f"field {path} {why}"
        if isinstance(value, Mapping):
            inner: list[tuple[Any, Any]] = list(value.items())
        elif isinstance(value, Sequence) and not isinstance(value, str):
            inner = list(enumerate(value))
        else:
            continue
        pending += [(v, f"{path}.{key}", depth + 1) for key, v in reversed(inner)]
    return None


def _fault(value: Any) -> str | None:
    if isinstance(value, Meaningless):
        return value.why
    if isinstance(value, str):
        lone = re.search("[\ud800-\udfff]", value)
        return lone and (
            f"has a lone surrogate (U+{ord(lone[0]):04X}, character {lone.start() + 1}), which no "
            "tokenizer can encode"
        )
    if isinstance(value, float) and not math.isfinite(value):
        return f"is {'NaN' if math.isnan(value) else 'an infinite number'}"
    if isinstance(value, bytes) or not isinstance(value, int | float | Mapping | Sequence | None):
        return f"is {type(value).__name__}, not text, a number, a list or an object"
    return None


def rows(argument: str, path: str, split: str | None = None) -> Iterator[tuple[int, Row]]:
    """(row number from 1, row) of a data file, of a folder that `save_to_disk` wrote, or of a set
    in the local cache, `hf:OWNER/NAME` or `hf:OWNER/NAME/CONFIGURATION`; in JSON Lines the row
    number is the line number. `split`: of a folder or set that has several.

    JSON values without a meaning are `Meaningless`. Raises ArgumentError for `argument`.
    """
    if str(path).startswith(CACHED):
        yield from _numbered(argument, _cached(argument, str(path), split))
        return
    file = Path(str(path)).expanduser()
    if file.is_dir():
        yield from enumerate(_saved(argument, file, split), 1)
        return
    if _reader(file) is None:
        raise ArgumentError(
            argument,
            path,
            f"is not accepted: give a {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} file (the first "
            "three may end in .gz), a folder that a Hugging Face data set was saved to, or "
            f"{CACHED}OWNER/NAME of one in the local cache.",
        )
    if not file.is_file():
        raise ArgumentError(argument, path, f"names no file (looked for {file.absolute()}).")
    yield from _read(argument, file)


def _read(argument: str, file: Path) -> Iterator[tuple[int, Row]]:
    reader = _reader(file)
    assert reader is not None
    try:
        yield from reader(argument, file)
    except (OSError, EOFError, zlib.error) as error:
        raise ArgumentError(argument, file, f"cannot be read: {error}.") from error


def _reader(file: Path) -> Callable[[str, Path], Iterator[tuple[int, Row]]] | None:
    name = file.name.lower()
    zipped = name.endswith(".gz")
    suffix = Path(name.removesuffix(".gz")).suffix
    texts = {".jsonl": _jsonl, ".json": _json, ".csv": _csv}
    return texts.get(suffix) or (
        None if zipped else {".parquet": _parquet, ".arrow": _arrow}.get(suffix)
    )


def _open(file: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(file)) if file.suffix.lower() == ".gz" else file.open("rb")


def _bad(argument: str, file: Path, number: int, why: str) -> ArgumentError:
    return ArgumentError(argument, file, f"has a bad row: row {number}{why}.")


# -- JSON ------------------------------------------------------------------------------------------


def _jsonl(argument: str, file: Path) -> Iterator[tuple[int, Row]]:
    with _open(file) as lines:
        for number, line in enumerate(lines, 1):
            text = _decoded(argument, file, number, line)
            if text.strip():
                yield number, _object(argument, file, number, _parsed(argument, file, number, text))


def _json(argument: str, file: Path) -> Iterator[tuple[int, Row]]:
    """A list of rows, or an object with one list; JSON Lines are read under this name, too."""
    with _open(file) as opened:
        content = opened.read()
    first, _, further = content.partition(b"\n")
    if first.strip().startswith(b"{") and further.strip().startswith(b"{"):
        yield from _jsonl(argument, file)
        return
    text = _decoded(argument, file, None, content)
    value = _parsed(argument, file, None, text)
    if isinstance(value, dict):
        lists = {name: v for name, v in value.items() if isinstance(v, list)}
        if len(lists) != 1:
            raise ArgumentError(
                argument,
                file,
                "is not a list of rows, nor an object with one such list (it has: "
                f"{', '.join(list(value)[:8]) or 'nothing'}).",
            )
        (value,) = lists.values()
    if not isinstance(value, list):
        raise ArgumentError(argument, file, "is not a list of rows.")
    for number, row in enumerate(value, 1):
        yield number, _object(argument, file, number, row)


def _decoded(argument: str, file: Path, number: int | None, data: bytes) -> str:
    try:
        return data.decode("utf-8-sig" if number in (None, 1) else "utf-8")
    except UnicodeDecodeError as error:
        row = "" if number is None else f" in row {number}"
        raise ArgumentError(
            argument, file, f"cannot be read as UTF-8: byte {error.start + 1}{row} is no text."
        ) from error


def _parsed(argument: str, file: Path, number: int | None, text: str) -> Any:
    """A JSON value. Raises ArgumentError for text that is not JSON."""
    what = "" if number is None else f"has a bad row: row {number} "
    try:
        return json.loads(
            text,
            parse_constant=lambda name: Meaningless(f"is {name}"),
            parse_int=_integer,
            object_pairs_hook=_unique,
        )
    except json.JSONDecodeError as error:
        where = f", line {error.lineno}" if number is None else ""
        raise ArgumentError(argument, file, f"{what}is not JSON ({error.msg}{where}).") from error
    except RecursionError as error:
        raise ArgumentError(
            argument,
            file,
            f"{what or 'has a row that '}is nested too deeply to be read (field {_deep(text)}).",
        ) from error


def _integer(digits: str) -> Any:
    if len(digits) > MOST_DIGITS:
        return Meaningless(f"is an integer of {len(digits):,} characters: give it as text")
    return int(digits)


def _unique(pairs: list[tuple[str, Any]]) -> Row:
    made: Row = {}
    for key, value in pairs:
        made[key] = Meaningless("stands in the row twice") if key in made else value
    return made


def _deep(text: str) -> str:
    """The last key before the point where a JSON text is nested too deeply."""
    depth, key = 0, "?"
    for piece in _PIECE.finditer(text):
        if piece[0][0] == '"':
            key = piece[0][1:-1] if text[piece.end() :].lstrip()[:1] == ":" else key
        else:
            depth += 1 if piece[0] in "[{" else -1
        if depth > DEEPEST:
            break
    return key


def _object(argument: str, file: Path, number: int, row: Any) -> Row:
    if not isinstance(row, dict):
        raise _bad(argument, file, number, " is not a JSON object")
    return row


# -- CSV -------------------------------------------------------------------------------------------


def _csv(argument: str, file: Path) -> Iterator[tuple[int, Row]]:
    """Rows below a line of column names, RFC 4180; every value is text."""
    with _open(file) as opened:
        text = _decoded(argument, file, None, opened.read())
    csv.field_size_limit(1 << 30)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    number = 0
    try:
        names = next(reader, [])
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ArgumentError(argument, file, f"has the column {min(twice)} twice.")
        for values in reader:
            if not values:
                continue
            number += 1
            if len(values) != len(names):
                why = f" has {len(values)} fields, and there are {len(names)} columns"
                raise _bad(argument, file, number, why)
            yield number, dict(zip(names, values))
    except csv.Error as error:
        raise _bad(argument, file, number + 1, f" is not CSV ({error})") from error


# -- Arrow -----------------------------------------------------------------------------------------


def _parquet(argument: str, file: Path) -> Iterator[tuple[int, Row]]:
    import pyarrow
    import pyarrow.parquet

    try:
        yield from enumerate(pyarrow.parquet.read_table(file).to_pylist(), 1)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise ArgumentError(argument, file, f"cannot be read as Parquet: {error}.") from error


def _arrow(argument: str, file: Path) -> Iterator[tuple[int, Row]]:
    """Rows of Arrow's stream format, which `datasets` writes, or its file format."""
    import pyarrow
    import pyarrow.ipc

    try:
        with pyarrow.memory_map(str(file)) as source:
            seekable = source.read(6) == b"ARROW1"
            source.seek(0)
            opened = pyarrow.ipc.open_file if seekable else pyarrow.ipc.open_stream
            table = opened(source).read_all()
            yield from enumerate(table.to_pylist(), 1)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise ArgumentError(argument, file, f"cannot be read as Arrow: {error}.") from error


# -- Hugging Face ----------------------------------------------------------------------------------


def _saved(argument: str, folder: Path, split: str | None) -> Iterator[Row]:
    """Rows of a split's folder, in the order of its state."""
    if (folder / SPLITS).is_file():
        found = sorted(p.name for p in folder.iterdir() if (p / STATE).is_file())
        folder = folder / _chosen(argument, folder, found, split)
    if not (folder / STATE).is_file():
        found = sorted(p.name for p in folder.iterdir())[:8]
        raise ArgumentError(
            argument,
            folder,
            f"is no folder that a Hugging Face data set was saved to: it has no {STATE} (it has: "
            f"{', '.join(found) or 'nothing'}).",
        )
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        files = [str(entry["filename"]) for entry in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArgumentError(argument, folder, f"has a {STATE} that cannot be read.") from error
    for name in files:
        for _, row in _arrow(argument, folder / name):
            yield row


def _chosen(argument: str, place: object, found: Sequence[str], split: str | None) -> str:
    """The split that is named, or the only one. Raises ArgumentError."""
    if split in found or (split is None and len(found) == 1):
        return split or found[0]
    key = argument.replace("_path", "_split")
    given = "" if split is None else f" and none is called {split}"
    raise ArgumentError(
        argument,
        place,
        f"holds the splits {', '.join(found) or 'of a data set, but none of their folders'}"
        f"{given}: name one of them with {key}={found[0] if found else 'train'}.",
    )


def _cached(argument: str, given: str, split: str | None) -> list[Path]:
    """Files of a split of a set in the local cache: from the folder that `datasets` prepared, or
    from its downloaded repository. Nothing is downloaded."""
    owner, _, rest = given.removeprefix(CACHED).partition("/")
    name, _, configuration = rest.partition("/")
    prepared = prepared_set(f"{owner}/{name}")
    hub, snapshot = hub_folders("datasets", f"{owner}/{name}")
    for folder in (prepared, snapshot):
        files = [f for f in sorted(folder.rglob("*")) if f.is_file() and _reader(f) is not None]
        files = [f for f in files if not f.name.startswith("dataset_info")]
        if configuration:
            files = [f for f in files if configuration in f.relative_to(folder).parts]
        if files:
            return _of_split(argument, given, folder, files, split)
    raise ArgumentError(
        argument,
        given,
        f"is not in the local cache (looked in {prepared} and {hub}): download it first, or give a "
        "file.",
    )


def _of_split(
    argument: str, given: str, folder: Path, files: Sequence[Path], split: str | None
) -> list[Path]:
    """The files of one split. Raises ArgumentError where they are of several configurations."""
    splits: dict[str, list[Path]] = {}
    for file in files:
        stem = re.sub(r"-\d{5}-of-\d{5}$", "", file.name.split(".")[0])
        splits.setdefault(stem.rpartition("-")[2], []).append(file)
    chosen = splits[_chosen(argument, given, sorted(splits), split)]
    places = sorted({str(file.parent.relative_to(folder)) for file in chosen})
    if len(places) > 1:
        raise ArgumentError(
            argument,
            given,
            f"has several configurations or versions ({', '.join(places[:8])}): name one with "
            f"{CACHED}OWNER/NAME/CONFIGURATION, or one of the files.",
        )
    return chosen


def _numbered(argument: str, files: Sequence[Path]) -> Iterator[tuple[int, Row]]:
    """Rows of several files, counted on."""
    count = 0
    for file in files:
        for _, row in _read(argument, file):
            count += 1
            yield count, row
