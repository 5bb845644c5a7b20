"""An episode that a user's program leads: it calls the model as an OpenAI-style endpoint.

The program runs in a thread of the episode's process. Each of its calls is a turn of the episode:
the call's messages are what the environment says, and the turn that the engine samples is the
call's answer. So tokens, log-probs and versions are recorded as in any environment.
"""

from __future__ import annotations

import inspect
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

from rlcore.agents.endpoint_http import (
    MODEL,
    ChatRequest,
    Refused,
    Sampling,
    answered,
    cleaned,
    read_request,
)
from rlcore.agents.endpoint_server import Address, Answered, SessionServer
from rlcore.agents.shell_program import shell_program
from rlcore.agents.trl import accepted
from rlcore.environments.protocol import Action, Environment, Message, Opening, Reply
from rlcore.errors import UserError
from rlcore.interfaces import Task
from rlcore.registry import LoadError, load_object
from rlcore.tasks.code import CodeTask
from rlcore.tasks.grades import as_grade, grade_text
from rlcore.types import Grade, Item

KEY = "environment.args.program"
GIVEN = ("item", "base_url", "api_key", "model", "seed")  # arguments that a program may take
OVER = "The episode is over: its program has returned."
LIMITED = "turn_limit"
DELIVERY_S = 5.0
LOOPBACK = "127.0.0.1"


@dataclass(slots=True)
class PendingCall:
    """A request in the queue for its turn."""

    request: ChatRequest
    waits: Callable[[], bool]  # whether its client is still connected
    answer: Future[dict[str, Any]] = field(default_factory=Future)
    conversation: int = -1  # its number, once it is known


@dataclass(slots=True)
class ClientConversation:
    """The messages of a conversation up to the model's last answer."""

    messages: list[Message]
    tools: list[Any]
    unread: bool = False  # the last answer, whose client had left
    closed: bool = False  # a call that would have continued it was refused

    def continued_by(self, request: ChatRequest) -> list[Message]:
        """Return the messages that a request adds to the conversation; empty if it does not
        continue it."""
        count = len(self.messages)
        if self.closed or self.tools != request.tools:
            return []
        if list(map(_compared, request.messages[:count])) != list(map(_compared, self.messages)):
            return []
        return request.messages[count:]


@dataclass(frozen=True, slots=True)
class ProgramCalls:
    """The calls that a program has made since it was last asked, each as the reply that begins or
    continues a conversation."""

    calls: Sequence[Reply]
    over: bool  # the program has ended


def _compared(message: Message) -> tuple[str, str, list[Any]]:
    """Clients strip white space from the ends of an answer, as templates do, and give calls their
    own ids."""
    calls = [call["function"] for call in message.get("tool_calls", [])]
    return message["role"], message["content"].strip(), calls


@cache  # it is imported once, before processes are forked
def _program(name: str) -> Callable[..., Any]:
    try:
        program = load_object(name)
    except LoadError as error:
        raise UserError(f"{KEY}={name} {error}") from error
    if not callable(program):
        raise UserError(f"{KEY}={name} is not a function: name one of the file.")
    for parameter in inspect.signature(program).parameters.values():
        variable = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if not variable and parameter.default is parameter.empty and parameter.name not in GIVEN:
            raise UserError(
                f"{KEY}={name} requires {parameter.name}, and a program is given "
                f"{', '.join(GIVEN)}: give the parameter a default."
            )
    run: Callable[..., Any] = program
    return run


def _chosen(program: str | None, command: str | None, keep: str | None) -> Callable[..., Any]:
    """The program, or the command in its place."""
    if program is None and command is None:
        raise UserError(
            f"{KEY} is missing: environment.name=endpoint plays a program of yours, "
            "path/to/file.py:function, or a line for sh, environment.args.command."
        )
    if program is None:
        return shell_program(command, keep)
    if command is not None:
        raise UserError(
            f"{KEY}={program} and environment.args.command are two programs: give one of them."
        )
    return _program(program)


