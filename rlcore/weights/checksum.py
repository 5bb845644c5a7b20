"""A cheap checksum of a tensor's bits: the same on every device, for a copy and for a view."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch

from rlcore.seeding import derive_seed

CHUNK = 1 << 18  # elements: the int64 temporaries stay in cache
_MASK = (1 << 64) - 1
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _mix(x: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


@functools.lru_cache(maxsize=8)
def _weights(device: torch.device) -> torch.Tensor:
    """[CHUNK] int64: one odd pseudo-random factor per position."""
    i = np.arange(CHUNK, dtype=np.uint64)
    # SplitMix64 again, over all positions at once; overflow is intended.
    with np.errstate(over="ignore"):
        x = i + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = (x ^ (x >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(x.view(np.int64)).to(device)


@torch.no_grad()
def tensor_checksum(tensor: torch.Tensor) -> int:
    """A 63-bit checksum of a tensor's bits, order, shape and dtype.

    A weighted sum of the elements' bit patterns modulo 2**64. The weights are odd, so one altered
    element always changes the sum; they differ by position, so order counts; and integer sums do
    not depend on the order of addition, so CPU and GPU agree. It detects lost and mixed-up weights,
    not deliberate tampering.
    """
    bits = tensor.detach().reshape(-1).view(_BITS[tensor.element_size()])
    weights = _weights(bits.device)
    parts = []
    for start in range(0, bits.numel(), CHUNK):
        chunk = bits[start : start + CHUNK].to(torch.int64)
        parts.append((chunk * weights[: chunk.numel()]).sum())
    # Chunks enter by their position too, so exchanging two of them counts.
    total = 0
    for n, part in enumerate(torch.stack(parts).tolist() if parts else []):
        total = (total + _mix(part & _MASK) * (_mix(n) | 1)) & _MASK
    # Mixed in last, so that a reshape or another dtype of the same bits counts too.
    for extent in tensor.shape:
        total = _mix(total ^ extent)
    for char in str(tensor.dtype):
        total = _mix(total ^ ord(char))
    return total >> 1


def sample_names(names: Sequence[str], count: int, *, seed: int) -> list[str]:
    """`count` of the names (all if there are fewer), chosen by `seed`, in the order given."""
    if count >= len(names):
        return list(names)
    rng = np.random.default_rng(derive_seed(seed, "weights/checksum_names"))
    return [names[i] for i in sorted(rng.choice(len(names), size=count, replace=False))]
