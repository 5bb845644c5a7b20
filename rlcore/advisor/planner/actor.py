"""Simulated actors and graders at given rates. An actor's clock goes from one event to the next,
not from token to token."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Any

from rlcore.advisor.planner.specs import ActorRates
from rlcore.advisor.simulate.actors import SimulatedActor, SimulatedRequest, Speed
from rlcore.advisor.simulate.clients import SimulatedBuffer, SimulatedScorer
from rlcore.buffer.shard import ShardReport
from rlcore.loop.specs import ScheduleSpec, SupervisionSpec
from rlcore.references import RecordReference
from rlcore.rollout.worker import JOIN_COST, SpareTime
from rlcore.seeding import derive_seed
from rlcore.serialization import RecordHeader
from rlcore.types import OnPublish, Request, Score

Answered = tuple[RecordHeader, RecordReference]


class Answers:
    """The answers that the buffer has references to, by key."""

    def __init__(self) -> None:
        self._runs: dict[int, Runs] = {}
        self._next = 0

    def put(self, request: Request, runs: Runs, actor: str, draw_id: str, shard: str) -> Answered:
        """A finished answer. `runs`: versions and numbers of its simulated tokens. `shard`: the
        shard of its node."""
        key = self._next
        self._next += 1
        self._runs[key] = runs
        tokens = sum(count for _, count in runs)
        header = RecordHeader(
            request.group_id,
            request.sample_index,
            request.prompt_id,
            draw_id,
            part=0,
            parts=1,
            purpose=request.purpose,
            actor_id=actor,
            actor_kind="bf16",
            finish_reason="stop",
            tokens=tokens,
            length=tokens + 1,
            oldest_version=runs[0][0],
            newest_version=runs[-1][0],
        )
        return header, RecordReference(shard, key, tokens)

    def runs(self, reference: Any) -> Runs:
        """The run of an answer that the buffer has."""
        return self._runs[reference.key]

    def drop(self, keys: Sequence[int]) -> None:
        """Drop answers that the buffer has released."""
        for key in keys:
            self._runs.pop(key, None)


class SimulatedGraders:
    """The graders of one node: a queue of answers. A graded answer and its score are reported to
    the buffer in messages with the pauses of a shard's."""

    def __init__(self, grade_s: float, deliver_s: float) -> None:
        """`deliver_s`: from a graded answer to the buffer."""
        self.grade_s = grade_s
        self.deliver_s = deliver_s
        self._queue: deque[tuple[float, Answered]] = deque()  # and when each is graded
        self._free_at = 0.0
        self._news = asyncio.Event()

    def put(self, answered: Answered) -> None:
        """An answer of this node."""
        begun = max(self._free_at, asyncio.get_running_loop().time())
        self._free_at = begun + self.grade_s
        self._queue.append((self._free_at + self.deliver_s, answered))
        self._news.set()

    async def graded(self, not_before: float) -> ShardReport:
        """Return the samples graded since the last call; waits for one, and at least until
        `not_before`."""
        clock = asyncio.get_running_loop().time
        while not self._queue:
            self._news.clear()
            await self._news.wait()
        await asyncio.sleep(max(self._queue[0][0], not_before) - clock())
        report = ShardReport()
        while self._queue and (self._queue[0][0] <= clock() or not report.kept):
            _, (header, reference) = self._queue.popleft()
            reward = float(header.sample_index % 2)  # half of the answers are right
            report.kept.append((header, reference))
            report.scores.append(
                Score(
                    header.group_id,
                    header.sample_index,
                    header.draw_id,
                    "ok",
                    reward,
                    {"correct": reward},
                )
            )
        return report


class PlannedScorer(SimulatedScorer):
    """Graders of training answers on every node."""

    answers: Answers
    deliver_s = 0.0

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._graders: dict[str, SimulatedGraders] = {}  # by the shard of their node

    def finished(self, answered: Answered) -> None:
        """From a rollout actor."""
        shard = answered[1].shard
        if shard not in self._graders:
            self._graders[shard] = SimulatedGraders(self.grade_s, self.deliver_s)
            self._grading.append(asyncio.create_task(self._report(shard, self._graders[shard])))
        self._graders[shard].put(answered)

    async def _report(self, shard: str, graders: SimulatedGraders) -> None:
        clock, not_before = asyncio.get_running_loop().time, 0.0
        while True:
            report = await graders.graded(not_before)
            reply = await self._buffer.actor.add_report(shard, report)
            self.answers.drop(reply.released)
            not_before = clock() + reply.pause_s

    async def samples(self, step: int, count: int) -> list[dict[str, Any]]:
        """None: simulated answers cannot be shown."""
        return []


