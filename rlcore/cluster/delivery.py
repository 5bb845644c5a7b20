"""Sends finished trajectories from a rollout actor, in its own thread, so that the engine thread
only queues them. Independent of Ray."""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError

from rlcore.cluster.calls import DEAD
from rlcore.rollout.text import StopStrings, read_answer
from rlcore.serialization import dump_trajectory, dump_unusable, require_trainable
from rlcore.types import Answer, Played, Score, Trajectory

MAX_UNDELIVERED = 64  # messages in transit above which delivery waits
RECHECK_S = 1.0
LOOK_S = 5.0  # between two searches for the own node's process


class NodeOutlet:
    """Calls one method of the actor with a name, or of another actor where no actor has that name.
    Waits while too many messages have not arrived: a slow receiver must not fill this process's
    memory. Messages that a process of the own node did not take before it died go to the other
    actor. So do all others until a process has that name again. A receiver reports its own errors.
    """

    def __init__(self, method: str, near: str, far: Any) -> None:
        """`near`: name of the process on this node; "": there is none. `far`: handle of the one on
        the driver's node."""
        self._method = method
        self._name = near
        self._near: Any = None
        self._far = far
        self._look_at = -math.inf if near else math.inf  # when to look for one of that name
        self._sent: dict[Any, list[Any]] = {}  # by reference of the call; empty: not sent again

    def __call__(self, message: list[Any]) -> None:
        self._send(message)
        while len(self._sent) > MAX_UNDELIVERED:
            self._settle(RECHECK_S)
        self._settle(0.0)

    def _send(self, message: list[Any]) -> None:
        target = self._target()
        ref = getattr(target, self._method).remote(message)
        self._sent[ref] = message if target is self._near else []

    def _target(self) -> Any:
        if self._near is None and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_S
            with contextlib.suppress(ValueError):  # there is none, or not yet
                self._near = ray.get_actor(self._name)
        return self._far if self._near is None else self._near

    def _settle(self, timeout_s: float) -> None:
        """Account for the messages that have arrived."""
        waiting = list(self._sent)
        done, _ = ray.wait(
            waiting, num_returns=len(waiting) if not timeout_s else 1, timeout=timeout_s
        )
        for ref in done:
            message = self._sent.pop(ref)
            if message and _died(ref):
                self._near = None
                self._look_at = time.monotonic() + LOOK_S  # its name may outlive it for a moment
                self._send(message)


def _died(ref: Any) -> bool:
    """Return whether the process died before it answered."""
    try:
        ray.get(ref)
    except DEAD:
        return True
    except RayError:
        return False
    return False


@dataclass(frozen=True, slots=True)
class Outlets:
    """Destinations. Each call may block while earlier messages are still in transit."""

    records: Callable[[list[bytes]], None]  # serialised training trajectories, to the buffer
    answers: Callable[[list[Answer]], None]  # to the graders
    # of episodes, which their environments have graded: past the graders
    scored: Callable[[list[tuple[Answer, Score]]], None]
    delivered: Callable[[list[Trajectory]], None]  # afterwards
    # adds a teacher's scores to training trajectories, in place; None: there is no such teacher
    taught: Callable[[list[Trajectory]], None] | None = None


class Delivery:
    """Serialises each trajectory once and decodes its text. Evaluation trajectories go to the
    graders alone, with the text of their prompt. A trajectory that cannot be trained on, or that
    has no text, fails its sample."""

    def __init__(
        self,
        outlets: Outlets,
        decode: Callable[..., str],
        stop: StopStrings,
        in_pieces: frozenset[str] = frozenset(),
        raw: frozenset[str] = frozenset(),
        vocab_size: int | None = None,
    ) -> None:
        """`decode`: token ids to text, which keeps special tokens with `special=True`. `stop`:
        strings that text is cut before. `in_pieces`: tasks whose graders ask for the text of every
        token. `raw`: tasks whose graders see special tokens. `vocab_size`: of the policy."""
        self.error: BaseException | None = None  # what ended the thread
        self._outlets = outlets
        self._decode = decode
        self._stop = stop
        self._in_pieces = in_pieces
        self._raw = raw
        self._vocab_size = vocab_size
        self._queue: queue.SimpleQueue[list[Trajectory | Played] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="delivery", daemon=True)
        self._thread.start()

    def put(self, finished: Sequence[Trajectory | Played]) -> None:
        """Queue trajectories of one turn, or episodes. Never blocks."""
        self._queue.put(list(finished))

    def close(self, timeout_s: float) -> None:
        """Send what is queued and end."""
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while (batch := self._next()) is not None:
                self._send(batch)
        # any error: the actor reports it with its next heartbeat and is replaced
        except BaseException as e:
            self.error = e

    def _next(self) -> list[Trajectory | Played] | None:
        """All queued batches, at least one; None at the end."""
        batch = self._queue.get()
        while batch is not None and not self._queue.empty():
            more = self._queue.get()
            if more is None:
                self._queue.put(None)
                break
            batch = batch + more
        return batch

    def _send(self, batch: list[Trajectory | Played]) -> None:
        plain = [t for t in batch if isinstance(t, Trajectory)]
        episodes = [e for e in batch if isinstance(e, Played)]
        sent = [*plain, *(t for e in episodes for t in e.parts)]
        training = [t for t in sent if t.purpose == "train"]
        if training:
            if self._outlets.taught is not None:
                self._outlets.taught([t for t in training if self._trainable(t)])
            self._outlets.records([self._record(t) for t in training])
        scored = [(e.answer, e.score) for e in episodes]
        answers = []
        for t in plain:
            try:
                answers.append(self._answer(t))
            except Exception as e:  # any error of a tokenizer at these tokens
                scored.append(_unreadable(t, e))
        if answers:
            self._outlets.answers(answers)
        if scored:
            self._outlets.scored(scored)
        self._outlets.delivered(sent)

    def _record(self, t: Trajectory) -> bytes:
        try:
            require_trainable(t, self._vocab_size)
            return dump_trajectory(t)
        except Exception as e:  # a user's engine or environment may return anything
            return dump_unusable(t, f"{t.actor_id} gave a malformed record: {e}")

    def _trainable(self, t: Trajectory) -> bool:
        """Return whether `_record` will find nothing wrong with the values of a record."""
        try:
            require_trainable(t, self._vocab_size)
        except Exception:  # it says what
            return False
        return True

    def _answer(self, t: Trajectory) -> Answer:
        prompt = "" if t.purpose == "train" else self._decode(t.prompt_ids.tolist())
        label = t.prompt_id.partition("/")[0]
        decode = partial(self._decode, special=True) if label in self._raw else self._decode
        stop = self._stop.of(t.prompt_id)
        return read_answer(t, decode, stop, prompt=prompt, in_pieces=label in self._in_pieces)


def _unreadable(t: Trajectory, error: Exception) -> tuple[Answer, Score]:
    """An answer without text, and its failed score."""
    ids = t.group_id, t.sample_index, t.draw_id
    answer = Answer(*ids, t.prompt_id, "", 0, finish_reason=t.finish_reason, purpose=t.purpose)
    why = f"the tokens cannot be decoded ({type(error).__name__}: {error})"
    return answer, Score(*ids, "error", error=why)
