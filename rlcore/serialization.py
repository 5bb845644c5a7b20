"""Trajectories and scores as bytes and text, without pickle.

A record (one `Trajectory`) is one safetensors file, so that any program that reads safetensors can
read a run's data. Its arrays have the names and shapes of `Trajectory`; extra arrays are stored
under "extra.NAME". The metadata holds `format`, `version` and the remaining fields as text, and
`versions`, "OLDEST,NEWEST" of the tokens. Scores are JSON. The safetensors header is handled here
by hand, in a third of the library's time, since this runs for every sample.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii as quote
from typing import Any, Literal, TypeVar, get_args

import numpy as np

from rlcore.files import dump_large
from rlcore.pickling import ByFields
from rlcore.references import Record
from rlcore.types import (
    ActorKind,
    Episode,
    FinishReason,
    Group,
    Score,
    ScoreStatus,
    Trajectory,
    request_id,
)

FORMAT = "rlcore.trajectories"
SCORES_FORMAT = "rlcore.scores"
VERSION = 2
TopkDtype = Literal["float32", "float16"]
EXTRA = "extra."
_INT32, _FLOAT32, _FLOAT16, _BOOL = (np.dtype(n) for n in ("int32", "float32", "float16", "bool"))
_DTYPES = {"token_ids": _INT32, "sampled": _BOOL, "logp_inf": _FLOAT32, "topk_ids": _INT32,
           "topk_logp": _FLOAT32, "token_version": _INT32, "turn_starts": _INT32}  # fmt: skip
_DIMS = dict.fromkeys(_DTYPES, 1) | {"topk_ids": 2, "topk_logp": 2}
_NAMES = {  # numpy to safetensors
    _BOOL: "BOOL", np.dtype("uint8"): "U8", np.dtype("int8"): "I8", np.dtype("uint16"): "U16",
    np.dtype("int16"): "I16", np.dtype("uint32"): "U32", _INT32: "I32", np.dtype("uint64"): "U64",
    np.dtype("int64"): "I64", _FLOAT16: "F16", _FLOAT32: "F32", np.dtype("float64"): "F64",
}  # fmt: skip
_KINDS = {name: dtype for dtype, name in _NAMES.items()}
_TEXT = ("actor_id", "actor_kind", "prompt_id", "finish_reason", "draw_id", "purpose")
_WHOLE = ("group_id", "sample_index", "part", "parts")
_CHOICES = {"actor_kind": get_args(ActorKind), "finish_reason": get_args(FinishReason)}
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_decode = json.JSONDecoder().decode
# what reading damaged data can raise; reported as ValueError
_FAULTS = (LookupError, TypeError, AttributeError, OverflowError, RecursionError, ValueError)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RecordHeader(ByFields):
    """The fields of a record that can be read without decoding an array.

    Example: RecordHeader(17, 0, "digits/train/17", "bf16-0:4", 0, 1, "train", "bf16-0", "bf16",
    "stop", 3, 5, 3, 4)
    """

    group_id: int
    sample_index: int
    prompt_id: str
    draw_id: str
    part: int
    parts: int
    purpose: str
    actor_id: str
    actor_kind: ActorKind
    finish_reason: FinishReason
    tokens: int  # S, sampled tokens
    length: int  # L, all tokens
    oldest_version: int | None  # policy version among the sampled tokens; None without any
    newest_version: int | None
    problem: str = ""  # why nothing can be trained on the record: its sample's failure

    @property
    def request_id(self) -> str:
        return request_id(self.purpose, self.group_id, self.sample_index)


@dataclass(frozen=True, slots=True)
class StoredEpisode(ByFields):
    """One scored sample as the buffer stores it. Example: StoredEpisode(score, (record,))"""

    score: Score
    records: tuple[Record, ...]  # serialised trajectories by part


@dataclass(frozen=True, slots=True)
class StoredGroup(ByFields):
    """One group as the buffer stores it; `load_group` makes a `Group` of it.

    Example: StoredGroup(17, "digits/train/17", admitted_version=3, arrival_version=4, episodes=())
    """

    group_id: int
    prompt_id: str
    admitted_version: int
    arrival_version: int
    episodes: tuple[StoredEpisode, ...]  # by sample_index, what is trained on


def dump_trajectory(t: Trajectory, topk_dtype: TopkDtype = "float32") -> bytes:
    """One trajectory as bytes. Raises ValueError for an array of another dtype or shape than
    `Trajectory` states."""
    arrays = _checked_arrays(t, topk_dtype)
    arrays.sort(key=lambda named: -named[1].itemsize)  # each array aligned to its item size
    entries, end = [], 0
    for name, array in arrays:
        start, end = end, end + array.nbytes
        shape = ",".join(map(str, array.shape))
        kind = _NAMES[array.dtype]
        entries.append(
            f'{quote(name)}:{{"dtype":"{kind}","shape":[{shape}],"data_offsets":[{start},{end}]}}'
        )
    header = f'{{"__metadata__":{{{_metadata(t)}}},{",".join(entries)}}}'
    header += " " * (-len(header) % 8)
    size = len(header).to_bytes(8, "little")
    return b"".join([size, header.encode("ascii"), *(array.tobytes() for _, array in arrays)])


def dump_unusable(t: Trajectory, problem: str) -> bytes:
    """A record without arrays in place of one that nothing can be trained on. Its header has the
    problem, which becomes the failed score of the sample."""
    members = [*_identity(t, ""), f'"problem":{quote(problem)}', '"timings":"{}"']
    header = f'{{"__metadata__":{{{",".join(members)}}}}}'.encode("ascii")
    return len(header).to_bytes(8, "little") + header


def require_trainable(t: Trajectory, vocab_size: int | None = None) -> None:
    """Raise ValueError for values that nothing can be trained on: a log-prob that is not finite, a
    token outside the vocabulary, turns or versions out of order."""
    most = np.iinfo(np.int32).max if vocab_size is None else vocab_size
    for name, least in {"token_ids": 0, "topk_ids": -1}.items():
        ids = getattr(t, name)
        if ids.size and not (least <= ids.min() and ids.max() < most):
            raise ValueError(f"{name} has {ids.min()} to {ids.max()}, of a vocabulary of {most}")
    if not np.isfinite(t.logp_inf).all():
        raise ValueError(f"{np.count_nonzero(~np.isfinite(t.logp_inf))} log-probs are not finite")
    if np.isnan(t.topk_logp).any():
        raise ValueError("topk_logp has NaN")
    starts = t.turn_starts
    ordered = len(starts) and starts[0] > 0 and starts[-1] <= len(t.token_ids)
    if not ordered or (np.diff(starts) < 0).any():
        raise ValueError(f"turns begin at {starts[:8].tolist()}, of {len(t.token_ids)} tokens")
    if (np.diff(t.token_version) < 0).any():
        raise ValueError("versions of tokens go back")


def load_trajectory(data: Record) -> Trajectory:
    """The inverse of `dump_trajectory`; `topk_logp` comes back as float32.

    Arrays are read-only views of `data`. Raises ValueError on malformed bytes.
    """
    return _guarded(FORMAT, _trajectory, data)


def read_header(data: bytes) -> RecordHeader:
    """The header of a record, without decoding an array. Arrays that cannot belong to one
    trajectory are its `problem`. Raises ValueError where the bytes do not say whose they are."""
    return _guarded(FORMAT, _header, data)


def read_headers(records: Sequence[bytes]) -> list[tuple[RecordHeader, bytes]]:
    """Records with their headers, without records that do not name their sample: such samples are
    requested again, as after any loss in transit."""
    read = []
    for record in records:
        with contextlib.suppress(ValueError):
            read.append((read_header(record), record))
    return read


def record_bytes(length: int, sampled: int, k: int, topk_dtype: TopkDtype = "float32") -> int:
    """Approximate bytes of a record of L tokens, S of them sampled, with k top log-probs each."""
    # 1200: the header, with a prompt id and an actor name of usual length
    return 1200 + 5 * length + sampled * (8 + k * (4 + np.dtype(topk_dtype).itemsize))


def load_group(stored: StoredGroup) -> Group:
    """Decode one group. Raises ValueError on malformed bytes."""
    episodes = [
        Episode([load_trajectory(record) for record in e.records], e.score) for e in stored.episodes
    ]
    return Group(
        stored.group_id, stored.prompt_id, stored.admitted_version, episodes, stored.arrival_version
    )


def dump_scores(scores: Sequence[Score]) -> str:
    """Scores as one JSON text; infinities and NaN are written as text, since JSON has none."""
    rows = [
        {
            "group_id": int(s.group_id),
            "sample_index": int(s.sample_index),
            "draw_id": s.draw_id,
            "status": s.status,
            "reward": None if s.reward is None else _number(s.reward),
            "parts": _numbers(s.parts),
            **{n: list(map(_number, getattr(s, n))) for n in ("turn_rewards", "token_rewards")},
            "error": s.error,
            "seconds": _number(s.seconds),
            "answer": s.answer,
        }
        for s in scores
    ]
    return dump_large({"format": SCORES_FORMAT, "version": VERSION, "scores": rows})


def load_scores(text: str) -> list[Score]:
    """The inverse of `dump_scores`. Raises ValueError on malformed text."""
    return _guarded(SCORES_FORMAT, _scores, text)


class _OtherVersion(ValueError):
    """Data that is whole, but of a version that this program does not read."""


def _guarded(what: str, read: Callable[[Any], T], data: Any) -> T:
    try:
        return read(data)
    except _OtherVersion:
        raise
    except _FAULTS as error:
        why = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"malformed {what} data: {why}") from error


def _checked_arrays(t: Trajectory, topk_dtype: TopkDtype) -> list[tuple[str, np.ndarray]]:
    if topk_dtype not in get_args(TopkDtype):
        raise ValueError(f"topk_dtype={topk_dtype!r} is not accepted; choose float32 or float16")
    arrays = []
    for name, dtype in _DTYPES.items():
        array = getattr(t, name)
        if name == "topk_logp":
            array = _topk_logp(t, topk_dtype)
            dtype = array.dtype
        if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != _DIMS[name]:
            raise ValueError(
                f"trajectory {t.request_id}: {name} must be a {_DIMS[name]}-d array of {dtype}"
            )
        arrays.append((name, array))
    for name, array in t.extras.items():
        if not isinstance(array, np.ndarray) or array.dtype not in _NAMES:
            choices = ", ".join(map(str, _NAMES))
            raise ValueError(f"trajectory {t.request_id}: extra array {name} must be of: {choices}")
        arrays.append((EXTRA + name, array))
    return arrays


def _topk_logp(t: Trajectory, topk_dtype: TopkDtype) -> np.ndarray:
    if t.topk_logp.dtype not in (_FLOAT32, _FLOAT16) or t.topk_logp.shape != t.topk_ids.shape:
        raise ValueError(
            f"trajectory {t.request_id}: topk_logp must be float32 or float16 of topk_ids' shape"
        )
    with np.errstate(over="ignore"):  # below float16's range a log-prob is -inf
        return t.topk_logp.astype(topk_dtype, copy=False)


def _metadata(t: Trajectory) -> str:
    """Members of the `__metadata__` object; safetensors allows text values only."""
    versions = t.token_version
    span = f"{versions.min()},{versions.max()}" if len(versions) else ""
    timings = _encode(_numbers(t.timings)) if t.timings else "{}"
    return ",".join([*_identity(t, span), f'"timings":{quote(timings)}'])


def _identity(t: Trajectory, versions: str) -> list[str]:
    members = [f'"format":"{FORMAT}","version":"{VERSION}","versions":"{versions}"']
    members += [f'"{name}":{quote(getattr(t, name))}' for name in _TEXT]
    return members + [f'"{name}":"{int(getattr(t, name))}"' for name in _WHOLE]


def _parse(data: bytes) -> tuple[dict[str, str], dict[str, dict[str, Any]], int]:
    """(metadata, array entries, offset of the first array), checked against the length."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > len(data) - 8:
        raise ValueError("truncated before the end of its header")
    entries = _decode(data[8 : 8 + size].decode("ascii"))
    metadata = entries.pop("__metadata__", None) or {}
    _check_version(FORMAT, metadata.get("format"), metadata.get("version"))
    end = 0
    for name, (start, stop) in ((n, e["data_offsets"]) for n, e in entries.items()):
        if start != end or type(stop) is not int or stop < start:
            raise ValueError(f"array {name} does not begin where the one before it ends")
        end = stop
    if 8 + size + end != len(data):
        raise ValueError(f"{len(data)} bytes, its header describes {8 + size + end}")
    return metadata, entries, 8 + size


