"""An episode that a user's program leads: it calls the model as an OpenAI-style endpoint.

The program runs in a thread of the episode's process. Each of its calls is a turn of the episode:
the call's messages are what the environment says, and the turn that the engine samples is the
call's answer. So tokens, log-probs and versions are recorded as those of any environment.
"""

from __future__ import annotations

import inspect
import os
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

from rlcore.environments.endpoint_http import (
    MODEL,
    ChatRequest,
    Refused,
    Sampling,
    SessionServer,
    answered,
    cleaned,
    read_request,
)
from rlcore.environments.protocol import Action, Environment, Message, Opening, Reply
from rlcore.environments.trl import accepted
from rlcore.errors import UserError
from rlcore.interfaces import Task
from rlcore.registry import LoadError, load_object
from rlcore.tasks.code import CodeTask
from rlcore.tasks.grades import as_grade, grade_text
from rlcore.types import Grade, Item

KEY = "environment.args.program"
GIVEN = ("item", "base_url", "api_key", "model", "seed")  # arguments that a program may take
OVER = "The episode is over: its program has returned."


@dataclass(slots=True)
class PendingCall:
    """A request that waits for its turn."""

    request: ChatRequest
    waits: Callable[[], bool]  # whether its client is still connected
    answer: Future[dict[str, Any]] = field(default_factory=Future)


@dataclass(slots=True)
class ClientConversation:
    """The messages of a conversation up to the model's last answer."""

    messages: list[Message]
    tools: list[Any]

    def continued_by(self, request: ChatRequest) -> list[Message]:
        """Return the messages that a request adds to the conversation; empty if it is no
        continuation."""
        count = len(self.messages)
        if self.tools != request.tools or list(map(_compared, request.messages[:count])) != list(
            map(_compared, self.messages)
        ):
            return []
        return request.messages[count:]


def _compared(message: Message) -> tuple[str, str]:
    """Clients strip white space from the ends of an answer, as templates do."""
    return message["role"], message["content"].strip()


@cache  # it is imported once, before processes are forked
def _program(name: str) -> Callable[..., Any]:
    try:
        program = load_object(name)
    except LoadError as error:
        raise UserError(f"{KEY}={name} {error}") from error
    if not callable(program):
        raise UserError(f"{KEY}={name} is not a function.")
    for parameter in inspect.signature(program).parameters.values():
        variable = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if not variable and parameter.default is parameter.empty and parameter.name not in GIVEN:
            raise UserError(
                f"{KEY}={name} requires {parameter.name}, and a program is given "
                f"{', '.join(GIVEN)}."
            )
    run: Callable[..., Any] = program
    return run


