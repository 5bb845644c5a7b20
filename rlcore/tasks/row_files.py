"""Rows of local data: files of JSON, JSON Lines, CSV, Parquet and Arrow, and data sets of
Hugging Face that were saved to a folder or are in its local cache."""

from __future__ import annotations

import csv
import errno
import glob
import gzip
import io
import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from rlcore.files import CACHED, hub_folders, not_here, prepared_set
from rlcore.tasks.arguments import ArgumentError

Row = dict[str, Any]
# Files of `datasets.save_to_disk`: beside the data of one split, and above the folders of several.
STATE, SPLITS = "state.json", "dataset_dict.json"
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


def rows(
    argument: str, path: str | Sequence[str], split: str | None = None
) -> Iterator[tuple[int, Row]]:
    """(row number from 1, row) of the data at a path, or of a list of paths one after the other.

    A path is a file, a pattern, a folder of files, a folder that `save_to_disk` wrote, or a set in
    the local cache, `hf:OWNER/NAME` or `hf:OWNER/NAME/CONFIGURATION`. In a single file of JSON
    Lines the row number is the line number. `split`: of a folder or set that has several.

    JSON values without a meaning are `Meaningless`. Raises ArgumentError for `argument`.
    """
    if not isinstance(path, str) and isinstance(path, Sequence):
        if not path:
            raise ArgumentError(argument, "[]", "lists no file.")
        files = [Path(str(one)).expanduser() for one in path]
        if all(_reader(file) is not None and file.is_file() for file in files):
            yield from _numbered(argument, files)
        else:
            each = (row for one in path for _, row in rows(argument, str(one), split))
            yield from enumerate(each, 1)
        return
    if str(path).startswith(CACHED):
        yield from _numbered(argument, _cached(argument, str(path), split))
        return
    file = Path(str(path)).expanduser()
    if is_pattern(str(file)):
        yield from _numbered(argument, _matching(argument, str(file)))
        return
    if file.is_dir():
        saved = (file / STATE).is_file() or (file / SPLITS).is_file()
        if not saved and (files := _in_folder(argument, file, split)):
            yield from _numbered(argument, files)
        else:
            yield from enumerate(_saved(argument, file, split), 1)
        return
    if _reader(file) is None:
        raise ArgumentError(
            argument,
            path,
            f"is not accepted: give a {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} file (the first "
            "three may end in .gz), a folder, a pattern, a list of these, or OWNER/NAME of a data "
            f"set in the local cache; {not_here(str(path), 'dataset')}.",
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


def _require_unique(argument: str, file: Path, names: Sequence[str]) -> None:
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ArgumentError(argument, file, f"has the column {min(twice)} twice.")


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
            argument, file, f"cannot be read as UTF-8: byte {error.start + 1}{row} is not text."
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
        _require_unique(argument, file, names)
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
        _require_unique(argument, file, pyarrow.parquet.read_schema(file).names)
        yield from enumerate(_values(pyarrow.parquet.read_table(file)), 1)
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
            _require_unique(argument, file, table.schema.names)
            yield from enumerate(_values(table), 1)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise ArgumentError(argument, file, f"cannot be read as Arrow: {error}.") from error


def _values(table: Any) -> list[Row]:
    """The rows of an Arrow table; a number of a narrow type is the shortest decimal that is this
    number in its type: 0.1 of a float32 column, not 0.10000000149011612. A decimal is its text."""
    made: list[Row] = table.to_pylist()
    for field in table.schema:
        shorten = _shortener(field.type)
        if shorten is not None:
            for row in made:
                row[field.name] = shorten(row[field.name])
    return made


def _shortener(kind: Any) -> Callable[[Any], Any] | None:
    """A function for the values of an Arrow type that holds such numbers; None: of another."""
    import numpy as np
    from pyarrow import types

    if types.is_float16(kind) or types.is_float32(kind):
        narrow = np.float16 if types.is_float16(kind) else np.float32
        return lambda value: None if value is None else float(str(narrow(value)))
    if types.is_decimal(kind):
        return lambda value: None if value is None else format(value, "f")
    if types.is_dictionary(kind):
        return _shortener(kind.value_type)
    if types.is_map(kind):
        parts = [_shortener(kind.key_type) or _same, _shortener(kind.item_type) or _same]
        return _of_each(lambda pair: tuple(f(v) for f, v in zip(parts, pair)))
    if types.is_struct(kind):
        inner = {f.name: shorten for f in kind if (shorten := _shortener(f.type))}
        return (lambda value: value and value | _each(inner, value)) if inner else None
    if hasattr(kind, "storage_type"):
        return _shortener(kind.storage_type)
    own = _shortener(kind.value_type) if hasattr(kind, "value_type") else None
    return own and _of_each(own)


def _same(value: Any) -> Any:
    return value


def _each(shorten: Mapping[str, Callable[[Any], Any]], values: Row) -> Row:
    return {name: own(values[name]) for name, own in shorten.items()}


def _of_each(shorten: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda values: None if values is None else [shorten(value) for value in values]


# -- Several files ---------------------------------------------------------------------------------

_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})$")
_SPLIT = re.compile(r"(?:^|[^a-z])(train|test|validation|valid|val|dev|eval)(?![a-z])")
_ABOUT = re.compile(r"dataset_infos?\..*|state\.json|dataset_dict\.json")


