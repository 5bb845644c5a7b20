"""One run of a fleet in simulated time: the real controller, buffer, admission and ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rlcore.advisor.planner.actor import (
    Answers,
    PlannedScorer,
    RatedActor,
    Runs,
    answer_length,
    of_names,
    uniform,
)
from rlcore.advisor.planner.specs import ActorRates, EpisodeSpec, Rates
from rlcore.advisor.simulate.actors import SimulatedRequest, spawned
from rlcore.advisor.simulate.clients import SimulatedLearner, SimulatedScorer
from rlcore.advisor.simulate.loop import Scenario, SimulatedReporter, Simulation
from rlcore.buffer.specs import SelectionSpec
from rlcore.errors import DeadlineExceeded, RoleLost
from rlcore.interfaces import Reporter, Span
from rlcore.loop.members import ActorPool
from rlcore.loop.role_protocols import Batch, SampleDetails, SampleKey, Spawned
from rlcore.loop.specs import CheckpointSpec, ScheduleSpec, SupervisionSpec
from rlcore.seeding import derive_seed
from rlcore.types import Request

LONGEST = 64  # simulated tokens of the longest answer: each stands for `unit` real ones
DAY_S = 86_400.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PlannedFleet:
    """The inputs of a forecast. Example: PlannedFleet({"bf16": 4}, {"bf16": ActorRates()}, Rates(),
    ScheduleSpec(steps=20), samples=8, max_tokens=512)"""

    actors: Mapping[str, int]  # how many of each label
    actor_rates: Mapping[str, ActorRates]  # by label
    rates: Rates  # of everything else
    schedule: ScheduleSpec
    samples: int  # rollout.samples_per_prompt
    max_tokens: int  # rollout.max_new_tokens
    ref_pass: bool = False  # p_ref is a pass of its own
    supervision: SupervisionSpec = field(default_factory=SupervisionSpec)
    selection: SelectionSpec = field(default_factory=SelectionSpec)
    joined: bool = False  # weights are sent to all actors at once
    buffer_bytes: int = 1 << 40
    nodes: int = 1  # with rollout actors; each has its share of them, and graders
    teachers: int = 0  # engines of a teacher, which score every answer before it is graded
    run_seed: int = 0
    max_turns: int = 1  # of an episode
    max_len: int = 1 << 30  # real tokens of an episode, prompts and answers included
    places: int = 1 << 30  # episodes that one actor plays at once

    @property
    def unit(self) -> int:
        """Real tokens for which one simulated token stands."""
        return max(1, -(-self.max_tokens // LONGEST))

    def real_tokens(self, request: Request, *turn: int) -> int:
        """Tokens of a request's answer, or of a later turn, at least 1 and at most `max_tokens`."""
        lengths = self.rates.lengths
        drawn = answer_length(self.run_seed, request, lengths.median, lengths.spread, *turn)
        return min(self.max_tokens, max(1, round(drawn)))

    def simulated_tokens(self, request: Request) -> int:
        """Length of a request's answer, or all turns, in simulated tokens."""
        return self.turn_ends(request)[-1]

    def turn_ends(self, request: Request) -> list[int]:
        """Simulated tokens of a request at the end of each of its turns; an answer is one turn."""
        ends = [self._turn(request)]
        episodes = self.rates.episodes
        if episodes is None:
            return ends
        # up or down at random, so that the mean is kept
        turns = int(episodes.turns + uniform(self.run_seed, "turns", request.seed))
        for turn in range(1, min(turns, self.max_turns)):
            context = self.rates.lengths.prompt + ends[-1] * self.unit + turn * episodes.given
            if context >= self.max_len:
                break
            ends.append(ends[-1] + self._turn(request, turn))
        return ends

    def _turn(self, request: Request, *turn: int) -> int:
        """Simulated tokens of a turn, rounded up or down at random so that the mean is kept."""
        whole, rest = divmod(self.real_tokens(request, *turn), self.unit)
        more = uniform(self.run_seed, "rounding", request.seed, *turn) < rest / self.unit
        return max(1, whole + int(more))

    def scenario(self) -> Scenario:
        """The scenario that the simulation is given."""
        return Scenario(
            self.schedule,
            supervision=self.supervision,
            samples=self.samples,
            nodes=self.nodes,
            request_timeout_s=1e9,
            selection=self.selection,
            joined=self.joined,
            max_bytes=self.buffer_bytes,
            tokens=self.simulated_tokens,
            checkpoint=CheckpointSpec(every_s=0, at_end=False),
        )


