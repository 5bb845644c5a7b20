"""Trajectories and groups as bytes and back, without pickle.

The container is safetensors, so any program that reads safetensors can read a run's data. All samples of a container
are concatenated (B samples, P/T/k as in `types`):

    lengths        int64   [B, 3]       prompt tokens P, response tokens T, stored top log-probs k of every sample
    prompt_ids     int32   [sum P]
    response_ids   int32   [sum T]
    logp_inf       float32 [sum T]
    token_version  int32   [sum T]
    topk_ids       int32   [sum T*k]    row-major
    topk_logp      float32 or float16 [sum T*k]
    reward         float64 [B]          NaN where the score failed (see `score_status`)

The metadata holds `format`, `version`, `kind` ("trajectory", "group" or "groups") and `header`, a JSON text with the
remaining fields of every sample and group. Group g owns the next `samples` rows.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays

from rlcore.types import ActorKind, FinishReason, Group, ScoreStatus, Trajectory

FORMAT = "rlcore.trajectories"
VERSION = 1
TopkDtype = Literal["float32", "float16"]

_DTYPES = {"prompt_ids": np.int32, "response_ids": np.int32, "logp_inf": np.float32, "token_version": np.int32,
           "topk_ids": np.int32}  # fmt: skip
_CHOICES = {"actor_kind": get_args(ActorKind), "finish_reason": get_args(FinishReason),
            "score_status": get_args(ScoreStatus)}  # fmt: skip
_TEXT = ("actor_id", "actor_kind", "prompt_id", "finish_reason", "purpose", "score_status", "score_error")


def dump_trajectory(trajectory: Trajectory, topk_dtype: TopkDtype = "float32") -> bytes:
    """One trajectory as bytes. Raises ValueError if an array has another dtype or shape than `Trajectory` states."""
    return _dump("trajectory", [trajectory], [], topk_dtype)


def load_trajectory(data: bytes) -> Trajectory:
    """The inverse of `dump_trajectory`; `topk_logp` comes back as float32. Raises ValueError on malformed bytes."""
    trajectories, _ = _load(data, "trajectory")
    if len(trajectories) != 1:
        raise ValueError(f"malformed {FORMAT} data: one trajectory expected, {len(trajectories)} found")
    return trajectories[0]


def dump_group(group: Group, topk_dtype: TopkDtype = "float32") -> bytes:
    """One group as bytes. Raises ValueError if an array has another dtype or shape than `Trajectory` states."""
    return _dump("group", group.trajectories, [group], topk_dtype)


def load_group(data: bytes) -> Group:
    """The inverse of `dump_group`. Raises ValueError on malformed bytes."""
    groups = _split(*_load(data, "group"))
    if len(groups) != 1:
        raise ValueError(f"malformed {FORMAT} data: one group expected, {len(groups)} found")
    return groups[0]


def dump_groups(groups: Sequence[Group], topk_dtype: TopkDtype = "float32") -> bytes:
    """Several groups in one container."""
    return _dump("groups", [t for g in groups for t in g.trajectories], groups, topk_dtype)


def load_groups_bytes(data: bytes) -> list[Group]:
    """The inverse of `dump_groups`. Raises ValueError on malformed bytes."""
    return _split(*_load(data, "groups"))


def save_groups(path: str | Path, groups: Sequence[Group], topk_dtype: TopkDtype = "float32") -> None:
    """Write groups to a file: beside, flushed to disk, then renamed, so that a reader never sees half of it."""
    path = Path(path)
    beside = path.with_name(path.name + ".partial")
    with open(beside, "wb") as file:
        file.write(dump_groups(groups, topk_dtype))
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def load_groups(path: str | Path) -> list[Group]:
    """Groups of a file written by `save_groups`. Raises ValueError naming the file if it is malformed."""
    try:
        return load_groups_bytes(Path(path).read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _dump(kind: str, trajectories: Sequence[Trajectory], groups: Iterable[Group], topk_dtype: TopkDtype) -> bytes:
    if topk_dtype not in get_args(TopkDtype):
        raise ValueError(f"topk_dtype={topk_dtype!r} is not accepted; choose one of: {', '.join(get_args(TopkDtype))}")
    for t in trajectories:
        _check_arrays(t)
    arrays = {name: _concat([getattr(t, name) for t in trajectories], dtype) for name, dtype in _DTYPES.items()}
    with np.errstate(over="ignore"):  # below float16's range a log-prob is -inf
        arrays["topk_logp"] = _concat([t.topk_logp for t in trajectories], np.dtype(topk_dtype))
    shape = [(len(t.prompt_ids), len(t.response_ids), t.topk_ids.shape[1]) for t in trajectories]
    arrays["lengths"] = np.array(shape, np.int64).reshape(-1, 3)
    arrays["reward"] = np.array([math.nan if t.reward is None else t.reward for t in trajectories], np.float64)
    header = {"trajectories": [_fields(t) for t in trajectories], "groups": [_group_fields(g) for g in groups]}
    text = json.dumps(header, allow_nan=False, separators=(",", ":"))
    return save_arrays(arrays, {"format": FORMAT, "version": str(VERSION), "kind": kind, "header": text})


def _check_arrays(t: Trajectory) -> None:
    for name, dtype in _DTYPES.items():
        array = getattr(t, name)
        dims = 2 if name == "topk_ids" else 1
        if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != dims:
            raise ValueError(f"trajectory {t.request_id}: {name} must be a {dims}-d array of {np.dtype(dtype)}")
    if t.topk_logp.dtype not in (np.float32, np.float16) or t.topk_logp.shape != t.topk_ids.shape:
        raise ValueError(f"trajectory {t.request_id}: topk_logp must be float32 or float16 of topk_ids' shape")


def _concat(parts: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate([p.reshape(-1) for p in parts]).astype(dtype, copy=False) if parts else np.empty(0, dtype)


def _fields(t: Trajectory) -> dict[str, Any]:
    fields: dict[str, Any] = {name: getattr(t, name) for name in _TEXT}
    fields.update(group_id=int(t.group_id), sample_index=int(t.sample_index))
    fields.update(reward_parts=_numbers(t.reward_parts), timings=_numbers(t.timings))
    return fields


def _group_fields(g: Group) -> dict[str, Any]:
    return {"group_id": int(g.group_id), "prompt_id": g.prompt_id, "admitted_version": int(g.admitted_version),
            "arrival_version": int(g.arrival_version), "samples": len(g.trajectories)}  # fmt: skip


def _numbers(values: dict[str, float]) -> dict[str, float | str]:
    """JSON has no NaN or infinity: those are written as text."""
    return {k: float(v) if math.isfinite(v) else repr(float(v)) for k, v in values.items()}


def _load(data: bytes, kind: str) -> tuple[list[Trajectory], list[dict[str, Any]]]:
    """Trajectories and group headers of a container; every way of being malformed ends as ValueError."""
    try:
        header = _read_header(data, kind)
        arrays = load_arrays(bytes(data))
        return _rebuild(arrays, header["trajectories"]), list(header["groups"])
    except (SafetensorError, KeyError, TypeError, IndexError, AttributeError, OverflowError, ValueError) as error:
        text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        prefix = f"malformed {FORMAT} data"
        raise ValueError(text if text.startswith(prefix) else f"{prefix}: {text}") from error


def _read_header(data: bytes, kind: str) -> dict[str, Any]:
    """safetensors: 8 bytes little-endian length, then a JSON object whose `__metadata__` is ours."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > len(data) - 8:
        raise ValueError("truncated before the end of its header")
    meta = json.loads(data[8 : 8 + size]).get("__metadata__") or {}
    if meta.get("format") != FORMAT:
        raise ValueError(f"format is {meta.get('format')!r}, expected {FORMAT!r}")
    if meta.get("version") != str(VERSION):
        raise ValueError(f"version is {meta.get('version')!r}, this program reads {VERSION}")
    if meta.get("kind") != kind:
        raise ValueError(f"kind is {meta.get('kind')!r}, expected {kind!r}")
    return json.loads(meta["header"])


