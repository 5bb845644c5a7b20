"""Counter-based uniform draws per token, independent of how the step is split into batches."""

from __future__ import annotations

import torch
from torch import Tensor

from rlcore.seeding import derive_seed


def _signed(value: int) -> int:
    """An unsigned 64-bit constant as torch's int64 holds it."""
    return value - (1 << 64) if value >= 1 << 63 else value


# the constants of SplitMix64 (Steele, Lea and Flood 2014)
_STRIDE, _FIRST, _SECOND = map(
    _signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def _shift(bits: Tensor, by: int) -> Tensor:
    """Logical right shift; torch's own repeats the sign bit."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _scramble(bits: Tensor) -> Tensor:
    """SplitMix64's finaliser: a bijection of 64 bits in which every input bit moves every output
    bit."""
    bits = (bits ^ _shift(bits, 30)) * _FIRST
    bits = (bits ^ _shift(bits, 27)) * _SECOND
    return bits ^ _shift(bits, 31)


def token_uniforms(
    run_seed: int, purpose: str, step: int, sample_ids: Tensor, length: int
) -> Tensor:
    """Uniforms in [0, 1) of shape [B, length], float32 with 24 random bits.

    Args: the run's seed; what the draw is for; the optimizer step; sample_ids [B] int64, unique and
    stable per sequence; positions. The value at (b, t) depends on nothing but (seed, purpose, step,
    sample_ids[b], t). Example: token_uniforms(0, "obrs", step, sample_ids, logp.shape[1])
    """
    seed = derive_seed(run_seed, purpose, step)
    rows = _scramble(sample_ids.long() * _STRIDE + seed)
    columns = torch.arange(1, length + 1, device=sample_ids.device) * _STRIDE
    return _shift(_scramble(rows[:, None] + columns), 40).float() * 2.0**-24