class RatedLearner(SimulatedLearner):
    """A learner that takes the time of its tokens, and records their staleness."""

    fleet: PlannedFleet
    answers: Answers

    async def _read(self, step: int, ids: list[int]) -> list[Runs]:
        stored = await self._buffer.actor.stored(step, ids, 3600.0)
        if stored is None:
            raise DeadlineExceeded(f"waited for the groups of step {step}")
        episodes = [episode for group in stored for episode in group.episodes]
        return [self.answers.runs(record) for e in episodes for record in e.records]

    async def fetch(self, batches: Mapping[int, Batch]) -> None:
        await super().fetch(batches)
        tokens = sum(self._tokens(self._stored[step]) for step in batches)
        await asyncio.sleep(tokens * self.fleet.rates.learner.fetch_token_s)

    def begin_seconds(self, steps: int) -> float:
        rates = self.fleet.rates.learner
        token_s = rates.phase_token_s + self.fleet.ref_pass * rates.ref_token_s
        batches = {id(answers): answers for answers in self._phase.values()}
        return token_s * sum(self._tokens(answers) for answers in batches.values())

    def step_seconds(self, records: Sequence[Runs]) -> float:
        rates = self.fleet.rates.learner
        return rates.step_s + self._tokens(records) * rates.token_s

    def _tokens(self, answers: Sequence[Runs]) -> float:
        """Real tokens, prompts included."""
        sampled = sum(tokens for runs in answers for _, tokens in runs)
        return len(answers) * self.fleet.rates.given + sampled * self.fleet.unit

    async def train_step(self, step: int) -> dict[str, float]:
        answers: list[Runs] = self._phase.pop(step)
        versions, tokens = np.array([run for runs in answers for run in runs]).T
        staleness = np.repeat(step - versions, tokens)
        took = self.step_seconds(answers)
        await asyncio.sleep(took)
        return {
            "loss/policy": 0.0,
            "grad_norm": 1.0,
            "train/sequences": float(len(answers)),
            "train/tokens": float(len(staleness) * self.fleet.unit),
            "staleness/mean": float(staleness.mean()),
            "staleness/p90": float(np.quantile(staleness, 0.9)),
            "staleness/max": float(staleness.max()),
            "time/learner_busy_s": took,
        }

    async def sample_details(self, samples: Sequence[SampleKey]) -> dict[SampleKey, SampleDetails]:
        return {}


class PlannedTeacher:
    """The engines of a teacher, which score one answer after the other."""

    def __init__(self, fleet: PlannedFleet) -> None:
        rate = fleet.rates.teacher_tokens_per_s
        self._token_s = 0.0 if not fleet.teachers or rate is None else 1 / (rate * fleet.teachers)
        self._free_at = 0.0
        self.busy_s = 0.0

    def then(self, tokens: float, go_on: Callable[[], None]) -> None:
        """Call `go_on` when an answer of so many real tokens, prompt included, is scored."""
        if not self._token_s:
            go_on()
            return
        loop = asyncio.get_running_loop()
        took = tokens * self._token_s
        self.busy_s += took
        self._free_at = max(self._free_at, loop.time()) + took
        loop.call_at(self._free_at, go_on)


