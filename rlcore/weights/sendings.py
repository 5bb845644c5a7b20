"""What publications that send only changes (`weights/deltas.py`) consist of, and what they took. No
torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlcore.types import WeightManifest

WIDTHS = {"float32": 4, "bfloat16": 2}  # bytes an entry


@dataclass(frozen=True, slots=True)
class Sending:
    """One version as it was sent. Example: Sending(3, [ref], 1200, 40)"""

    version: int
    parts: list[Any]  # what `put` returned, a bucket each
    bytes: int
    changed: int  # entries


@dataclass(frozen=True, slots=True)
class DeltaHandle:
    """What a receiver needs of a version: a whole set, and the patches after it in order."""

    whole: Sending
    patches: tuple[Sending, ...]

    @property
    def sent(self) -> Sending:
        """What this version alone took."""
        return self.patches[-1] if self.patches else self.whole


def sent_bytes(manifest: WeightManifest, handle: Any) -> int:
    """Bytes of a publication on its way to one actor that has the version before. `handle`: a
    transport's."""
    if isinstance(handle, DeltaHandle):
        return handle.sent.bytes
    return _entries(manifest) * WIDTHS[manifest.dtype]


def changed_share(published: Sequence[tuple[WeightManifest, Any]]) -> float:
    """Share of all entries that were sent as changed; 1 for whole sets. `published`: each set's
    manifest and handle."""
    entries = sum(_entries(manifest) for manifest, _ in published)
    changed = sum(
        handle.sent.changed if isinstance(handle, DeltaHandle) else _entries(manifest)
        for manifest, handle in published
    )
    return changed / entries if entries else 0.0


def _entries(manifest: WeightManifest) -> int:
    return sum(math.prod(shape) for shape in manifest.shapes)
