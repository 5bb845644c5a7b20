"""The manifest of a publication, and the checks that it arrived whole."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch

from rlcore.seeding import derive_seed
from rlcore.types import WeightManifest

CHUNK = 1 << 18  # elements: the int64 temporaries stay in cache
GPU_CHUNKS = 32  # at one time on a GPU: fewer kernels, and temporaries of 64 MiB
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


def _at_once(device: torch.device) -> int:
    return 1 if device.type == "cpu" else GPU_CHUNKS


@torch.no_grad()
def tensor_checksum(tensor: torch.Tensor) -> int:
    """A 63-bit checksum of a tensor's bits, order, shape and dtype.

    A weighted sum of the elements' bit patterns modulo 2**64. The weights are odd, so one altered
    element always changes the sum. They differ by position, so order counts; and integer sums do
    not depend on the order of addition, so CPU and GPU agree. It detects lost and mixed-up weights,
    not deliberate tampering.
    """
    bits = tensor.detach().reshape(-1).view(_BITS[tensor.element_size()])
    weights = _weights(bits.device)
    parts = []
    whole = bits.numel() - bits.numel() % CHUNK
    size = CHUNK * _at_once(bits.device)
    for start in range(0, whole, size):
        chunks = bits[start : min(start + size, whole)].view(-1, CHUNK).to(torch.int64)
        parts.append((chunks * weights).sum(dim=1))
    if whole < bits.numel():
        rest = bits[whole:].to(torch.int64)
        parts.append((rest * weights[: len(rest)]).sum().view(1))
    # Chunks enter by their position too, so exchanging two of them counts.
    total = 0
    for n, part in enumerate(torch.cat(parts).tolist() if parts else []):
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


class ArrivalError(RuntimeError):
    """Weights that arrived are not the ones that were published. The message names the tensors."""


def check_shapes(
    arrived: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise ValueError, naming the weight, unless both have the same names and shapes."""
    for name in [*expected, *arrived]:
        if arrived.get(name) != expected.get(name):
            raise ValueError(
                f"weights do not fit the engine's model: {name} is {arrived.get(name, 'missing')}, "
                f"the model has {expected.get(name, 'no such weight')}"
            )


def dtype_name(dtype: torch.dtype) -> str:
    """'float32' for torch.float32."""
    return str(dtype).removeprefix("torch.")


def make_manifest(
    version: int, tensors: Mapping[str, torch.Tensor], *, full: bool, seed: int, sample: int = 8
) -> WeightManifest:
    """The manifest of one publish.

    `tensors`: Hugging Face names, tied weights once, one dtype. `full`: checksum every tensor (at
    start and after a resume), else `sample` of them, chosen by (seed, version) so that all names
    are covered over time. Raises ValueError for no tensors, mixed dtypes or a tied weight under two
    names.
    """
    if not tensors:
        raise ValueError("nothing to publish: no tensors")
    dtypes = {dtype_name(t.dtype) for t in tensors.values()}
    if len(dtypes) > 1:
        raise ValueError(f"published tensors must share one dtype, got {', '.join(sorted(dtypes))}")
    _refuse_tied(tensors)
    shapes = {n: tuple(t.shape) for n, t in tensors.items()}
    return announce(
        version,
        shapes,
        dtypes.pop(),
        lambda names: ((n, tensors[n]) for n in names),
        full=full,
        seed=seed,
        sample=sample,
    )


def announce(
    version: int,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: str,
    read: Callable[[Sequence[str]], Iterable[tuple[str, torch.Tensor]]],
    *,
    full: bool,
    seed: int,
    sample: int = 8,
) -> WeightManifest:
    """The manifest of a set that need not be in memory: `read` gives the tensors of some names, one
    at a time.

    The rest is as in `make_manifest`. Ranks that choose with the same arguments read the same
    names.
    """
    names = tuple(shapes)
    # Another sample for each version; both sides find the names in the manifest.
    chosen = list(names) if full else sample_names(names, sample, seed=seed + version)
    return WeightManifest(
        version=version,
        names=names,
        shapes=tuple(shapes.values()),
        dtype=dtype,
        checksums={n: tensor_checksum(t) for n, t in read(chosen)},
        full=full or len(chosen) == len(names),
    )


def _refuse_tied(tensors: Mapping[str, torch.Tensor]) -> None:
    seen: dict[tuple[int, torch.Size], str] = {}
    for name, t in tensors.items():
        if t.numel() == 0:  # empty tensors all have the null pointer
            continue
        other = seen.setdefault((t.data_ptr(), t.shape), name)
        if other != name:
            raise ValueError(f"{name} and {other} share one storage: publish a tied weight once")


def verify_checksums(manifest: WeightManifest, held: Mapping[str, int]) -> None:
    """Raise ArrivalError unless `held`, an engine's checksums, agrees with the manifest's."""
    problems = []
    for name, expected in manifest.checksums.items():
        if name not in held:
            problems.append(f"{name} has no checksum")
        elif held[name] != expected:
            problems.append(f"{name} differs from what was published")
    _raise(manifest, problems)


def _raise(manifest: WeightManifest, problems: list[str]) -> None:
    if problems:
        shown = "; ".join(problems[:5]) + (
            "" if len(problems) <= 5 else f"; and {len(problems) - 5} more"
        )
        raise ArrivalError(f"weights of version {manifest.version} did not arrive whole: {shown}")