class Endpoint(Environment):
    """One run of a program. It returns the reward: a number, (number, parts) or a Grade; or a text
    that the task's grader judges; or None, for which this grader judges the model's last answer.

    The calls of the program are served side by side. `listen` returns the waiting calls. What the
    model has said to one of them comes by `step` while others are still sampled.
    """

    hosts_program = True
    asks_task = True

    def __init__(
        self,
        task: Task,
        *,
        program: str | None = None,
        command: str | None = None,
        keep: str | None = None,
        sampling: str = "refuse",
        bind: str = LOOPBACK,
        advertise: str | None = None,
    ) -> None:
        """`program`: path/to/file.py:function; `command`: in its place, a line for sh. `keep`: a
        folder that takes the working folders of commands that failed.

        `sampling`: what becomes of a request that asks for other sampling than the run's:
        "refuse", or "override" it. `bind`: the address that the endpoint listens at; `advertise`:
        the name or address of it that the program is given, where that is another.

        Raises UserError for a program that cannot be loaded or called, or another argument.
        """
        self._task = task
        self._program = _chosen(program, command, keep)
        self._overrides = _overrides(sampling)
        self._address = _address(bind, advertise)
        self._outcome: Future[Any] = Future()  # what the program returns
        self._changed = threading.Condition()  # of all below
        self._waiting: deque[PendingCall] = deque()
        self._ended = False  # the program
        self._over: Refused | None = None  # why further calls are refused
        self._conversations: list[ClientConversation] = []
        self._sampled: dict[int, PendingCall] = {}  # calls whose turns are sampled
        self._undelivered: list[PendingCall] = []  # answered, and not yet written to the client
        self._turns = self._refused = self._unread = self._overridden = 0
        self._last = ""  # text of the last turn that was read
        self._interrupted: Callable[[], bool] = lambda: False
        self._server: SessionServer | None = None

    # -- called by the process of the episode ------------------------------------------------------

    def told(self, sampling: Mapping[str, Any]) -> None:
        """Take the run's sampling settings of the episode."""
        self._sampling = Sampling(**sampling, overrides=self._overrides)

    def listens(self, interrupted: Callable[[], bool]) -> None:
        """`interrupted`: whether something else than a call of the program is to be answered."""
        self._interrupted = interrupted

    def interrupt(self) -> None:
        """Have `listen` look whether it is interrupted. Called by another thread."""
        with self._changed:
            self._changed.notify_all()

    def reset(self, item: Item, seed: int) -> ProgramCalls:  # type: ignore[override]
        """Start the program; its first calls."""
        self._item = item
        self._server = SessionServer(self._complete, self._sampling.max_len, self._address)
        given = {"item": item, "model": MODEL, "seed": seed}
        given |= {"base_url": self._server.base_url, "api_key": self._server.api_key}
        _tell_clients(self._server)
        run = partial(self._program, **accepted(self._program, given))
        threading.Thread(target=self._run, args=(run,), name="program", daemon=True).start()
        first = self.listen()
        if not first.calls:
            self._returned()  # raises what the program has raised
            raise RuntimeError("the program has ended without a call of the model")
        return first

    def listen(self) -> ProgramCalls:
        """Wait for calls, for the program's end, or until it is interrupted."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._ended or self._interrupted())
                made, self._waiting = list(self._waiting), deque()
                over = self._ended
            calls = [self._reply(call) for call in made if not over and self._waits(call)]
            for call in made if over else ():
                call.answer.set_exception(Refused(OVER, 410, "episode_over"))
            if calls or over or self._interrupted():
                return ProgramCalls(calls, over)

    def step(self, action: Action, conversation: int) -> ProgramCalls:  # type: ignore[override]
        """Answer the call of a conversation with what the model has said."""
        completion = answered(action, self._turns)
        self._turns += 1
        talk = self._conversations[conversation]
        message = completion["choices"][0]["message"]
        talk.messages = [*talk.messages, cleaned(message, {})]
        with self._changed:
            call = self._sampled.pop(conversation)
            self._undelivered.append(call)
        call.answer.set_result(completion)
        return self.listen()

    def limited(self, conversation: int, limit: str) -> ProgramCalls:
        """Refuse the call of a conversation. Where the episode has no further turn, all later calls
        are refused; where one does not fit `model.max_len`, it alone."""
        self._conversations[conversation].closed = True
        call = self._sampled.pop(conversation)
        if limit == "model.max_len":
            longest = f"model.max_len={self._sampling.max_len}"
            why = f"The call has no room for an answer: its messages are longer than {longest}."
            call.answer.set_exception(Refused(why, 400, "context_length_exceeded"))
            return self.listen()
        reason = Refused(f"The episode has no further turn: it has reached {limit}.", 400, LIMITED)
        call.answer.set_exception(reason)
        self._refuse(reason)
        return self.listen()

    def grade(self) -> Grade:
        value = self._returned()
        self._refuse(Refused(OVER, 410, "episode_over"))
        self._await_deliveries()
        if value is None or isinstance(value, str):
            text = self._last if value is None else value
            grade = grade_text(self._task, self._item, text)
        else:
            grade = as_grade(value)
        if grade.token_rewards:
            raise ValueError("a program rewards whole episodes, and tokens are rewarded here")
        counts = {"conversations": len(self._conversations), "refused_calls": self._refused}
        counts["unread_answers"] = self._unread
        if self._overrides:
            counts["overridden_calls"] = self._overridden
        return replace(grade, parts={**grade.parts, **{n: float(c) for n, c in counts.items()}})

    @property
    def unread(self) -> list[int]:
        """Conversations whose last answer nobody has read; nothing is learnt from it."""
        return [i for i, talk in enumerate(self._conversations) if talk.unread]

    def close(self) -> None:
        """End the endpoint, and the sandbox of a task's programs."""
        if self._server is not None:
            self._server.close()
            self._server = None
        if isinstance(self._task, CodeTask):
            self._task.close()

    # -- called by threads of the endpoint and of the program --------------------------------------

    def _run(self, program: Callable[[], Any]) -> None:
        """In the program's thread."""
        try:
            value = program()
            if inspect.iscoroutine(value):
                import asyncio

                value = asyncio.run(value)
            self._outcome.set_result(value)
        except BaseException as error:  # sys.exit() in a program is a failed score too
            self._outcome.set_exception(error)
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _complete(self, asked: dict[str, Any], waits: Callable[[], bool]) -> Answered:
        """In a thread of the endpoint: the answer to one request."""
        try:
            call = PendingCall(read_request(asked, self._sampling), waits)
            with self._changed:
                if self._over is not None:
                    raise self._over
                self._overridden += call.request.overridden
                self._waiting.append(call)
                self._changed.notify_all()
            completion = call.answer.result()
        except Refused:
            with self._changed:
                self._refused += 1
            raise
        return Answered(completion, partial(self._delivered, call))

    def _delivered(self, call: PendingCall, read: bool) -> None:
        """In a thread of the endpoint: the answer was written, or its client had left."""
        with self._changed:
            self._undelivered.remove(call)
            self._unread += not read
            if read:
                self._last = call.answer.result()["choices"][0]["message"]["content"] or ""
            else:
                self._conversations[call.conversation].unread = True
            self._changed.notify_all()

    # -- parts -------------------------------------------------------------------------------------

    def _waits(self, call: PendingCall) -> bool:
        if call.waits():
            return True
        call.answer.set_exception(Refused("The client has left."))
        return False

    def _reply(self, call: PendingCall) -> Reply:
        """Make the reply of a call: the continuation of a conversation, or another one."""
        request = call.request
        added = [conversation.continued_by(request) for conversation in self._conversations]
        known = [i for i, messages in enumerate(added) if messages]
        if not known:
            at = len(self._conversations)
            self._conversations.append(ClientConversation(request.messages, request.tools))
            opening = Opening(request.messages, request.tools, request.max_tokens)
            reply = Reply(opening=opening, conversation=at)
        else:
            # the longest; of equal ones the last
            at = min(reversed(known), key=lambda i: len(added[i]))
            self._conversations[at].messages = request.messages
            self._conversations[at].unread = False
            reply = Reply(added[at], conversation=at, max_tokens=request.max_tokens)
        call.conversation = at
        self._sampled[at] = call
        return reply

    def _refuse(self, reason: Refused) -> None:
        """Refuse the waiting calls, and all later ones."""
        with self._changed:
            self._over = self._over or reason
            waiting = [*self._waiting]
            self._waiting.clear()
            if self._ended:
                waiting += self._sampled.values()
                self._sampled = {}
        for call in waiting:
            call.answer.set_exception(self._over)

    def _await_deliveries(self) -> None:
        """A client that takes nothing of its answer for so long has not read it."""
        with self._changed:
            self._changed.wait_for(lambda: not self._undelivered, DELIVERY_S)
            for call in self._undelivered:
                self._unread += 1
                self._conversations[call.conversation].unread = True

    def _returned(self) -> Any:
        """Return the program's result. Raises RuntimeError if the program has raised."""
        try:
            return self._outcome.result()
        except BaseException as error:
            text = f"the program raised {type(error).__name__}: {error}"
            raise RuntimeError(text) from error


