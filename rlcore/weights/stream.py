"""Sets of weights in buckets of bounded size: checked against what was announced as they pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from rlcore.interfaces import WeightStream
from rlcore.types import WeightManifest
from rlcore.weights.manifest import ArrivalError, dtype_name

Pairs = Iterable[tuple[str, torch.Tensor]]


def whole(tensors: Mapping[str, torch.Tensor]) -> WeightStream:
    """A set that is in memory already, as one bucket."""
    return WeightStream({n: tuple(t.shape) for n, t in tensors.items()}, [tensors])


def announced(
    manifest: WeightManifest, buckets: Iterable[Mapping[str, torch.Tensor]]
) -> WeightStream:
    """Return a publication as the stream that an engine loads."""
    shapes = dict(zip(manifest.names, manifest.shapes, strict=True))
    proven = tuple(manifest.checksums)
    return WeightStream(shapes, buckets, proven, manifest.precise_layers)


def in_order(manifest: WeightManifest, tensors: Pairs) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors, checked to be exactly the announced ones in the announced order.

    Raises ArrivalError at the first that is missing, unknown or different.
    """
    passing = iter(tensors)
    nothing = (None, None)
    for name, shape in zip(manifest.names, manifest.shapes, strict=True):
        found, tensor = next(passing, nothing)
        if found != name or tensor is None:
            raise _error(manifest, f"{name} is missing ({found or 'nothing'} came in its place)")
        _check(manifest, name, shape, tensor)
        yield name, tensor
        del tensor  # else it would stay in memory while the next one is made
    if (extra := next(passing, nothing)[0]) is not None:
        raise _error(manifest, f"{extra} was not announced")


def arriving(
    manifest: WeightManifest, buckets: Iterable[Mapping[str, torch.Tensor]]
) -> Iterator[Mapping[str, torch.Tensor]]:
    """The buckets as they come, checked to hold each announced tensor once.

    Raises ArrivalError for a wrong tensor before its bucket is given, and for missing ones at the
    end.
    """
    shapes = dict(zip(manifest.names, manifest.shapes, strict=True))
    for bucket in buckets:
        for name, tensor in bucket.items():
            if name not in shapes:
                raise _error(manifest, f"{name} was not announced, or came twice")
            _check(manifest, name, shapes.pop(name), tensor)
        yield bucket
        del bucket
    if shapes:
        others = f" (and {len(shapes) - 1} more)" if len(shapes) > 1 else ""
        raise _error(manifest, f"{next(iter(shapes))} is missing{others}")


def in_buckets(tensors: Pairs, limit: int) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors in buckets of at most `limit` bytes; a larger tensor has its own.

    Nothing of a bucket is kept here once the next one is asked for.
    """
    bucket: dict[str, torch.Tensor] = {}
    held = 0
    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if bucket and held + size > limit:
            yield bucket
            bucket = {}
            held = 0
        bucket[name] = tensor
        held += size
        del tensor
    if bucket:
        yield bucket


def _check(
    manifest: WeightManifest, name: str, shape: tuple[int, ...], tensor: torch.Tensor
) -> None:
    if tuple(tensor.shape) != tuple(shape):
        raise _error(manifest, f"{name} has shape {tuple(tensor.shape)}, announced {shape}")
    if dtype_name(tensor.dtype) != manifest.dtype:
        raise _error(manifest, f"{name} is {dtype_name(tensor.dtype)}, announced {manifest.dtype}")


def _error(manifest: WeightManifest, problem: str) -> ArrivalError:
    return ArrivalError(f"weights of version {manifest.version} did not arrive whole: {problem}")
