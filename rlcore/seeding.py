"""One rule for randomness: every draw is seeded from (run seed, purpose, indices), never from
timing."""

from __future__ import annotations

import hashlib


def derive_seed(run_seed: int, purpose: str, *indices: int | str) -> int:
    """A 63-bit seed that depends on its arguments alone: not on timing or how ranks split work."""
    # The unit separator keeps (1, 23) and (12, 3) apart.
    text = "\x1f".join([str(int(run_seed)), purpose, *map(str, indices)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


CIRCLE = 1 << 64
GOLDEN = 0x9E3779B97F4A7C15  # CIRCLE / phi, odd: n * GOLDEN has no short period


def golden_point(start: int, number: int) -> int:
    """Point `number` on a circle of CIRCLE integers: every stretch of points is spread over it
    nearly evenly (Kronecker's sequence of the golden ratio; discrepancy O(log n / n))."""
    return (start + number * GOLDEN) % CIRCLE