def _check_version(expected: str, found: object, version: object) -> None:
    if found != expected:
        raise ValueError(f"format is {found!r}, expected {expected!r}")
    if str(version) != str(VERSION):
        raise _OtherVersion(
            f"{expected} data of version {version!r} cannot be read: this program reads version "
            f"{VERSION}, so use the rlcore that wrote it"
        )


def _fields(metadata: Mapping[str, str]) -> dict[str, Any]:
    """The fields of a record that are not arrays, without its timings."""
    fields: dict[str, Any] = {name: metadata[name] for name in _TEXT}
    for name, value in fields.items():
        if not isinstance(value, str) or value not in _CHOICES.get(name, (value,)):
            raise ValueError(f"{name}={value!r} is not a value of that field")
    fields |= {name: int(metadata[name]) for name in _WHOLE}
    if not 0 <= fields["part"] < fields["parts"]:
        raise ValueError(f"part {fields['part']} of {fields['parts']}")
    return fields


def _header(data: bytes) -> RecordHeader:
    metadata, entries, _ = _parse(data)
    fields = _fields(metadata)
    if problem := metadata.get("problem") or _misshapen(entries):
        return RecordHeader(**fields, tokens=0, length=0, oldest_version=None, newest_version=None,
                            problem=str(problem))  # fmt: skip
    oldest, _, newest = metadata["versions"].partition(",")
    return RecordHeader(
        **fields,
        tokens=int(entries["logp_inf"]["shape"][0]),
        length=int(entries["token_ids"]["shape"][0]),
        oldest_version=int(oldest) if oldest else None,
        newest_version=int(newest) if newest else None,
    )


