"""Synchronisation of a receiver that has stopped for new weights with the calls of their sender.

The loop has every receiver stop between two steps first and lets the learner send only then. So a
collective never begins before all of its ranks are there to enter it. No torch.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from rlcore.errors import DeadlineExceeded
from rlcore.types import WeightManifest

FINISH = "finish"  # the verb of the last request of a publication
PATCHES = "patches"  # what "begin" carries where only changes follow


@dataclass(slots=True)
class TransferRequest:
    """A sender's request to a receiver. As a context manager it sends the answer on exit."""

    verb: str
    payload: Any
    answer: Future[None] = field(default_factory=Future)

    def __enter__(self) -> TransferRequest:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.answer.set_result(None)
        else:
            self.answer.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))


class Arrival:
    """One publication at one receiver: its engine's thread takes requests, any other makes them."""

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s`: the longest wait of either side for the other."""
        self.reached: Future[None] = Future()  # the receiver has stopped and takes requests
        self.seconds = 0.0  # from there to the last request's answer
        self._timeout_s = timeout_s
        self._requests: queue.Queue[TransferRequest] = queue.Queue()

    def ask(self, verb: str, payload: Any = None) -> None:
        """Return when the receiver has carried out the request. Raises the receiver's exception, or
        TimeoutError."""
        request = TransferRequest(verb, payload)
        self._requests.put(request)
        request.answer.result(self._timeout_s)

    def requests(self) -> Iterator[TransferRequest]:
        """Yield the sender's requests until it has finished. Each is to be answered before the
        next.

        Raises DeadlineExceeded if the sender is silent for too long.
        """
        begun = time.monotonic()
        self.reached.set_result(None)
        verb = ""
        while verb != FINISH:
            try:
                request = self._requests.get(timeout=self._timeout_s)
            except queue.Empty as e:
                raise DeadlineExceeded(
                    f"waited {self._timeout_s:g} s for the learner to send weights "
                    f"(schedule.publish_timeout_s={self._timeout_s:g})."
                ) from e
            verb = request.verb
            yield request
            self.seconds = time.monotonic() - begun


class EngineTransfer:
    """Replaces the buckets of a `WeightStream` for an engine that receives weights itself, without
    a tensor in this process."""

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
