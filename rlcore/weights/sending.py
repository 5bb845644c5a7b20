"""A publication as it was sent, and the processes that it goes to. No torch: the driver of a run
reads these."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
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
    """The parts of a version that a receiver loads: a whole set, and the patches after it in
    order."""

    whole: Sending
    patches: tuple[Sending, ...]

    @property
    def sent(self) -> Sending:
        """The size of this version's own part."""
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


class Receivers(ABC):
    """The processes that a publication goes to. All have stopped for it."""

    @property
    @abstractmethod
    def members(self) -> Sequence[str]:
        """One name a process; a replacement has another."""

    @property
    @abstractmethod
    def ranks(self) -> Sequence[int]:
        """Processes that hold the model of each."""

    @abstractmethod
    def start(self, verb: str, payloads: Sequence[Any]) -> Callable[[], None]:
        """Ask each one (`Arrival.ask`); the function returned waits for all answers."""