def _misshapen(entries: Mapping[str, Mapping[str, Any]]) -> str:
    """Return why the arrays of a header cannot belong to one trajectory; "" if they can."""
    try:
        (length,), (count, k) = entries["token_ids"]["shape"], entries["topk_ids"]["shape"]
        shapes = {"token_ids": [length], "sampled": [length], "topk_ids": [count, k],
                  "topk_logp": [count, k], "turn_starts": entries["turn_starts"]["shape"],
                  "logp_inf": [count], "token_version": [count]}  # fmt: skip
        for name, entry in entries.items():
            dtype, (start, stop) = _KINDS[entry["dtype"]], entry["data_offsets"]
            if math.prod(entry["shape"]) * dtype.itemsize != stop - start:
                return f"{name} of shape {entry['shape']} has {stop - start} bytes"
            if name.startswith(EXTRA):
                continue
            half = name == "topk_logp" and dtype == _FLOAT16
            if entry["shape"] != shapes.pop(name) or (dtype != _DTYPES[name] and not half):
                return f"{name} is of shape {entry['shape']} and {dtype}"
        return f"{' and '.join(shapes)} are missing" if shapes else ""
    except _FAULTS as e:
        return f"its arrays cannot be read ({type(e).__name__}: {e})"


def _trajectory(data: bytes) -> Trajectory:
    metadata, entries, base = _parse(data)
    arrays: dict[str, Any] = {
        name: _array(data, base, entries.pop(name), _DIMS[name]) for name in _DTYPES
    }
    if arrays["topk_logp"].dtype == _FLOAT16:
        arrays["topk_logp"] = arrays["topk_logp"].astype(_FLOAT32)
    for name, dtype in _DTYPES.items():
        if arrays[name].dtype != dtype:
            raise ValueError(f"{name} is of {arrays[name].dtype}")
    extras = {}
    for name, entry in entries.items():
        if not name.startswith(EXTRA):
            raise ValueError(f"there is no array of the name {name}")
        extras[name[len(EXTRA) :]] = _array(data, base, entry, None)
    timings = {name: float(value) for name, value in _decode(metadata["timings"]).items()}
    return Trajectory(**arrays, **_fields(metadata), timings=timings, extras=extras)