def _overrides(sampling: str) -> bool:
    if sampling not in ("refuse", "override"):
        raise UserError(
            f"environment.args.sampling={sampling} is not accepted: choose refuse or override."
        )
    return sampling == "override"


def _address(bind: str, advertise: str | None) -> Address:
    if not isinstance(bind, str) or not isinstance(advertise, str | None):
        raise UserError(
            f"environment.args.bind={bind} and environment.args.advertise={advertise} must be "
            "texts: an address of this machine, and a name or address that reaches it."
        )
    if bind in ("", "0.0.0.0") and not advertise:
        raise UserError(
            f"environment.args.bind={bind} listens at every address, and programs must be told one "
            "that reaches it: set environment.args.advertise."
        )
    return Address(bind, advertise or bind)


def _tell_clients(server: SessionServer) -> None:
    """Set the environment variables that clients in this process read; it serves one session."""
    os.environ["OPENAI_BASE_URL"] = server.base_url
    os.environ["OPENAI_API_KEY"] = server.api_key
    os.environ["ANTHROPIC_BASE_URL"] = server.base_url.removesuffix("/v1")
    os.environ["ANTHROPIC_API_KEY"] = server.api_key
    for name in ("no_proxy", "NO_PROXY"):
        others = os.environ.get(name)
        os.environ[name] = f"{others},{server.host}" if others else server.host
