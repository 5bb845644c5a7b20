"""One set of tensors as one safetensors blob; reading makes views into the blob and copies nothing."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from typing import Any

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


def to_blob(tensors: Mapping[str, torch.Tensor]) -> np.ndarray:
    """[bytes] uint8: a safetensors file in memory. Tensors may live on any device."""
    from safetensors.torch import save

    return np.frombuffer(save({n: t.detach().to("cpu").contiguous() for n, t in tensors.items()}), np.uint8)


def from_blob(blob: np.ndarray) -> dict[str, torch.Tensor]:
    """Views into `blob` ([bytes] uint8), by name; read-only if it is. Raises ValueError if it is cut short."""
    if blob.nbytes < 8 or blob.nbytes < 8 + (size := int(blob[:8].view("<u8")[0])):
        raise ValueError(f"weight blob of {blob.nbytes} bytes is cut short")
    header: dict[str, Any] = json.loads(blob[8 : 8 + size].tobytes())
    header.pop("__metadata__", None)
    body = blob[8 + size :]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given (buffer|NumPy array) is not writable")
        flat = torch.from_numpy(body)
    out = {}
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        if stop > body.nbytes:
            raise ValueError(f"weight blob is cut short: {name} ends at byte {stop} of {body.nbytes}")
        out[name] = flat[start:stop].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return out