def _array(data: bytes, base: int, entry: Mapping[str, Any], dims: int | None) -> np.ndarray:
    dtype, shape = _KINDS[entry["dtype"]], entry["shape"]
    start, stop = entry["data_offsets"]
    count = math.prod(shape)
    if count * dtype.itemsize != stop - start or len(shape) != (dims or len(shape)):
        raise ValueError(f"an array of shape {shape} in {stop - start} bytes")
    if not count:  # frombuffer refuses to make an empty array
        return np.empty(shape, dtype)
    return np.frombuffer(data, dtype, count, base + start).reshape(shape)


def _scores(text: str) -> list[Score]:
    document = _decode(text)
    _check_version(SCORES_FORMAT, document.get("format"), document.get("version"))
    return list(map(_score, document["scores"]))


def _score(fields: dict[str, Any]) -> Score:
    fields.setdefault("answer", "")  # older ones have none
    texts = dict.fromkeys(("draw_id", "error", "answer"), str)
    for name, kinds in {"group_id": int, "sample_index": int, **texts}.items():
        if type(fields[name]) is not kinds:
            raise ValueError(f"{name}={fields[name]!r} is not a value of that field")
    if fields["status"] not in get_args(ScoreStatus):
        raise ValueError(f"status={fields['status']!r} is not a value of that field")
    return Score(
        reward=None if (reward := fields.pop("reward")) is None else float(reward),
        parts={name: float(value) for name, value in fields.pop("parts").items()},
        turn_rewards=tuple(map(float, fields.pop("turn_rewards"))),
        token_rewards=tuple(map(float, fields.pop("token_rewards", ()))),  # older ones have none
        seconds=float(fields.pop("seconds")),
        **fields,
    )


def _number(value: float) -> float | str:
    return float(value) if math.isfinite(value) else repr(float(value))


def _numbers(values: Mapping[str, float]) -> dict[str, float | str]:
    return {name: _number(value) for name, value in values.items()}
