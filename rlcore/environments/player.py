"""Plays episodes next to an engine: sample, parse, step in the environment's process, extend,
sample on. Many episodes at once, so that a slow environment never holds up the engine.

A turn is an ordinary request of the engine: publications and counters know nothing of episodes,
and the engine's prefix cache holds the turns before. One thread does everything between two turns;
it waits for environments and for the engine together, and neither waits for it.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from rlcore.environments.play import Play
from rlcore.environments.specs import EnvironmentJob
from rlcore.errors import DeadlineExceeded
from rlcore.tasks import parse_prompt_id
from rlcore.types import ActorKind, Played, Request, Trajectory, is_turn

MAX_WAIT_S = 0.5  # between two looks at the deadlines


class EngineSampler(Protocol):
    """The calls of the player to the thread that owns the engine."""

    def submit(self, requests: Sequence[Request]) -> Future[None]:
        """Queue turns."""

    def abort(self, request_ids: Iterable[str]) -> Future[None]:
        """Drop turns."""


@dataclass(frozen=True, slots=True)
class Exits:
    """Where finished work goes; both are called from other threads and return at once."""

    played: Callable[[list[Played]], None]
    others: Callable[[list[Trajectory]], None]  # answers of one turn, which are no episode's


class EpisodePlayer:
    """The episodes of one actor. All methods may be called from any thread and return at once."""

    def __init__(
        self, job: EnvironmentJob, tokenizer: Any, actor: tuple[str, ActorKind], exits: Exits
    ) -> None:
        """`actor`: id and kind. Starts the environments' process; raises StageError."""
        self.error: BaseException | None = None  # what ended the thread
        self._exits = exits
        self._play = Play(job, tokenizer, actor)
        # from other threads
        self._lock = threading.Lock()
        self._inbox: list[tuple[str, Any]] = []
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._closing = False

    # -- called by any thread ----------------------------------------------------------------------

    def start(self, sampler: EngineSampler) -> None:
        """Begin to play."""
        self._sampler = sampler
        self._thread = threading.Thread(target=self._main, name="episodes", daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue episodes."""
        self._put("play", list(requests))

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop episodes; unknown ids are ignored."""
        self._put("abort", set(request_ids))

    def finished(self, turns: list[Trajectory]) -> None:
        """Turns, from the engine's thread."""
        self._put("turns", turns)

    def status(self) -> dict[str, float]:
        """Figures of `Play.figures`."""
        return self._play.figures()

    def _put(self, what: str, value: Any) -> None:
        with self._lock:
            self._inbox.append((what, value))
        with contextlib.suppress(BlockingIOError):  # it has been woken often enough
            self._wake.send(b"x")

    def end_processes(self) -> None:
        """End the environments of a player that was never started."""
        self._play.close()

    def close(self, timeout_s: float = 30.0) -> None:
        """End the thread and every environment; open episodes are lost."""
        self._closing = True
        self._put("close", None)
        self._thread.join(timeout_s)
        self._play.close()
        if self._thread.is_alive():
            raise DeadlineExceeded(f"the episodes' thread did not end within {timeout_s:g} s")

    # -- the thread --------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            while not self._closing:
                self._turn()
        # whatever it was, the actor reports it with its next heartbeat and is replaced
        except BaseException as e:
            self.error = e

    def _turn(self) -> None:
        play = self._play
        play.wait(MAX_WAIT_S, self._woken.fileno())
        for what, value in self._taken():
            if what == "play":
                play.add(value)
            elif what == "abort":
                play.drop(value)
            elif what == "turns":
                for turn in value:
                    play.sampled(turn)
        play.check_deadlines()
        play.begin_waiting()
        self._pass_on()

    def _taken(self) -> list[tuple[str, Any]]:
        # before the inbox is taken: what comes in between wakes this thread once more
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(1 << 16)
        with self._lock:
            inbox, self._inbox = self._inbox, []
        return inbox

    def _pass_on(self) -> None:
        """Turns to the engine, together; episodes that are over to the buffer."""
        play = self._play
        if play.to_abort:
            ids, play.to_abort = play.to_abort, []
            self._sampler.abort(ids)
        if play.to_sample:
            turns, play.to_sample = play.to_sample, []
            self._sampler.submit(turns).add_done_callback(self._submitted)
        if play.done:
            done, play.done = play.done, []
            self._exits.played(done)

    def _submitted(self, submission: Future[None]) -> None:
        error = submission.exception()
        if error is not None:  # what an engine may refuse was checked before
            self.error = error


class Players:
    """All methods may be called from any thread and return at once."""

    def __init__(
        self,
        jobs: Sequence[EnvironmentJob],
        tokenizers: Sequence[Any],
        actor: tuple[str, ActorKind],
        exits: Exits,
    ) -> None:
        """`tokenizers`: one for each job, since they are not made for two threads. `actor`: id and
        kind. Starts the environments' processes; raises StageError."""
        self._exits = exits
        self._players: dict[str, EpisodePlayer] = {}
        try:
            for job, tokenizer in zip(jobs, tokenizers, strict=True):
                self._players[job.label] = EpisodePlayer(job, tokenizer, actor, exits)
        except BaseException:
            for player in self._players.values():
                player.end_processes()
            raise

    @property
    def error(self) -> BaseException | None:
        """The error that ended one of the threads."""
        return next((p.error for p in self._players.values() if p.error is not None), None)

    def start(self, sampler: EngineSampler) -> None:
        """Begin to play."""
        for player in self._players.values():
            player.start(sampler)

    def plays(self, request: Request) -> bool:
        """Return whether a request is an episode; others are answered in one turn."""
        return _task(request) in self._players

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue episodes."""
        for label, player in self._players.items():
            if own := [r for r in requests if _task(r) == label]:
                player.submit(own)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop episodes; unknown ids are ignored."""
        ids = list(request_ids)
        for player in self._players.values():
            player.abort(ids)

    def finished(self, trajectories: list[Trajectory]) -> None:
        """From the engine's thread: turns, and answers that belong to no episode."""
        turns = [t for t in trajectories if is_turn(t.purpose)]
        for label, player in self._players.items():
            if own := [t for t in turns if _task(t) == label]:
                player.finished(own)
        if others := [t for t in trajectories if not is_turn(t.purpose)]:
            self._exits.others(others)

    def status(self) -> dict[str, float]:
        """Figures of `Play.figures`, summed over all."""
        total: dict[str, float] = {}
        for player in self._players.values():
            for name, value in player.status().items():
                total[name] = total.get(name, 0) + value
        return total

    def close(self) -> None:
        """End the threads and every environment; open episodes are lost."""
        with ExitStack() as closing:  # all of them, whatever one raises
            for player in self._players.values():
                closing.callback(player.close)


def _task(sample: Request | Trajectory) -> str:
    return parse_prompt_id(sample.prompt_id)[0]
