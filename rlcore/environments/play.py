"""The steps of one actor's episodes between two turns, without threads.

Every call returns at once. What is to be sampled, dropped or delivered is collected, and
`environments/player.py` passes it on.
"""

from __future__ import annotations

import itertools
import os
import secrets
import select
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlcore.environments.episode import Conversation, EpisodeState
from rlcore.environments.episode_processes import EnvironmentDied, EnvironmentServer, Link
from rlcore.environments.protocol import Opening, Renderer
from rlcore.environments.specs import EnvironmentJob
from rlcore.errors import StageError
from rlcore.models.text import decode_response, encode_text
from rlcore.rooms import from_room
from rlcore.seeding import derive_seed
from rlcore.types import ActorKind, Played, Request, ScoreStatus, Trajectory

SERVER_RESTARTS = 3  # of the environments' process
RESTARTS_S = 3600.0  # within so long
EPISODES_A_PROCESS = 500  # one after the other, in case an environment leaks memory
CUT = " [cut: {} more tokens]"
TURNS, LENGTH = "environment.max_turns", "model.max_len"  # limits that end an episode


class Play:
    """The open episodes of one actor, and the queue for a place."""

    def __init__(
        self,
        job: EnvironmentJob,
        tokenizer: Any,
        actor: tuple[str, ActorKind],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`actor`: id and kind; `clock`: seconds, by which restarts are counted. Starts the
        environments' process; raises StageError."""
        # since the start
        self.counters = {"episodes": 0, "turns": 0, "failed_episodes": 0}
        self.counters |= {"errors": 0, "timeouts": 0, "unreadable_turns": 0, "calls": 0}
        self.environment_s = 0.0  # of all calls that were answered
        self.open: dict[str, EpisodeState] = {}  # by request id
        self.to_sample: list[Request] = []  # turns
        self.to_abort: list[str] = []  # request ids of turns
        self.done: list[Played] = []
        self._waiting: deque[Request] = deque()
        self._job = job
        self._tokenizer = tokenizer
        self._actor = actor
        self._server = EnvironmentServer(job)
        self._clock = clock
        self._restarts: deque[float] = deque()  # when; those of the last RESTARTS_S
        self._idle: list[Link] = []  # to processes without an episode
        self._names = f"{actor[0]}:{os.getpid()}-{secrets.token_hex(4)}:e"
        self._count = itertools.count()

    def add(self, requests: Sequence[Request]) -> None:
        """Queue episodes."""
        self._waiting.extend(requests)

    def begin_waiting(self) -> None:
        """Begin as many episodes as there are places for."""
        while self._waiting and len(self.open) < self._job.environment.concurrency:
            self._begin(self._waiting.popleft())

    def drop(self, ids: set[str]) -> None:
        """Forget episodes; unknown ids are ignored."""
        self._waiting = deque(r for r in self._waiting if r.request_id not in ids)
        for request_id in ids:
            episode = self.open.pop(request_id, None)
            if episode is not None:
                self._abort_turns(episode)
                self._release(episode, reuse=False)

    def sampled(self, turn: Trajectory) -> None:
        """A turn that the engine has sampled."""
        name = turn.purpose
        episode = next((e for e in self.open.values() if name in e.sampling), None)
        if episode is not None:
            episode.now = episode.sampling.pop(name)
            self.counters["turns"] += 1
            self._guarded(episode, lambda e: self._act(e, turn))

    def figures(self) -> dict[str, float]:
        """Counts since the start, seconds of environments, and the episodes that are open or wait
        for a place."""
        now = {"open": len(self.open), "waiting": len(self._waiting)}
        return {**self.counters, **now, "environment_s": self.environment_s}

    @property
    def busy(self) -> bool:
        """True if any episode is open or waits."""
        return bool(self.open or self._waiting)

    def wait(self, limit_s: float, other: int | None = None) -> None:
        """Take the answers of environments. Returns at the first of them, when the file `other` is
        readable, when a call passes its deadline, or after `limit_s`."""
        now = time.monotonic()
        calls = {e.link.fileno(): e for e in self.open.values() if e.waits_for and e.link}
        first = min([e.deadline for e in calls.values() if not e.sampling], default=np.inf)
        poll = select.poll()
        for fd in (*calls, *(() if other is None else (other,))):
            poll.register(fd, select.POLLIN)
        for fd, _ in poll.poll(1000 * max(0.0, min(limit_s, first - now))):
            if fd in calls:
                self._guarded(calls[fd], self._receive)
            while fd in calls and (link := calls[fd].link) is not None and link.has_more:
                self._guarded(calls[fd], self._receive)

    def close(self) -> None:
        """End the server, and with it every environment."""
        self._server.close()

    def _begin(self, request: Request) -> None:
        if request.request_id in self.open:  # it is asked for again while it is still played
            self.drop({request.request_id})
        number, first = next(self._count), Conversation(self._renderer())
        episode = EpisodeState(request, f"{self._names}{number}", number, first)
        episode.ends_at = time.monotonic() + self._job.environment.episode_timeout_s
        self.open[request.request_id] = episode
        self.counters["episodes"] += 1
        self._guarded(episode, self._reset)

    def _renderer(self) -> Renderer:
        return from_room("make_renderer")(self._tokenizer, self._job.template, self._job.stop)

    def _reset(self, episode: EpisodeState) -> None:
        episode.link = self._linked()
        r = episode.request
        # the same for all samples of a group, and for one that is drawn again
        index = r.group_id if r.purpose == "train" else r.prompt_id
        kind = r.purpose.split("/")[0]
        seed = derive_seed(self._job.run_seed, "environment", kind, index)
        sampling = {
            "evaluates": r.purpose != "train",
            "temperature": r.sampling.temperature,
            "top_p": r.sampling.top_p,
            "stop": list(r.sampling.stop),
            "max_len": self._job.max_len,
        }
        self._call(episode, "reset", prompt_id=r.prompt_id, seed=seed, sampling=sampling)

    def _linked(self) -> Link:
        while self._idle:
            link = self._idle.pop()
            if link.alive:
                return link
            link.kill()
        try:
            return self._server.open()
        except StageError:
            now = self._clock()
            self._restarts.append(now)
            while now - self._restarts[0] > RESTARTS_S:
                self._restarts.popleft()
            if len(self._restarts) > SERVER_RESTARTS:
                raise
            self._server.close()
            self._server = EnvironmentServer(self._job)
            self._idle = []
            return self._server.open()

    def _call(self, episode: EpisodeState, name: str, **arguments: Any) -> None:
        assert episode.link is not None
        episode.link.call(name, **arguments)
        episode.waits_for = "step" if name in ("listen", "refuse") else name
        episode.begun = time.monotonic()
        limit = episode.begun + self._job.environment.step_timeout_s
        episode.deadline = min(limit, episode.ends_at)

    def _guarded(self, episode: EpisodeState, act: Callable[[EpisodeState], None]) -> None:
        """Run `act`; an error of an environment or its renderer fails its own episode alone."""
        try:
            act(episode)
        except EnvironmentDied as error:
            doing = f" during {episode.waits_for}" if episode.waits_for else ""
            self._fail(episode, "error", f"{error}{doing}")
        except StageError:
            raise
        except Exception as error:  # of any kind: a chat template may raise what it likes
            self._fail(episode, "error", f"{type(error).__name__}: {error}")

    def _receive(self, episode: EpisodeState) -> None:
        assert episode.link is not None
        answer = episode.link.receive()
        if answer is None:
            return
        now = time.monotonic()
        episode.environment_s += now - episode.begun
        self.environment_s += now - episode.begun
        self.counters["calls"] += 1
        episode.begun = now
        call = answer["call"]
        episode.waits_for = episode.waits_for if episode.link.owes else ""
        if "error" in answer:
            self._fail(episode, "error", str(answer["error"]))
        elif call == "reset":
            self._begun(episode, answer)
        elif call == "grade":
            episode.forget(answer["unread"])
            self._finish(episode, "ok", **episode.graded(answer))
        elif episode.hosts_program:
            self._serve(episode, answer)
        else:
            self._answer(episode, answer)

    def _begun(self, episode: EpisodeState, answer: dict[str, Any]) -> None:
        episode.hosts_program = answer["hosts_program"]
        if episode.hosts_program:
            self._serve(episode, answer)
            return
        episode.once = bool(answer.get("once"))
        episode.max_tokens = answer["max_tokens"]
        episode.now.ids = self._opening(episode, answer)
        self._sample(episode)

    def _serve(self, episode: EpisodeState, answer: dict[str, Any]) -> None:
        """The calls that a program has made: each is a turn, in addition to the sampled ones."""
        assert episode.link is not None
        if answer["over"]:
            self._abort_turns(episode)
            if episode.waits_for != "grade":
                self._call(episode, "grade")
            return
        for call in answer["calls"]:
            episode.max_tokens = call["max_tokens"]
            self._turn_of_program(episode, call)
        if not episode.link.owes:  # it listens for further calls while turns are sampled
            self._call(episode, "listen")

    def _turn_of_program(self, episode: EpisodeState, call: dict[str, Any]) -> None:
        """Have the engine answer a call of a program, or refuse it where a limit is reached; the
        others go on."""
        number, ids, kept = call["conversation"], None, False
        limit = TURNS if episode.asked >= self._job.environment.max_turns else ""
        if limit:
            pass
        elif call["opening"] is not None:
            renderer = self._renderer()
            ids = renderer.open(Opening(call["opening"]["messages"], call["opening"]["tools"]))
            if number:
                episode.begin_conversation(renderer, number)
            else:
                episode.now.renderer = renderer
        else:
            episode.now = episode.conversations[number]
            ids, kept = self._extended(episode, call["messages"])
        if ids is not None and len(ids) >= self._job.max_len:
            limit, episode.out_of_room = LENGTH, True
        if limit or ids is None:
            self._call(episode, "refuse", conversation=number, limit=limit)
            return
        if kept or (not number and not episode.turns[0]):
            episode.now.ids = ids
        else:
            episode.begin_part(ids)
        episode.out_of_room = False
        self._sample(episode)

    def _opening(self, episode: EpisodeState, answer: dict[str, Any]) -> list[int]:
        ids = episode.now.renderer.open(Opening(answer["messages"], answer["tools"]))
        if not 0 < len(ids) < self._job.max_len:
            raise ValueError(
                f"an opening of {len(ids)} tokens does not fit model.max_len={self._job.max_len}"
            )
        return ids

    def _sample(self, episode: EpisodeState) -> None:
        """Have the engine sample the next turn."""
        self.to_sample.append(episode.next_request())

    def _act(self, episode: EpisodeState, turn: Trajectory) -> None:
        action = episode.now.renderer.parse(episode.add(turn))
        self.counters["unreadable_turns"] += bool(action.error)
        if action.error and not episode.hosts_program:
            self._go_on(episode, [{"role": "user", "content": action.error}])
            return
        calls = [{"name": c.name, "arguments": dict(c.arguments)} for c in action.tool_calls]
        episode.stepped.append(episode.count - 1)
        said = {"text": action.text, "reasoning": action.reasoning, "whole": action.whole}
        told = {"finish_reason": turn.finish_reason, "tool_calls": calls}
        tokens = [len(turn.prompt_ids), len(turn.sampled_ids)]
        number = episode.now.number
        self._call(episode, "step", **said, **told, tokens=tokens, conversation=number)

    def _answer(self, episode: EpisodeState, answer: dict[str, Any]) -> None:
        for name, value in answer["parts"].items():
            episode.step_parts[name] = episode.step_parts.get(name, 0.0) + value
        if answer["reward"] is not None:
            episode.rewards[episode.stepped[-1]] = answer["reward"]
        episode.max_tokens = answer["max_tokens"]
        if answer["over"]:
            self._call(episode, "grade")
        elif answer["opening"] is not None:
            self._turn_to(episode, answer["opening"])
        else:
            if answer["conversation"] is not None:
                episode.now = episode.conversations[answer["conversation"]]
            self._go_on(episode, answer["messages"])

    def _turn_to(self, episode: EpisodeState, opening: dict[str, Any]) -> None:
        """A further conversation, or the grade where a limit ends the episode."""
        if episode.count >= self._job.environment.max_turns:
            self._call(episode, "grade", limit=TURNS)
            return
        renderer = self._renderer()
        ids = renderer.open(Opening(opening["messages"], opening["tools"]))
        if len(ids) >= self._job.max_len:
            episode.out_of_room = True
            self._call(episode, "grade", limit=LENGTH)
            return
        episode.begin_conversation(renderer, len(episode.conversations))
        episode.begin_part(ids)
        self._sample(episode)

    def _go_on(self, episode: EpisodeState, messages: list[dict[str, Any]]) -> None:
        """The next turn, or the grade where a limit ends the episode."""
        if episode.count >= self._job.environment.max_turns:
            self._call(episode, "grade", limit=TURNS)
            return
        ids, kept = self._extended(episode, messages)
        if len(ids) >= self._job.max_len:
            episode.out_of_room = True
            self._call(episode, "grade", limit=LENGTH)
            return
        if kept:
            episode.now.ids = ids
        else:
            episode.begin_part(ids)
        self._sample(episode)

    def _extended(
        self, episode: EpisodeState, messages: list[dict[str, Any]]
    ) -> tuple[list[int], bool]:
        """(the next turn's prompt, whether it keeps the tokens so far)."""
        now = episode.now
        before = now.ids
        ids = now.renderer.extend(before, self._shortened(messages))
        if ids is None:
            return now.renderer.reopen(), False
        if ids[: len(before)] != before:
            raise ValueError("the renderer has changed the tokens of an earlier turn")
        return ids, True

    def _shortened(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages with at most `max_observation_tokens` tokens of text together."""
        left, shown = self._job.environment.max_observation_tokens, []
        control = self._job.template.control_tokens
        for message in messages:
            ids = encode_text(self._tokenizer, message["content"], control)
            if len(ids) > left:
                text = self._tokenizer.decode(ids[:left])
                message = {**message, "content": text + self._told(len(ids) - left)}
            left = max(0, left - len(ids))
            shown.append(message)
        return shown

    def _told(self, more: int) -> str:
        """The note that an observation was cut; none with a plain alphabet, which lacks the
        characters."""
        note = CUT.format(more)
        unknown = self._tokenizer.unk_token_id
        ids = self._tokenizer.encode(note, add_special_tokens=False)
        return "" if unknown is not None and unknown in ids else note

    # -- ends --------------------------------------------------------------------------------------

    def check_deadlines(self) -> None:
        """Fail the episodes whose environment, or which themselves, took too long."""
        now, spec = time.monotonic(), self._job.environment
        for episode in list(self.open.values()):
            if now > episode.ends_at:
                self._abort_turns(episode)
                what = f"environment.episode_timeout_s={spec.episode_timeout_s:g}"
                self._fail(episode, "timeout", f"the episode passed {what}")
            elif episode.waits_for and not episode.sampling and now > episode.deadline:
                what = f"environment.step_timeout_s={spec.step_timeout_s:g}"
                self._fail(episode, "timeout", f"{episode.waits_for} passed {what}")

    def _abort_turns(self, episode: EpisodeState) -> None:
        names = set(episode.turn_ids.values())
        self.to_sample = [r for r in self.to_sample if r.request_id not in names]
        self.to_abort += sorted(names)
        episode.sampling.clear()

    def _fail(self, episode: EpisodeState, status: ScoreStatus, error: str) -> None:
        self._abort_turns(episode)
        self.counters["failed_episodes"] += 1
        self.counters["timeouts" if status == "timeout" else "errors"] += 1
        self._finish(episode, status, error=error)

    def _finish(self, episode: EpisodeState, status: ScoreStatus, **score: Any) -> None:
        # First, since it raises for a grade of another form: the episode then fails.
        self.done.append(episode.played(status, self._decode, self._actor, **score))
        del self.open[episode.request.request_id]
        # What a program leaves behind (threads, connections) ends with its process.
        ends = episode.hosts_program or episode.once
        self._release(episode, reuse=status == "ok" and not ends)

    def _release(self, episode: EpisodeState, *, reuse: bool) -> None:
        """Release the episode's process. Only one whose instance ended without an error serves
        another episode."""
        link, episode.link = episode.link, None
        if link is None:
            return
        link.episodes += 1
        if reuse and link.episodes < EPISODES_A_PROCESS:
            self._idle.append(link)
        else:
            link.kill()

    def _decode(self, ids: Sequence[int]) -> str:
        return decode_response(self._tokenizer, ids)