class Endpoint(Environment):
    """One run of a program. It returns the reward: a number, (number, parts) or a Grade; or a text
    that the task's grader judges; or None, for which this grader judges the model's last answer."""

    hosts_program = True
    asks_task = True

    def __init__(self, task: Task, *, program: str | None = None) -> None:
        """Raises UserError for a program that cannot be loaded or called."""
        if program is None:
            raise UserError(
                f"{KEY} is missing: environment.name=endpoint plays a program of yours, "
                "path/to/file.py:function."
            )
        self._task = task
        self._program = _program(program)
        self._calls: queue.Queue[PendingCall | None] = queue.Queue()  # None: the program has ended
        self._outcome: Future[Any] = Future()  # what the program returns
        self._lock = threading.Lock()
        self._over: Refused | None = None  # why further calls are refused
        self._pending: PendingCall | None = None  # the call whose turn is sampled
        self._conversations: list[ClientConversation] = []
        self._at = 0  # which of these the pending call belongs to
        self._turns = self._refused = 0
        self._last = ""  # text of the last turn
        self._server: SessionServer | None = None

    def told(self, sampling: Mapping[str, Any]) -> None:
        """Take the run's sampling settings of the episode."""
        self._sampling = Sampling(**sampling)

    def reset(self, item: Item, seed: int) -> Opening:
        self._item = item
        self._server = SessionServer(self._complete)
        given = {"item": item, "model": MODEL, "seed": seed}
        given |= {"base_url": self._server.base_url, "api_key": self._server.api_key}
        _tell_clients(self._server)
        run = partial(self._program, **accepted(self._program, given))
        threading.Thread(target=self._run, args=(run,), name="program", daemon=True).start()
        call = self._next()
        if call is None:
            self._returned()  # raises what the program has raised
            raise RuntimeError("the program has ended without a call of the model")
        reply = self._reply(call)
        assert reply.opening is not None
        return reply.opening

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
        self._calls.put(None)

    def _complete(
        self, body: bytes, waits: Callable[[], bool]
    ) -> tuple[dict[str, Any], bool, bool]:
        """In a thread of the endpoint: the answer to one request."""
        try:
            call = PendingCall(read_request(body, self._sampling), waits)
            with self._lock:
                if self._over is not None:
                    raise self._over
                self._calls.put(call)
            return call.answer.result(), call.request.stream, call.request.usage
        except Refused:
            with self._lock:
                self._refused += 1
            raise

    def _next(self) -> PendingCall | None:
        """The next call whose client still waits; None: the program has ended."""
        while (call := self._calls.get()) is not None:
            if self._outcome.done():
                call.answer.set_exception(Refused(OVER, 410, "episode_over"))
            elif call.waits():
                return call
            else:
                call.answer.set_exception(Refused("The client has left."))
        return None

    def _reply(self, call: PendingCall) -> Reply:
        """Make the reply of a call: the continuation of a conversation, or another one."""
        self._pending = call
        request = call.request
        added = [conversation.continued_by(request) for conversation in self._conversations]
        known = [i for i, messages in enumerate(added) if messages]
        if not known:
            self._at = len(self._conversations)
            self._conversations.append(ClientConversation(request.messages, request.tools))
            return Reply(opening=Opening(request.messages, request.tools, request.max_tokens))
        # the longest; of equal ones the last
        self._at = min(reversed(known), key=lambda i: len(added[i]))
        self._conversations[self._at].messages = request.messages
        limit = request.max_tokens
        return Reply(added[self._at], conversation=self._at, max_tokens=limit)

    def step(self, action: Action) -> Reply:
        completion = answered(action, self._turns)
        self._turns += 1
        self._last = action.text
        message = completion["choices"][0]["message"]
        self._conversations[self._at].messages = [
            *self._conversations[self._at].messages,
            cleaned(message, {}),
        ]
        assert self._pending is not None
        self._pending.answer.set_result(completion)
        self._pending = None
        call = self._next()
        return Reply(over=True) if call is None else self._reply(call)

    def limited(self, limit: str) -> None:
        """Refuse the pending call and all later ones: no further turn."""
        code = "context_length_exceeded" if limit == "model.max_len" else "turn_limit"
        self._refuse(
            Refused(f"The episode has no further turn: it has reached {limit}.", 400, code)
        )

    def _refuse(self, reason: Refused) -> None:
        with self._lock:
            self._over = self._over or reason
            waiting = [self._pending] if self._pending is not None else []
            self._pending = None
            while not self._calls.empty():
                call = self._calls.get()
                waiting += [call] if call is not None else []
        for call in waiting:
            call.answer.set_exception(self._over)

    def grade(self) -> Grade:
        value = self._returned()
        self._refuse(Refused(OVER, 410, "episode_over"))
        if value is None or isinstance(value, str):
            text = self._last if value is None else value
            grade = grade_text(self._task, self._item, text)
        else:
            grade = as_grade(value)
        if grade.token_rewards:
            raise ValueError("a program rewards whole episodes, and tokens are rewarded here")
        counts = {"conversations": len(self._conversations), "refused_calls": self._refused}
        return replace(grade, parts={**grade.parts, **{n: float(c) for n, c in counts.items()}})

    def _returned(self) -> Any:
        """Return the program's result. Raises RuntimeError if the program has raised."""
        try:
            return self._outcome.result()
        except BaseException as error:
            text = f"the program raised {type(error).__name__}: {error}"
            raise RuntimeError(text) from error

    def close(self) -> None:
        """End the endpoint, and the sandbox of a task's programs."""
        if self._server is not None:
            self._server.close()
            self._server = None
        if isinstance(self._task, CodeTask):
            self._task.close()


def _tell_clients(server: SessionServer) -> None:
    """Set the environment variables that clients in this process read; it serves this session
    alone."""
    os.environ["OPENAI_BASE_URL"] = server.base_url
    os.environ["OPENAI_API_KEY"] = server.api_key
    for name in ("no_proxy", "NO_PROXY"):
        others = os.environ.get(name)
        os.environ[name] = f"{others},127.0.0.1" if others else "127.0.0.1"