_NORMAL = NormalDist()
LONGEST_S = 5.0  # between two looks at the engine: contexts grow, and heartbeats must not age
Runs = tuple[tuple[int, int], ...]  # (version, tokens that it sampled one after the other)


class RatedActor(SimulatedActor):
    """`unit` tokens of a real run are one token here, so that long answers stay cheap to simulate.

    A published version waits for the end of a decode step; prefixes of running requests are then
    computed again, unless these requests were let finish first (`schedule.on_publish`).

    Running requests sample together, so that one count of steps stands for all of them. An answer
    ends at a count that is known when it begins. The versions that sampled it follow from the
    counts at which the version changed. An event then costs the same however many requests run.
    """

    def __init__(
        self,
        name: str,
        buffer: SimulatedBuffer,
        scorer: SimulatedScorer,
        *,
        rates: ActorRates,
        tokens: Callable[[Request], int],
        limits: tuple[ScheduleSpec, SupervisionSpec],
        unit: int,
        prompt: int,
    ) -> None:
        """`tokens`: how many simulated ones a request samples. `prompt`: real tokens of every
        prompt."""
        self.rates = rates
        self.unit = unit
        self.prompt = prompt
        self._decoded_s = 0.0
        self._began: dict[str, tuple[int, float]] = {}  # steps and seconds before, of what runs
        self._ends: list[tuple[int, int, SimulatedRequest]] = []  # a heap by the count of steps
        self._order = itertools.count()  # of what was begun
        self._had = 0  # tokens that the running requests have sampled, together
        self._turns: list[tuple[int, int]] = []  # (count of steps, the version from there on)
        self._stale = False  # prefixes of what runs are of older weights
        self._asked: Counter[int] = Counter()  # running requests by the version they came at
        self._spare = SpareTime(self._now)
        self._hold_newer = False
        speed = Speed(
            step_s=rates.step_seconds(1, rates.reads(prompt)) * unit,
            load_s=rates.load_s,
            start_s=rates.start_s,
            max_running=rates.max_running,
        )
        super().__init__(name, buffer, scorer, speed=speed, tokens=tokens, limits=limits)

    async def _engine(self) -> None:
        while True:
            self._work.clear()
            if not self._can_step():
                begun = self._stepped_at = self._now()
                idle = bool(self._steps) and not self._loading and not self.asleep
                await self._work.wait()
                self._spare.add(self._now() - begun if idle else 0.0)
                continue
            await self._prefill()
            await self._decode()
            await self._awake.wait()

    async def _prefill(self) -> None:
        """Prompts of what is begun, and prefixes that new weights made stale."""
        before = 0 if self._stale else self._held()
        self._stale = False
        cached = self._begin_waiting()
        tokens = self._held() - before - cached
        if tokens:
            seconds = tokens / self.rates.prefill_tokens_per_s
            await asyncio.sleep(seconds)
            self._busy_s += seconds
            self._stepped_at = self._now()

    def _begin_waiting(self) -> int:
        """Begin the requests that fit; the real tokens of their contexts that need no computing."""
        cached = 0
        while self._waiting and not self._draining and len(self._running) < self.speed.max_running:
            name = self._next()
            if name is None:
                break
            drawing = self._running[name] = self._waiting.pop(name)
            self._asked[drawing.asked] += 1
            had = len(drawing.versions)
            self._had += had
            self._began[name] = self._steps, self._decoded_s
            end = self._steps + self._until(drawing) - had
            heapq.heappush(self._ends, (end, next(self._order), drawing))
            cached += self._cached(drawing)
        return cached

    def _take_in(self, drawing: SimulatedRequest) -> None:
        drawing.asked = self.version
        super()._take_in(drawing)

    def _next(self) -> str | None:
        """The request that is begun next, if any may (`RolloutEngine.hold_newer`)."""
        drawing = next(iter(self._waiting.values()))  # the oldest
        if self._hold_newer and any(n and v < drawing.asked for v, n in self._asked.items()):
            step_s = self.rates.step_seconds(len(self._running), self._read())
            if step_s >= (1 + JOIN_COST) * self.rates.decode_s:
                return None
        return drawing.name

    def _until(self, drawing: SimulatedRequest) -> int:
        """How many tokens a request that is begun has when it leaves the engine."""
        return drawing.wanted

    def _cached(self, drawing: SimulatedRequest) -> int:
        """Real tokens of a context that the engine has computed before."""
        return 0

    def _context(self, drawing: SimulatedRequest) -> int:
        """Real tokens of a running request's context."""
        return self.prompt + self._sampled(drawing) * self.unit

    def _held(self) -> int:
        """Real tokens of the contexts of all running requests."""
        return len(self._running) * self.prompt + self._had * self.unit

    def _read(self) -> float:
        """Real tokens of these contexts that a decode step reads."""
        if self.rates.context_budget is None:
            return self._held()
        return sum(self.rates.reads(self._context(d)) for d in self._running.values())

    def _sampled(self, drawing: SimulatedRequest) -> int:
        """Tokens of a running request."""
        return len(drawing.versions) + self._steps - self._began[drawing.name][0]

    async def _decode(self) -> None:
        """Steps until a request ends, or until something reaches the actor."""
        if not self._running:
            return
        step_s = self.rates.step_seconds(len(self._running), self._read()) * self.unit
        if not self._turns or self._turns[-1][1] != self.version:
            self._turns.append((self._steps, self.version))
        steps = max(1, min(self._soonest() - self._steps, int(LONGEST_S / step_s)))
        begun, done = self._now(), steps
        if await self._disturbed(steps * step_s):
            # the step that is under way ends before anything else happens
            done = min(steps, max(1, math.ceil((self._now() - begun) / step_s)))
            await asyncio.sleep(max(0.0, begun + done * step_s - self._now()))
        self._busy_s += done * step_s
        self._decoded_s += done * step_s
        self._steps += done
        self._had += done * len(self._running)
        self._stepped_at = self._now()
        while self._running and self._soonest() <= self._steps:
            self._finish(heapq.heappop(self._ends)[-1])

    def _soonest(self) -> int:
        """The count of steps at which the first of the running requests is done."""
        while self._running.get(self._ends[0][-1].name) is not self._ends[0][-1]:
            heapq.heappop(self._ends)  # withdrawn meanwhile
        return self._ends[0][0]

    def _runs(self, drawing: SimulatedRequest) -> Runs:
        """Return the runs of versions that sampled the tokens of a running request."""
        first, end = self._began[drawing.name][0], self._steps
        runs = []
        for count, version in reversed(self._turns):
            if end > first and end > count:
                runs.append((version, end - max(first, count)))
            end = count
            if count <= first:
                break
        before = [(version, len(list(of))) for version, of in itertools.groupby(drawing.versions)]
        return (*before, *reversed(runs))

    def _drop(self, name: str) -> SimulatedRequest | None:
        drawing = self._running.get(name)
        if drawing is not None:
            self._stopped(drawing)
        return super()._drop(name)

    def _stopped(self, drawing: SimulatedRequest) -> Runs:
        """A running request leaves the engine; returns the versions of its tokens, which are
        written into it, too."""
        runs = self._runs(drawing)
        self._asked[drawing.asked] -= 1
        self._had -= self._sampled(drawing)
        drawing.decoding_s += self._decoded_s - self._began.pop(drawing.name)[1]
        drawing.versions = [version for version, count in runs for _ in range(count)]
        return runs

    def _finish(self, drawing: SimulatedRequest) -> None:
        self._stopped(drawing)
        super()._finish(drawing)

    async def _disturbed(self, seconds: float) -> bool:
        """Decode for `seconds`, or until something reaches the actor; returns whether it did."""
        over: list[bool] = []

        def end() -> None:
            over.append(True)
            self._work.set()

        timer = self._loop().call_later(seconds, end)
        await self._work.wait()
        timer.cancel()
        return not over

    async def _stop(self, on_publish: OnPublish) -> None:
        await super()._stop(on_publish)
        self._work.set()

    async def _take(self, version: int) -> dict[str, float]:
        self._stale = True
        self._hold_newer = self._spare.next_version()
        return await super()._take(version)

    @property
    def busy_s(self) -> float:
        """Seconds of decoding and of computing prompts so far."""
        return self._busy_s


def uniform(run_seed: int, purpose: str, *indices: int) -> float:
    """A number between 0 and 1 that depends on the arguments alone. Starting a generator would take
    ten times as long."""
    return (derive_seed(run_seed, purpose, *indices) + 0.5) / 2**63


def answer_length(
    run_seed: int, request: Request, median: float, spread: float, *turn: int
) -> float:
    """Tokens of one answer, log-normal: depends on the request's seed alone. `turn`: the number of
    a later turn of an episode."""
    drawn = _NORMAL.inv_cdf(uniform(run_seed, "length", request.seed, *turn))
    return median * math.exp(spread * drawn)


def of_names(name: str) -> str:
    """The label of an actor's name. Example: "fp8-3" -> "fp8"."""
    return name.rpartition("-")[0]