class PlannedActor(RatedActor):
    """Hands its answers to training prompts on without serialising them."""

    answers: Answers
    teacher: PlannedTeacher
    fleet: PlannedFleet
    shard: str  # of its node

    def __init__(self, *args: Any, **arguments: Any) -> None:
        self._leaving: list[Callable[[], None]] = []  # finished answers that have not left
        self._handed_over = 0.0
        super().__init__(*args, **arguments)

    def _finish(self, drawing: SimulatedRequest) -> None:
        if drawing.request.purpose != "train":
            super()._finish(drawing)
            return
        runs = self._stopped(drawing)
        self._hand_over(drawing, runs, self._left(drawing))

    def _hand_over(self, drawing: SimulatedRequest, runs: Runs, draw_id: str) -> None:
        answer = self.answers.put(drawing.request, runs, self.name, draw_id, self.shard)
        sampled = sum(tokens for _, tokens in runs) * self.fleet.unit
        finished = partial(self._scorer.finished, answer)  # type: ignore[attr-defined]
        self._send(partial(self.teacher.then, self.fleet.rates.given + sampled, finished))

    def _send(self, message: Callable[[], None]) -> None:
        """Answers leave together, at most every `hand_over_s` while the engine has more."""
        self._leaving.append(message)
        if not self.rates.hand_over_s or not (self._running or self._waiting):
            self._flush()
        elif len(self._leaving) == 1:
            due = self._handed_over + self.rates.hand_over_s
            self._loop().call_at(max(due, self._now()), self._flush)

    def _flush(self) -> None:
        leaving, self._leaving = self._leaving, []
        if leaving and not self.dead:
            self._handed_over = self._now()
            for message in leaving:
                message()

    async def _call(self, work: Callable[[], Awaitable[T]], what: str) -> T:
        """The actor may die but never hangs, so a call needs no task and no deadline."""
        if not self.dead:
            answer = await work()
        if self.dead:
            raise RoleLost(f"its process died while the run waited for {what}")
        return answer


class PlayingActor(PlannedActor):
    """Plays episodes. Between two turns a request is with its environment, and the engine keeps its
    context until new weights come. Every open episode has one of the actor's places."""

    episodes: EpisodeSpec

    def __init__(self, *args: Any, **arguments: Any) -> None:
        self._queued: dict[str, SimulatedRequest] = {}  # without a place
        self._playing: dict[str, SimulatedRequest] = {}  # with their environments
        self._computed: dict[str, tuple[int, int]] = {}  # contexts: (version, real tokens)
        self._given = 0  # real tokens that environments have given to what runs
        super().__init__(*args, **arguments)

    @property
    def unfinished(self) -> list[str]:
        return [*super().unfinished, *self._playing, *self._queued]

    def _take_in(self, drawing: SimulatedRequest) -> None:
        self._queued[drawing.name] = drawing
        self._take_places()

    def _take_places(self) -> None:
        taken = len(self._waiting) + len(self._running) + len(self._playing)
        for name in list(self._queued)[: max(0, self.fleet.places - taken)]:
            self._call_environment(self._queued.pop(name), 1, self._sample)

    def _call_environment(
        self, drawing: SimulatedRequest, calls: int, then: Callable[[SimulatedRequest], None]
    ) -> None:
        """`then`, after so many calls, takes the episode on, unless it was dropped meanwhile."""

        def answered() -> None:
            if not self.dead and self._playing.get(drawing.name) is drawing:
                del self._playing[drawing.name]
                then(drawing)

        self._playing[drawing.name] = drawing
        self._loop().call_later(calls * self.episodes.call_s, answered)

    def _sample(self, drawing: SimulatedRequest) -> None:
        self._waiting[drawing.name] = drawing
        self._work.set()

    def _until(self, drawing: SimulatedRequest) -> int:
        had = len(drawing.versions)
        return next(end for end in self.fleet.turn_ends(drawing.request) if end > had)

    def _cached(self, drawing: SimulatedRequest) -> int:
        self._given += self._given_to(drawing)
        version, tokens = self._computed.pop(drawing.name, (self.version, 0))
        return tokens if version == self.version else 0

    def _given_to(self, drawing: SimulatedRequest) -> int:
        """Real tokens that its environment gave it before the turn that it samples."""
        before = sum(end <= len(drawing.versions) for end in self.fleet.turn_ends(drawing.request))
        return before * self.episodes.given

    def _held(self) -> int:
        return super()._held() + self._given

    def _context(self, drawing: SimulatedRequest) -> int:
        return super()._context(drawing) + self._given_to(drawing)

    def _stopped(self, drawing: SimulatedRequest) -> Runs:
        self._given -= self._given_to(drawing)
        self._computed[drawing.name] = self.version, self._context(drawing)
        return super()._stopped(drawing)

    def _drop(self, name: str) -> SimulatedRequest | None:
        dropped = super()._drop(name) or self._queued.pop(name, None)
        dropped = dropped or self._playing.pop(name, None)
        self._computed.pop(name, None)
        self._take_places()
        return dropped

    def _finish(self, drawing: SimulatedRequest) -> None:
        super()._finish(drawing)
        self._take_places()

    def _hand_over(self, drawing: SimulatedRequest, runs: Runs, draw_id: str) -> None:
        if len(drawing.versions) < drawing.wanted:
            self._call_environment(drawing, 1, self._sample)
            return

        def over(_: SimulatedRequest) -> None:
            super(PlayingActor, self)._hand_over(drawing, runs, draw_id)
            self._take_places()

        self._computed.pop(drawing.name, None)
        self._call_environment(drawing, 2, over)


