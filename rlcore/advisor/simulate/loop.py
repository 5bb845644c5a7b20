"""A simulated run: the real loop over simulated roles on a virtual clock, with its reports kept."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlcore.advisor.simulate.actors import SimulatedActor, Speed, spawned
from rlcore.advisor.simulate.clients import (
    Reward,
    SimulatedBuffer,
    SimulatedLearner,
    SimulatedScorer,
)
from rlcore.advisor.simulate.clock import run_simulated
from rlcore.buffer import ReplayBuffer
from rlcore.buffer.admission import ByteLimit
from rlcore.buffer.specs import SelectionSpec, TaskShare
from rlcore.errors import RoleLost
from rlcore.interfaces import Reporter, Span, Split, Task
from rlcore.loop import checkpoint
from rlcore.loop.controller import Controller
from rlcore.loop.dispatcher import LoopParts
from rlcore.loop.evaluation import Evaluator
from rlcore.loop.fleet import Fleet
from rlcore.loop.members import ActorPool
from rlcore.loop.prompts import (
    Difficulty,
    HeldOutRequests,
    Mixture,
    Prompts,
    PromptSource,
    RequestMaker,
    SampleSettings,
    task_seed,
)
from rlcore.loop.role_protocols import Clients, RoleWatch, Spawned
from rlcore.loop.run_plan import Plan, Progress
from rlcore.loop.saver import Saver
from rlcore.loop.specs import (
    CheckpointSpec,
    EvaluationSpec,
    ScheduleSpec,
    ShareSpec,
    SupervisionSpec,
    TargetSpec,
)
from rlcore.loop.targets import PageRange
from rlcore.tasks.specs import DifficultySpec
from rlcore.testing.records import make_sampling
from rlcore.types import Answer, Grade, Item, Request, SamplingSpec


class SimulatedReporter(Reporter):
    """Keeps everything, and passes it on to the reporter `beside` it."""

    def __init__(self, beside: Reporter | None = None) -> None:
        self.rows: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.shown: dict[int, list[Mapping[str, Any]]] = {}
        self.evaluations: dict[tuple[int, str], list[Mapping[str, Any]]] = {}
        self.timelines: dict[int, list[Span]] = {}
        self._beside = beside

    def row(self, row: Mapping[str, float | int | None]) -> frozenset[str]:
        self.rows.append(dict(row))
        return frozenset() if self._beside is None else self._beside.row(row)

    def samples(self, step: int, decoded: Sequence[Mapping[str, Any]]) -> None:
        self.shown[step] = list(decoded)

    def evaluation_samples(
        self, version: int, label: str, verdicts: Sequence[Mapping[str, Any]]
    ) -> None:
        self.evaluations[version, label] = list(verdicts)

    def note(self, text: str) -> None:
        self.notes.append(text)
        if self._beside is not None:
            self._beside.note(text)

    def activity(self, name: str, waits_for: str, step: int) -> None:
        if self._beside is not None:
            self._beside.activity(name, waits_for, step)

    def timeline(self, step: int, spans: Sequence[Span]) -> None:
        self.timelines[step] = list(spans)

    def fleet(self, actors: Sequence[Mapping[str, Any]]) -> None:
        if self._beside is not None:
            self._beside.fleet(actors)


class SimulatedWatch(RoleWatch):
    """Notices within a heartbeat that graders were restarted, or the losses that a test sets."""

    def __init__(
        self, buffer: SimulatedBuffer, scorer: SimulatedScorer, *, heartbeat_s: float
    ) -> None:
        self.lost = ""  # a role that the run cannot do without
        self._buffer = buffer
        self._scorer = scorer
        self._heartbeat_s = heartbeat_s

    async def run(
        self,
        scorer_restarted: Callable[[], Awaitable[None]],
        shard_lost: Callable[[str], Awaitable[None]],
    ) -> None:
        restarts = 0
        while True:
            await asyncio.sleep(self._heartbeat_s)
            await self._buffer.actor.alive()
            if self.lost:
                raise RoleLost(f"{self.lost} died")
            await self._buffer.nodes.beat()
            while self._buffer.nodes.lost:
                await shard_lost(self._buffer.nodes.lost.pop(0))
            if self._scorer.restarts != restarts:
                restarts = self._scorer.restarts
                await scorer_restarted()


Events = Callable[["Simulation"], Coroutine[Any, Any, None]]  # what happens beside the run


class CountingTask(Task):
    """Problem i is the number i; as many problems as asked for, or endlessly many to train on."""

    def __init__(self, name: str = "digits", *, train: int | None = None, heldout: int = 4) -> None:
        self.name = name
        self._sizes: dict[Split, int | None] = {"train": train, "heldout": heldout}

    def size(self, split: Split) -> int | None:
        return self._sizes[split]

    def item(self, split: Split, index: int) -> Item:
        return Item(f"{self.name}/{split}/{index}", str(index), str(index))

    def grade(self, item: Item, response: str) -> Grade:
        return Grade(1.0)

    def worked_answer(self, item: Item) -> str | None:
        return item.answer

    def alphabet(self) -> str | None:
        return "0123456789"


def _ten_tokens(request: Request) -> int:
    return 10


def _no_evaluation() -> EvaluationSpec:
    return EvaluationSpec(every=0, at_start=False, prompts=4)


def _by_sample(answer: Answer) -> float | None:
    return float(answer.sample_index % 2)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A run to simulate. Example: Scenario(ScheduleSpec(steps=4, groups_per_step=2))"""

    schedule: ScheduleSpec
    supervision: SupervisionSpec = field(default_factory=SupervisionSpec)
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    evaluation: EvaluationSpec = field(default_factory=_no_evaluation)
    selection: SelectionSpec = field(default_factory=SelectionSpec)
    samples: int = 2  # of a prompt
    actors: int = 2
    nodes: int = 1  # of the cluster, of which each has its share of the actors
    speed: Speed = field(default_factory=Speed)
    joined: bool = False  # weights are sent to all actors at once, by a group transport
    learn_s: float = 1.0  # of an optimizer step
    request_timeout_s: float = 600.0
    max_bytes: int = 1 << 30  # of the buffer
    tokens: Callable[[Request], int] = _ten_tokens  # that a request samples
    reward: Reward = _by_sample
    sampling: SamplingSpec = field(default_factory=make_sampling)
    # several tasks by label: their group sizes and weights
    tasks: Mapping[str, TaskShare] = field(default_factory=dict)
    problems: int | None = None  # of each task; None: endlessly many
    difficulty: DifficultySpec | None = None  # of every task
    kinds: Mapping[str, int] = field(default_factory=dict)  # actors by label; empty: `actors` bf16
    shares: Mapping[str, ShareSpec] = field(default_factory=dict)
    mixed_groups: bool = False
    targets: Mapping[str, TargetSpec] = field(default_factory=dict)
    pages: Mapping[str, PageRange] = field(default_factory=dict)
    layers: Mapping[str, int] = field(default_factory=dict)

    def plan(self) -> Plan:
        """The plan that the loop is given."""
        return Plan(
            self.schedule,
            self.supervision,
            self.checkpoint,
            request_timeout_s=self.request_timeout_s,
            samples_per_step=1,
            verify_full=False,
            shares=self.shares,
            mixed_groups=self.mixed_groups,
            targets=self.targets,
            pages=self.pages,
            layers=self.layers,
        )


