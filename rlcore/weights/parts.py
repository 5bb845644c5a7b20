"""Sets of weights in several parts, which other actors may load alone: the policy's weights and an
adapter over them. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlcore.interfaces import WeightTransport
from rlcore.types import WeightManifest

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class InParts:
    """A transport's handles of one set in several parts, of which others receive some as well."""

    parts: Sequence[tuple[WeightManifest, Any]]  # of each part, with its handle


def together(manifests: Sequence[WeightManifest]) -> WeightManifest:
    """The manifest of one set that is published in several parts, of one version and dtype.

    Raises ValueError if they differ in those or share a name.
    """
    names = tuple(n for m in manifests for n in m.names)
    if len(set(names)) < len(names) or len({(m.version, m.dtype) for m in manifests}) > 1:
        raise ValueError("parts of a set must have one version, one dtype and names of their own")
    return WeightManifest(
        version=manifests[0].version,
        names=names,
        shapes=tuple(s for m in manifests for s in m.shapes),
        dtype=manifests[0].dtype,
        checksums={n: c for m in manifests for n, c in m.checksums.items()},
        full=all(m.full for m in manifests),
    )


def receive(
    transport: WeightTransport, manifest: WeightManifest, handle: Any
) -> Iterator[Mapping[str, torch.Tensor]]:
    """`WeightTransport.receive` of a set that may be in parts."""
    for own, its in handle.parts if isinstance(handle, InParts) else [(manifest, handle)]:
        yield from transport.receive(own, its)