def _rebuild(arrays: dict[str, np.ndarray], fields: list[dict[str, Any]]) -> list[Trajectory]:
    lengths, reward = arrays["lengths"], arrays["reward"]
    if lengths.shape != (len(fields), 3) or lengths.dtype != np.int64 or (lengths.size and lengths.min() < 0):
        raise ValueError(f"lengths {lengths.dtype}{lengths.shape} do not describe {len(fields)} trajectories")
    if reward.shape != (len(fields),) or reward.dtype != np.float64:
        raise ValueError(f"reward {reward.dtype}{reward.shape} does not describe {len(fields)} trajectories")
    prompt, tokens, entries = lengths[:, 0], lengths[:, 1], lengths[:, 1] * lengths[:, 2]
    rows = {"prompt_ids": prompt, "topk_ids": entries, "topk_logp": entries,
            "response_ids": tokens, "logp_inf": tokens, "token_version": tokens}  # fmt: skip
    columns: dict[str, list[np.ndarray]] = {name: _slices(name, arrays[name], size) for name, size in rows.items()}
    return [_trajectory(f, {n: c[i] for n, c in columns.items()}, lengths[i], reward[i]) for i, f in enumerate(fields)]


def _slices(name: str, array: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
    allowed = (np.dtype(np.float32), np.dtype(np.float16)) if name == "topk_logp" else (np.dtype(_DTYPES[name]),)
    if array.dtype not in allowed or array.shape != (int(sizes.sum()),):
        raise ValueError(f"{name} is {array.dtype}{array.shape}, expected {allowed[0]}({int(sizes.sum())},)")
    ends = np.cumsum(sizes)
    return [array[end - size : end] for end, size in zip(ends.tolist(), sizes.tolist())]


def _trajectory(fields: dict[str, Any], arrays: dict[str, Any], lengths: np.ndarray, reward: float) -> Trajectory:
    for name in _TEXT:
        if not isinstance(fields[name], str) or fields[name] not in _CHOICES.get(name, (fields[name],)):
            raise ValueError(f"{name}={fields[name]!r} is not a value of that field")
    for name in ("group_id", "sample_index"):
        if type(fields[name]) is not int:
            raise ValueError(f"{name}={fields[name]!r} is not an integer")
    shape = (int(lengths[1]), int(lengths[2]))
    arrays["topk_ids"] = arrays["topk_ids"].reshape(shape)
    arrays["topk_logp"] = arrays["topk_logp"].reshape(shape).astype(np.float32, copy=False)
    scored = fields["score_status"] == "ok"
    parts = {k: float(v) for k, v in fields.pop("reward_parts").items()}
    timings = {k: float(v) for k, v in fields.pop("timings").items()}
    return Trajectory(**fields, **arrays, reward=float(reward) if scored else None, reward_parts=parts, timings=timings)


def _split(trajectories: list[Trajectory], groups: list[dict[str, Any]]) -> list[Group]:
    """Hand each group its share of the rows."""
    made, start = [], 0
    try:
        for fields in groups:
            count = fields.pop("samples")
            if type(count) is not int or count < 0:
                raise ValueError(f"malformed {FORMAT} data: a group of {count!r} samples")
            made.append(Group(**fields, trajectories=trajectories[start : start + count]))
            start += count
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"malformed {FORMAT} data: group header: {type(error).__name__}: {error}") from error
    if start != len(trajectories):
        raise ValueError(f"malformed {FORMAT} data: groups of {start} samples, {len(trajectories)} trajectories")
    return made