class Simulation:
    """One attempt at a run; `actors` holds each member's present process by name.

    Build and run it inside `run_simulated`, or with `simulate`.
    """

    def __init__(self, scenario: Scenario, root: Path, *, beside: Reporter | None = None) -> None:
        """`root`: the folder of the run's checkpoints. `beside`: a reporter that receives all
        reports, too."""
        self.scenario = scenario
        self.root = root
        self.reporter = self.make_reporter(beside)
        self.progress = Progress()
        self.actors: dict[str, SimulatedActor] = {}
        self.started: list[SimulatedActor] = []  # every process of every member
        self.not_starting: list[str] = []  # why the next processes do not start, first come first
        self.wanted: dict[str, int] | None = None  # read once, as `rlcore scale` asks
        self.buffer = self.make_buffer()
        self.learner = self.make_learner()
        self.scorer = self.make_scorer()
        self.watch = SimulatedWatch(
            self.buffer, self.scorer, heartbeat_s=scenario.supervision.heartbeat_s
        )
        labels = list(scenario.tasks) or ["digits"]
        self.sources = {label: self._source(label) for label in labels}
        self.prompts: Prompts = self.sources[labels[0]]
        if scenario.tasks:
            weights = {label: share.weight for label, share in scenario.tasks.items()}
            self.prompts = Mixture(self.sources, weights, run_seed=0)
        self.fleet = Fleet(
            self.pools(),
            scenario.schedule,
            scenario.supervision,
            joined=scenario.joined,
            note=self.reporter.note,
        )
        self.parts = self._parts()

    def make_reporter(self, beside: Reporter | None) -> SimulatedReporter:
        """Make the reporter that keeps the rows of the run."""
        return SimulatedReporter(beside)

    def make_buffer(self) -> SimulatedBuffer:
        """The buffer of the run."""
        scenario = self.scenario
        buffer = ReplayBuffer(
            scenario.schedule,
            scenario.selection,
            samples_per_group=scenario.samples,
            limit=ByteLimit(scenario.max_bytes),
            run_seed=0,
            keep_samples=8,
            tasks=scenario.tasks or None,
        )
        return SimulatedBuffer(buffer, scenario.nodes)  # type: ignore[abstract]  # they are derived

    def make_scorer(self) -> SimulatedScorer:
        """The graders of the run, which send to `self.buffer`."""
        return SimulatedScorer(self.buffer, reward=self.scenario.reward)

    def make_learner(self) -> SimulatedLearner:
        """The learner of the run, which reads from `self.buffer`."""
        beside = self.actors.values if self.scenario.schedule.colocated else None
        return SimulatedLearner(self.buffer, step_s=self.scenario.learn_s, beside=beside)

    def pools(self) -> list[ActorPool]:
        """The kinds of actors and how many there are of each."""
        kinds = self.scenario.kinds or {"bf16": self.scenario.actors}
        return [ActorPool(label, self._spawn, count) for label, count in kinds.items()]

    def _source(self, label: str) -> PromptSource:
        spec = self.scenario.difficulty
        return PromptSource(
            CountingTask(label, train=self.scenario.problems),
            lambda asked: [1 + int(c) for c in str(asked)],
            run_seed=0,
            max_prompt_tokens=16,
            difficulty=None if spec is None else Difficulty(spec, task_seed(0, label)),
        )

    def _spawn(self, name: str) -> Spawned:
        scenario = self.scenario
        actor = SimulatedActor(
            name,
            self.buffer,
            self.scorer,
            speed=scenario.speed,
            tokens=scenario.tokens,
            limits=(scenario.schedule, scenario.supervision),
        )
        self.actors[name] = actor
        self.started.append(actor)
        return spawned(actor, self.not_starting.pop(0) if self.not_starting else "")

    def _parts(self) -> LoopParts:
        scenario, reporter = self.scenario, self.reporter
        sampling = scenario.sampling
        asked = {label: SampleSettings(sampling, s.samples) for label, s in scenario.tasks.items()}
        requests = RequestMaker(
            self.prompts, sampling=sampling, samples=scenario.samples, run_seed=0, tasks=asked
        )
        heldout = HeldOutRequests(self.sources, sampling=sampling, run_seed=0)
        evaluator = Evaluator(
            scenario.evaluation, heldout, self.fleet, self.scorer, reporter.evaluation_samples
        )
        saver = Saver(
            scenario.checkpoint,
            self.root,
            {"model_path": "model", "seed": 0},
            note=reporter.note,
            is_accuracy=lambda name: name.endswith("/greedy"),
        )
        return LoopParts(self.fleet, requests, evaluator, saver, reporter, self._take_wanted)

    def _take_wanted(self) -> dict[str, int] | None:
        wanted, self.wanted = self.wanted, None
        return wanted

    async def run(self, events: Events | None = None, *, resume: bool = False) -> Simulation:
        """Run to the end, with `events` at their times; returns this simulation. Raises what ended
        the run.

        `resume`: from the newest checkpoint in `root`.
        """
        await self.buffer.start()
        found = checkpoint.resume_from(self.root, self.reporter.note) if resume else None
        if found is not None:
            state = checkpoint.state_of(found)
            self.progress = Progress(**state["progress"])
            self.prompts.restore(state["prompts"])
            self.learner.load(found / "learner")
            await self.buffer.load(str(found / "buffer"))
        self.controller = Controller(
            self.scenario.plan(),
            Clients(self.buffer, self.learner, self.scorer, self.watch),
            self.parts,
            progress=self.progress,
            resumed_from=str(found / "learner") if found else None,
        )
        happening = None if events is None else asyncio.create_task(events(self))
        try:
            await self.controller.run()
        finally:
            if happening is not None:
                happening.cancel()
                await asyncio.gather(happening, return_exceptions=True)
        if happening is not None and not happening.cancelled():
            happening.result()  # a test's own mistake must not pass unseen
        return self

    async def until(self, step: int) -> None:
        """Return when the row of `step` was written, while the next step is being taken."""
        while step and not any(row["step"] >= step for row in self.reporter.rows[-1:]):
            await asyncio.sleep(0.01)


def simulate(
    scenario: Scenario, root: Path, events: Events | None = None, *, resume: bool = False
) -> Simulation:
    """Build and run a simulation to its end. Raises what ended the run."""

    async def main() -> Simulation:
        return await Simulation(scenario, root).run(events, resume=resume)

    return run_simulated(main())
