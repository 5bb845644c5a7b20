"""Simulated rollout actors: their speed, their requests, and the trajectories that they return."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

from rlcore.advisor.simulate.clients import SimulatedBuffer, SimulatedScorer
from rlcore.advisor.simulate.clock import After
from rlcore.errors import DeadlineExceeded, RoleLost, StageError, UserError
from rlcore.interfaces import Wake
from rlcore.loop.role_protocols import ActorClient, Spawned
from rlcore.loop.specs import ScheduleSpec, SupervisionSpec
from rlcore.rollout.text import read_answer
from rlcore.serialization import dump_trajectory
from rlcore.testing.records import make_trajectory
from rlcore.types import PAGE_RULE, OnPublish, Request, Trajectory, WeightManifest

PROMPT = [1]  # tokens of every prompt


@dataclass(frozen=True, slots=True)
class Speed:
    """How long an actor takes, in simulated seconds."""

    step_s: float = 0.1  # one decode step, a token of every running request
    load_s: float = 0.5  # new weights, after a drain
    start_s: float = 10.0  # from its spawn to a ready engine
    place_s: float = 0.0  # until the cluster has free resources for it
    answer_s: float = 0.01  # any other call
    max_running: int = 64  # requests decoded together


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A request and how far its decoding has come."""

    request: Request
    wanted: int  # tokens
    versions: list[int] = field(default_factory=list)  # of the tokens so far
    decoding_s: float = 0.0
    asked: int = 0  # the version that its actor served when it came
    name: str = field(init=False)  # of the request

    def __post_init__(self) -> None:
        self.name = self.request.request_id

    def trajectory(self, actor: str, draw_id: str) -> Trajectory:
        """Return the trajectory that the actor of this name has sampled."""
        request = self.request
        sampled = make_trajectory(
            request.group_id,
            request.sample_index,
            turns=[(request.prompt_ids.tolist() or PROMPT, [7] * len(self.versions))],
            version=self.versions,
            prompt_id=request.prompt_id,
            purpose=request.purpose,
            actor_id=actor,
            draw_id=draw_id,
        )
        if request.page_rule is not None:
            sampled.extras[PAGE_RULE] = request.page_rule.array()
        return sampled


def spawned(actor: SimulatedActor, fails: str = "") -> Spawned:
    """An actor on its way, as a spawn function returns it; `fails`: why its engine does not
    start."""
    speed = actor.speed
    return Spawned(actor, After(speed.place_s), After(speed.place_s + speed.start_s, fails))


__all__ = ["SimulatedActor", "Speed", "spawned"]
T = TypeVar("T")


