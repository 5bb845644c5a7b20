"""Rollout actors as the learner's sender of weights calls them, over Ray."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from rlcore.weights.group import Receivers


@dataclass(frozen=True, slots=True)
class RayReceivers(Receivers):
    """Actors that have stopped for a publication. Travels to the learner's ranks."""

    handles: Sequence[Any]
    sizes: Sequence[int]  # processes that hold the model of each
    timeout_s: float

    @property
    def ranks(self) -> Sequence[int]:
        return self.sizes

    @property
    def members(self) -> Sequence[str]:
        """Ray's ids: a replacement has another."""
        return [handle._actor_id.hex() for handle in self.handles]

    def start(self, verb: str, payloads: Sequence[Any]) -> Callable[[], None]:
        refs = [h.transfer.remote(verb, p) for h, p in zip(self.handles, payloads, strict=True)]

        def wait() -> None:
            ray.get(refs, timeout=self.timeout_s)

        return wait
