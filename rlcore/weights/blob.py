"""A set of tensors as one safetensors file, in memory or on disk.

Written here rather than by the library, which holds the interpreter's lock while it copies: with a
large model, heartbeats would stop. Source: https://github.com/huggingface/safetensors (format).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch

_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ALIGNMENT = 64  # of the first tensor; the widest dtypes come first, so all are aligned


class TensorEntry(NamedTuple):
    """A tensor's entry in the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]


def to_blob(tensors: Mapping[str, torch.Tensor]) -> np.ndarray:
    """[bytes] uint8: a safetensors file in memory. Tensors may be on any device."""
    header, size = _header(_entries(tensors))
    blob = np.empty(len(header) + size, np.uint8)
    blob[: len(header)] = np.frombuffer(header, np.uint8)
    # torch copies without the interpreter's lock, from any device and without another copy
    body = torch.from_numpy(blob[len(header) :])
    start = 0
    for t in _ordered(tensors).values():
        flat = _bytes(t)
        body[start : start + flat.numel()].copy_(flat)
        start += flat.numel()
    return blob


def write_blob(file: BinaryIO, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a safetensors file, copying one tensor at a time. Tensors may be on any device."""
    write_stream(file, _entries(tensors), _ordered(tensors).items())


def write_stream(
    file: BinaryIO, entries: Mapping[str, TensorEntry], tensors: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Write tensors that are made one at a time, in the order of `entries`."""
    header, _ = _header(entries)
    file.write(header)
    for _, t in tensors:
        file.write(_bytes(t).cpu().numpy().data)
        del t


def from_blob(blob: np.ndarray) -> dict[str, torch.Tensor]:
    """Views into `blob` ([bytes] uint8), by name; read-only if `blob` is. Copies nothing.

    Raises ValueError if the blob is truncated.
    """
    if blob.nbytes < 8 or blob.nbytes < 8 + (size := int(blob[:8].view("<u8")[0])):
        raise ValueError(f"weight blob of {blob.nbytes} bytes is truncated")
    header: dict[str, Any] = json.loads(blob[8 : 8 + size].tobytes())
    header.pop("__metadata__", None)
    body = blob[8 + size :]
    # An object store's memory is read-only, and nothing here writes into it.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given (buffer|NumPy array) is not writable")
        flat = torch.from_numpy(body)
    out = {}
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        if stop > body.nbytes:
            raise ValueError(
                f"weight blob is truncated: {name} ends at byte {stop} of {body.nbytes}"
            )
        out[name] = flat[start:stop].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return out


def _entries(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorEntry]:
    return {n: TensorEntry(t.dtype, tuple(t.shape)) for n, t in _ordered(tensors).items()}


def _header(entries: Mapping[str, TensorEntry]) -> tuple[bytes, int]:
    """(length and JSON header, bytes of the tensors that follow)."""
    described: dict[str, Any] = {}
    start = 0
    for name, (dtype, shape) in entries.items():
        stop = start + torch.Size(shape).numel() * dtype.itemsize
        described[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(described).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, start


def _ordered(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """[bytes] uint8 on the tensor's device."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