class PlannedReporter(SimulatedReporter):
    """Keeps the rows. The timelines of a large fleet would take more memory than all else."""

    def __init__(self, engines: Sequence[RatedActor], teacher: PlannedTeacher) -> None:
        """`engines`: the list to which every started process is added."""
        super().__init__()
        # (clock, busy seconds of all actors, of a teacher's engines) at each row
        self.marks: list[tuple[float, float, float]] = []
        self._engines = engines
        self._teacher = teacher

    def row(self, row: Mapping[str, float | int | None]) -> frozenset[str]:
        speaking = super().row(row)
        now = asyncio.get_running_loop().time()
        busy = sum(engine.busy_s for engine in self._engines)
        self.marks.append((now, busy, self._teacher.busy_s))
        return speaking

    def timeline(self, step: int, spans: Sequence[Span]) -> None:
        pass


class PlannedRun(Simulation):
    """`Simulation` with the fleet's own kinds of actors, and rates in place of constants."""

    reporter: PlannedReporter

    def __init__(self, fleet: PlannedFleet, root: Path) -> None:
        self.planned = fleet
        self.engines: list[RatedActor] = []  # every process that was started
        self.answers = Answers()
        self.teacher = PlannedTeacher(fleet)
        super().__init__(fleet.scenario(), root)
        self.scorer.grade_s = fleet.rates.grade_s
        self.scorer.deliver_s = fleet.rates.deliver_s  # type: ignore[attr-defined]

    def make_reporter(self, beside: Reporter | None) -> PlannedReporter:
        return PlannedReporter(self.engines, self.teacher)

    def make_learner(self) -> SimulatedLearner:
        learner = RatedLearner(self.buffer, publish_s=self.planned.rates.learner.publish_s)
        learner.fleet = self.planned
        learner.answers = self.answers
        return learner

    def make_scorer(self) -> SimulatedScorer:
        scorer = PlannedScorer(self.buffer, reward=self.scenario.reward)
        scorer.answers = self.answers
        return scorer

    def pools(self) -> list[ActorPool]:
        planned = self.planned
        return [ActorPool(label, self._begin, n) for label, n in planned.actors.items()]

    def make_actor(self, name: str, **arguments: Any) -> RatedActor:
        """The process of an actor. `arguments`: further arguments of `RatedActor`."""
        episodes = self.planned.rates.episodes
        kind = PlannedActor if episodes is None else PlayingActor
        actor = kind(name, self.buffer, self.scorer, **arguments)
        if isinstance(actor, PlayingActor) and episodes is not None:
            actor.episodes = episodes
        actor.answers = self.answers
        actor.teacher, actor.fleet = self.teacher, self.planned
        actor.shard = f"simulated-{self.buffer.nodes.of(name)}"
        return actor

    def _begin(self, name: str) -> Spawned:
        planned = self.planned
        actor = self.make_actor(
            name,
            rates=planned.actor_rates[of_names(name)],
            tokens=planned.simulated_tokens,
            limits=(planned.schedule, planned.supervision),
            unit=planned.unit,
            prompt=planned.rates.lengths.prompt,
        )
        self.actors[name] = actor
        self.engines.append(actor)
        return spawned(actor)

    async def failing(self, simulation: Simulation) -> None:
        """Kills processes of actors at random times, at the given rate."""
        per_s = self.planned.rates.failures_per_day * sum(self.planned.actors.values()) / DAY_S
        rng = np.random.default_rng(derive_seed(self.planned.run_seed, "failures"))
        while True:
            await asyncio.sleep(float(rng.exponential(1 / per_s)))
            names = sorted(self.actors)
            self.actors[names[int(rng.integers(len(names)))]].die()