def is_pattern(path: str) -> bool:
    """Return whether a path stands for all files that it matches."""
    return glob.has_magic(path) and not Path(path).exists()


def _matching(argument: str, pattern: str) -> list[Path]:
    """The files of a pattern by name, numbers by their value. Raises ArgumentError."""
    found = [Path(name) for name in glob.glob(pattern, recursive=True)]
    _require_targets(argument, pattern, found)
    # by what links lead to: `**` follows a link to a folder above it over and over
    own = {file.resolve(): file for file in sorted(found, reverse=True) if file.is_file()}
    files = _ordered(own.values())
    if not files:
        raise ArgumentError(argument, pattern, "matches no file.")
    odd = [file.name for file in files if _reader(file) is None]
    if odd:
        why = f"matches {odd[0]}, which is not a data file: end it in a suffix, such as *.parquet."
        raise ArgumentError(argument, pattern, why)
    return files


def _ordered(files: Iterable[Path]) -> list[Path]:
    def key(file: Path) -> list[tuple[int, str]]:
        parts = re.split(r"(\d+)", str(file))
        return [(int(part[:20]), "") if i % 2 else (0, part) for i, part in enumerate(parts)]

    return sorted(files, key=key)


def _in_folder(argument: str, folder: Path, split: str | None) -> list[Path]:
    """The data files of a folder, which are of one split. Raises ArgumentError for files of several
    formats, and for a set of numbered files that is not whole."""
    inside = [file for file in _ordered(_below(folder)) if _reader(file) is not None]
    _require_targets(argument, folder, inside)
    files = [f for f in inside if f.is_file() and not _ABOUT.fullmatch(f.name)]
    if not files:
        return []
    forms = sorted({Path(file.name.lower().removesuffix(".gz")).suffix for file in files})
    if len(forms) > 1:
        raise ArgumentError(
            argument,
            folder,
            f"holds files of several formats ({', '.join(forms)}): name those that are meant by a "
            f"pattern, {folder}/*{forms[0]}.",
        )
    splits: dict[str, list[Path]] = {}
    for file in files:
        named = _SPLIT.findall(str(file.relative_to(folder)).lower())
        splits.setdefault(named[-1] if named else "all", []).append(file)
    chosen = files
    if len(splits) > 1 or split is not None:
        chosen = splits[_chosen(argument, folder, list(splits), split)]
    _require_whole(argument, folder, chosen)
    return chosen


def _below(folder: Path) -> Iterator[Path]:
    """The entries of a folder and of those in it, also behind links; none that are hidden."""
    seen = set()
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        if (real := Path(parent).resolve()) in seen:
            folders[:] = []
        else:
            seen.add(real)
            yield from (Path(parent) / name for name in names if not name.startswith("."))


def _require_targets(argument: str, place: object, files: Sequence[Path]) -> None:
    """Raise ArgumentError for a link to a file that is not there."""
    lost = next((f for f in files if f.is_symlink() and _is_lost(f)), None)
    if lost is not None:
        why = f"holds {lost.name}, a link to a file that is not there: copy the file, or remove it."
        raise ArgumentError(argument, place, why)


def _is_lost(link: Path) -> bool:
    try:
        link.stat()
    except OSError as error:  # ELOOP: too many links on the way, by which it is reached as well
        return error.errno == errno.ENOENT
    return False


def _require_whole(argument: str, place: object, files: Sequence[Path]) -> None:
    """Raise ArgumentError where one of NAME-00000-of-00002 and so on is missing."""
    numbered = [found for file in files if (found := _SHARD.fullmatch(file.name.split(".")[0]))]
    for name, count in {(found[1], int(found[3])) for found in numbered}:
        have = {int(found[2]) for found in numbered if found[1] == name}
        lost = next((n for n in range(count) if n not in have), None)
        if lost is not None:
            raise ArgumentError(
                argument,
                place,
                f"lacks {name}-{lost:05d}-of-{count:05d}: copy all files of the set, or list those "
                "that are meant.",
            )


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
            f"is not a folder of data files or of a saved Hugging Face data set: it has no {STATE} "
            f"(it has: {', '.join(found) or 'nothing'}).",
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
        f"is not in the local cache (looked in {prepared} and {hub}): rlcore fetch {owner}/{name} "
        "kind=dataset brings it, or give a file.",
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
    """Rows of several files, counted on. Raises ArgumentError for files of other columns than the
    first has, which are not of the same data; rows of JSON have no columns."""
    count, first = 0, None
    for file in files:
        table = Path(file.name.removesuffix(".gz")).suffix.lower() in (".csv", ".parquet", ".arrow")
        for number, row in _read(argument, file):
            if table and number == 1:
                first = first or (file, set(row))
                _require_same(argument, file, set(row), *first)
            count += 1
            yield count, row


def _require_same(
    argument: str, file: Path, columns: set[str], first: Path, wanted: set[str]
) -> None:
    if odd := sorted(columns ^ wanted):
        has, lacks = (file, first) if odd[0] in columns else (first, file)
        why = (
            f"has other columns than {first.name}: {has.name} has {odd[0]} and {lacks.name} has "
            "not; list the files that are meant."
        )
        raise ArgumentError(argument, file, why)
