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
    parts: list[Any]  # what `put` returned, a bucket each; none of what a group was sent
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
    transport's, or what a group's sender returned."""
    sending = _sending(handle)
    return _entries(manifest) * WIDTHS[manifest.dtype] if sending is None else sending.bytes


def changed_share(published: Sequence[tuple[WeightManifest, Any]]) -> float:
    """Share of all entries that were sent as changed; 1 for whole sets. `published`: each set's
    manifest and handle."""
    entries = sum(_entries(manifest) for manifest, _ in published)
    changed = sum(
        _entries(manifest) if (sending := _sending(handle)) is None else sending.changed
        for manifest, handle in published
    )
    return changed / entries if entries else 0.0


def _sending(handle: Any) -> Sending | None:
    """None for a whole set."""
    handle = handle.sent if isinstance(handle, DeltaHandle) else handle
    return handle if isinstance(handle, Sending) else None


def _entries(manifest: WeightManifest) -> int:
    return sum(math.prod(shape) for shape in manifest.shapes)
