"""What engines over a request book have in common: requests in, trajectories out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rlcore.interfaces import RolloutEngine, StepLoad, Wake
from rlcore.rollout.request_book import RequestBook
from rlcore.types import Request, Trajectory


class BookedEngine(RolloutEngine):
    """A rollout engine whose requests are a `RequestBook`'s. Not thread-safe: one thread owns
    it."""

    def __init__(self, book: RequestBook) -> None:
        self._book = book
        self._ready: list[Trajectory] = []  # finished by an update

    @property
    def version(self) -> int:
        """Policy version that the tokens sampled now carry."""
        return self._book.version

    def add(self, requests: Sequence[Request], begun: Sequence[Trajectory] = ()) -> None:
        """Queue requests, all or none, some of them with the tokens that another engine sampled.
        Raises ValueError for one that the engine cannot serve."""
        self._book.add(requests, begun)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop requests; unknown ids are ignored."""
        self._book.abort(request_ids)

    def cut(self, request_ids: Iterable[str]) -> list[Trajectory]:
        """Drop requests and return what they have so far."""
        return self._book.cut(request_ids)

    def unfinished(self) -> int:
        """Requests queued, running, held back by a drain, or finished by an update and not yet
        given by `step`."""
        return self._book.unfinished() + len(self._ready)

    def step(self) -> list[Trajectory]:
        """One decode step; the trajectories that finished in it, unscored.

        Raises RuntimeError if the core failed a request.
        """
        done, self._ready = self._ready, []
        return done + self._book.decode() if self._book.active else done

    def load_of_step(self) -> StepLoad:
        """What the last step had to do."""
        return self._book.step_load

    def decoding_s(self) -> dict[str, float]:
        """Seconds of decode steps since the first output of each request that has one; waiting and
        loading weights do not count."""
        return self._book.decoding_s()

    def begin_drain(self) -> None:
        """Let the requests that have begun finish; hold back all others and all new."""
        self._book.begin_drain()

    def end_drain(self) -> None:
        """Queue what was held back, in order, under the current version."""
        self._book.end_drain()

    def drained(self) -> bool:
        """True if a drain was begun and nothing runs any more."""
        return self._book.drained()

    def sleep(self) -> float:
        """Free the memory that another process is to have; bytes freed. Requests that run, and new
        ones, are held until `wake`."""
        self._ready += self._book.settle()
        self._book.hold_all()
        return self._free()

    def wake(self, what: Wake) -> None:
        """Take memory back: first for the "weights", which may then be loaded, then for "all"."""
        self._take_back(what)
        if what == "all":
            self._book.end_drain()

    def _free(self) -> float:
        """What an engine frees in `sleep`; nothing by default."""
        return 0.0

    def _take_back(self, what: Wake) -> None:
        """Undo it."""

    def set_version(self, version: int) -> None:
        """Have tokens carry `version` from the next step on; the weights stay (a frozen draft)."""
        self._ready += self._book.settle()
        self._book.set_version(version)

    def _finish_active(self) -> None:
        """Decode what is in the core to its end."""
        while self._book.active:
            self._ready += self._book.decode()
        self._ready += self._book.settle()
