"""Weights that an engine's own workers receive, such as vLLM's. No torch, no vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rlcore.types import WeightManifest
from rlcore.weights.arrival import Arrival


class EngineTransfer:
    """Stands in for the buckets of a `WeightStream`: an engine that knows how receives them without
    this process seeing a tensor."""

    def __init__(self, arrival: Arrival) -> None:
        self._arrival = arrival

    def serve(self, carry_out: Callable[[str, Any], None]) -> None:
        """Engine's thread: carry out what the sender asks, (verb, payload), until it finishes.

        Raises what `carry_out` raised, which the sender learns too, and DeadlineExceeded if the
        sender is silent for too long.
        """
        for request in self._arrival.requests():
            with request:
                carry_out(request.verb, request.payload)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        raise RuntimeError("this engine cannot receive weights by itself: use object_store or disk")


class EngineReceiver:
    """A receiving process whose engine joins the learner's group with its workers."""

    def buckets(self, manifest: WeightManifest, arrival: Arrival) -> Any:
        """As of a `WeightStream`."""
        return EngineTransfer(arrival)