class SimulatedActor(ActorClient):
    """One process. `die`, `hang` and `wake` happen to it; `refusing` makes it refuse weights.

    Calls that timed out are still carried out when a hung process wakes, as with a stopped process.
    """

    _pids = count(1000)

    def __init__(
        self,
        name: str,
        buffer: SimulatedBuffer,
        scorer: SimulatedScorer,
        *,
        speed: Speed,
        tokens: Callable[[Request], int],
        limits: tuple[ScheduleSpec, SupervisionSpec],
    ) -> None:
        """`tokens`: how many a request samples; 0: it vanishes unnoticed. `limits`: the deadlines
        of its calls."""
        self.name = name
        self.pid = next(self._pids)
        self.version = -1
        self.refusing = ""  # why it refuses the next weights
        self.precise_layers: int | None = None  # of the last publication
        self.dead = False
        self.speed = speed
        self._buffer = buffer
        self._scorer = scorer
        self._tokens = tokens
        self._schedule, self._supervision = limits
        self.asleep = self._schedule.colocated  # by its own `sleep`, beside whatever happens to it
        self.has_weights = not self.asleep  # memory for them
        self._stepping = False
        self._awake = asyncio.Event()
        self._awake.set()
        self._death = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._waiting: dict[str, SimulatedRequest] = {}
        self._running: dict[str, SimulatedRequest] = {}
        self._undelivered: set[str] = set()
        self._draining = False
        self._loading = False
        self._sent: asyncio.Future[int] | None = None  # stopped for weights that will be sent
        self._work = asyncio.Event()
        self._drawn = count()
        self._busy_s = 0.0
        self._steps = 0
        self._stepped_at = self._now()
        self._task(self._engine())

    # ---- what happens to it ----------------------------------------------------------------------

    def die(self) -> None:
        """The effect of `kill -9`."""
        if not self.dead:
            self.dead = True
            self._death.set_result(None)
            for task in self._tasks:
                task.cancel()

    kill = die

    def hang(self) -> None:
        """The effect of `kill -STOP`: it computes nothing and answers nothing."""
        self._awake.clear()

    def wake(self) -> None:
        """The effect of `kill -CONT`."""
        self._awake.set()

    @property
    def unfinished(self) -> list[str]:
        """Ids of the requests that it holds, unfinished."""
        return [*self._waiting, *self._running]

    # ---- the engine ------------------------------------------------------------------------------

    async def _engine(self) -> None:
        while True:
            if not self._can_step():
                self._work.clear()
                self._stepped_at = self._now()
                await self._work.wait()
                if self.asleep:
                    continue
            self._fill()
            self._stepping = True
            await asyncio.sleep(self.speed.step_s)
            await self._awake.wait()
            self._stepping = False
            self._busy_s += self.speed.step_s
            self._steps += 1
            self._stepped_at = self._now()
            for drawing in list(self._running.values()):
                drawing.versions.append(self.version)
                drawing.decoding_s += self.speed.step_s
                if len(drawing.versions) >= drawing.wanted:
                    self._finish(drawing)

    def _can_step(self) -> bool:
        startable = bool(self._waiting) and not self._draining
        idle = self._loading or self.asleep
        return not idle and (bool(self._running) or startable)

    def _fill(self) -> None:
        while self._waiting and not self._draining and len(self._running) < self.speed.max_running:
            name = next(iter(self._waiting))
            self._running[name] = self._waiting.pop(name)

    def _take_in(self, drawing: SimulatedRequest) -> None:
        """Queue a request that was submitted."""
        self._waiting[drawing.name] = drawing

    def _left(self, drawing: SimulatedRequest) -> str:
        """Remove a request that the engine has finished; returns the name of its drawing."""
        del self._running[drawing.name]
        self._work.set()
        return f"{self.name}:{self.pid}:{next(self._drawn)}"

    def _drop(self, name: str) -> SimulatedRequest | None:
        """Remove a request; returns None if there is none of that name."""
        return self._waiting.pop(name, None) or self._running.pop(name, None)

    def _finish(self, drawing: SimulatedRequest) -> None:
        trajectory = drawing.trajectory(self.name, self._left(drawing))
        self._undelivered.add(trajectory.request_id)
        self._task(self._deliver(trajectory))

    async def _deliver(self, trajectory: Trajectory) -> None:
        if trajectory.purpose == "train":
            await self._buffer.add_records([dump_trajectory(trajectory)], self.name)
        answer = read_answer(trajectory, lambda ids: "7" * len(ids), ())
        self._scorer.submit([answer], self.name)
        self._undelivered.discard(trajectory.request_id)

    # ---- the client ------------------------------------------------------------------------------

    async def submit(self, requests: Sequence[Request], begun: Any = None) -> None:
        async def work() -> None:
            await asyncio.sleep(self.speed.answer_s)
            asked = [SimulatedRequest(request, self._tokens(request)) for request in requests]
            held = set(self.unfinished)
            for drawing in asked:
                if drawing.name in held:
                    raise UserError(f"a rollout actor refused a request: {drawing.name} twice")
            for drawing in asked:
                drawing.versions += (begun or {}).get(drawing.name, [])
                if drawing.wanted:
                    self._take_in(drawing)
            self._work.set()

        await self._call(work, f"taking {len(requests)} requests")

    async def abort(self, request_ids: Sequence[str]) -> None:
        async def work() -> None:
            await asyncio.sleep(self.speed.answer_s)
            for name in request_ids:
                self._drop(name)

        await self._call(work, f"dropping {len(request_ids)} requests")

    async def cut(self, request_ids: Sequence[str]) -> tuple[list[str], Any]:
        async def work() -> tuple[list[str], Any]:
            await asyncio.sleep(self.speed.answer_s)
            dropped = [d for name in request_ids if (d := self._drop(name)) is not None]
            had = {drawing.name: drawing.versions for drawing in dropped}
            return list(had), had

        return await self._call(work, f"giving up {len(request_ids)} requests")

    async def open_requests(self) -> list[str]:
        async def work() -> list[str]:
            await asyncio.sleep(self.speed.answer_s)
            return [*self.unfinished, *self._undelivered]

        return await self._call(work, "its open requests")

    async def update_weights(
        self, manifest: WeightManifest, handle: Any, on_publish: OnPublish
    ) -> dict[str, float]:
        async def work() -> dict[str, float]:
            self.precise_layers = manifest.precise_layers
            return await self._load(manifest.version, on_publish)

        return await self._publishing(work, manifest.version)

    async def _load(self, version: int, on_publish: OnPublish) -> dict[str, float]:
        began = self._now()
        await self._stop(on_publish)
        drained = self._now()
        return {**await self._take(version), "drain_s": drained - began}

    async def _stop(self, on_publish: OnPublish) -> None:
        if on_publish == "finish":
            self._draining = True
            while self._running:
                await asyncio.sleep(self.speed.step_s)
        self._loading = True

    async def _take(self, version: int) -> dict[str, float]:
        begun = self._now()
        assert self.has_weights, "given weights while its engine sleeps"
        await asyncio.sleep(self.speed.load_s)
        await self._awake.wait()
        self._loading = self._draining = False
        self._work.set()
        if self.refusing:
            raise StageError(f"loading version {version} failed: {self.refusing}")
        self.version = version
        return {"stop_s": self._now() - begun, "drain_s": 0.0}

    async def prepare_weights(self, manifest: WeightManifest, on_publish: OnPublish) -> None:
        async def work() -> None:
            await self._stop(on_publish)
            self._sent = self._loop().create_future()

        await self._publishing(work, manifest.version)

    def take_weights(self, version: int) -> None:
        """Load a version, as a call of the learner's sender does."""
        assert self._sent is not None, "sent weights before it had stopped for them"
        self._sent.set_result(version)

    async def finish_weights(self, version: int) -> dict[str, float]:
        async def work() -> dict[str, float]:
            assert self._sent is not None
            sent, self._sent = await self._sent, None
            assert sent == version
            return await self._take(version)

        return await self._publishing(work, version)

    async def set_version(self, version: int) -> dict[str, float]:
        async def work() -> dict[str, float]:
            await asyncio.sleep(self.speed.answer_s)
            self.version = version
            return {"receive_s": 0.0, "stop_s": 0.0, "drain_s": 0.0}

        return await self._publishing(work, version)

    async def sleep(self) -> dict[str, float]:
        async def work() -> dict[str, float]:
            await asyncio.sleep(self.speed.answer_s)
            self.asleep = True
            while self._stepping:
                await asyncio.sleep(self.speed.answer_s)
            held = [self._drop(name) for name in list(self._running)]
            self._waiting = {d.name: d for d in held if d is not None} | self._waiting
            self.has_weights = False
            return {"sleep_s": self.speed.answer_s, "freed_gib": 1.0}

        return await self._publishing(work, self.version)

    async def awaken(self, what: Wake) -> dict[str, float]:
        async def work() -> dict[str, float]:
            await asyncio.sleep(self.speed.answer_s)
            self.has_weights = True
            self.asleep = what != "all"
            self._work.set()
            return {"wake_s": self.speed.answer_s}

        return await self._publishing(work, self.version)

    async def status(self) -> dict[str, Any]:
        async def work() -> dict[str, Any]:
            await asyncio.sleep(self.speed.answer_s)
            age = self._now() - self._stepped_at if self._can_step() else 0.0
            return {
                "error": None,
                "heartbeat_age_s": age,
                "pid": self.pid,
                "busy_s": self._busy_s,
                "steps": self._steps,
                "decoding_s": {name: d.decoding_s for name, d in self._running.items()},
                "version": self.version,
            }

        return await self._call(work, "its heartbeat")

    async def _call(self, work: Callable[[], Awaitable[T]], what: str) -> T:
        limit = self._supervision.hang_timeout_s
        return await self._answer(work, what, limit, "cluster.hang_timeout_s")

    async def _publishing(self, work: Callable[[], Awaitable[T]], version: int) -> T:
        limit = self._schedule.publish_timeout_s
        what = f"loading version {version}"
        return await self._answer(work, what, limit, "schedule.publish_timeout_s")

    async def _answer(
        self, work: Callable[[], Awaitable[T]], what: str, limit: float, key: str
    ) -> T:
        if not self.dead:
            task = self._task(self._when_awake(work))
            either: set[asyncio.Future[Any]] = {task, self._death}
            await asyncio.wait(either, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if task.done() and not task.cancelled():
                return task.result()
        if self.dead:
            raise RoleLost(f"its process died while the run waited for {what}")
        raise DeadlineExceeded(f"waited {limit:g} s for {what} ({key}={limit:g}).")

    async def _when_awake(self, work: Callable[[], Awaitable[T]]) -> T:
        await self._awake.wait()
        return await work()

    def _task(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever asked may have stopped waiting for it

    @staticmethod
    def _loop() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    def _now(self) -> float:
        return self._loop().time()
