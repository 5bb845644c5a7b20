"""The loop. Holds references, counts and versions; no tensors, no trajectories.

    task            consumes                     produces                      waits for, unblocked by
    feed            room in the buffer           requests to rollout actors    room: a publish, a taken batch, a drop
    learn           a ready batch                optimizer steps, publishes    a batch: arrivals through the scorer
    publish         the learner's new weights    proven versions on actors     actors' arrival proofs
    watch           heartbeats                   replacements, lost groups     cluster.heartbeat_s

Schedules are three settings of this one loop: H = steps_per_publish, eta = max_staleness, on_publish. A schedule with
eta = 0 is synchronous: prompts are admitted in waves when nothing is in flight, and a publish is awaited before the
next wave, so that a run depends on nothing but its seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rlcore.errors import DeadlineExceeded, UserError
from rlcore.interfaces import Reporter
from rlcore.runtime.cluster import call
from rlcore.runtime.evaluation import Evaluator
from rlcore.runtime.fleet import Fleet, Publication
from rlcore.runtime.prompts import PromptSource
from rlcore.runtime.ranks import Ranks, deal
from rlcore.runtime.requests import RequestMaker
from rlcore.runtime.watch import RoleWatch


@dataclass(frozen=True, slots=True)
class Plan:
    """The schedule, as plain numbers."""

    steps: int
    groups_per_step: int
    steps_per_publish: int  # H
    max_staleness: int  # eta
    eval_every: int
    checkpoint_every: int
    checkpoint_at_end: bool
    wait_data_timeout_s: float
    publish_timeout_s: float
    step_timeout_s: float
    heartbeat_s: float
    hang_timeout_s: float
    request_timeout_s: float
    samples_per_step: int
    wire_dtype: str
    verify_full: bool
    run_seed: int
    sparse_copy: bool = False  # DistillSparse: theta + phi is published beside theta

    @property
    def total_groups(self) -> int:
        """Groups to admit over the whole plan: whole phases, so that a plan made longer later continues exactly."""
        return -(-self.steps // self.phase_steps) * self.phase_steps * self.groups_per_step

    @property
    def synchronous(self) -> bool:
        return self.max_staleness == 0

    @property
    def phase_steps(self) -> int:
        """Steps of one update phase: p_ref is fixed at its start. One rollout phase per publish when synchronous."""
        return self.steps_per_publish if self.synchronous else 1


@dataclass(slots=True)
class Progress:
    """What the loop has done: the controller's part of a run checkpoint."""

    step: int = 0  # optimizer steps done = learner version
    published: int = -1  # version proven on every healthy actor
    phase_version: int = 0  # version at the start of the update phase: p_ref of a phase of several steps
    evaluated: int = -1  # last step whose evaluation was started
    seconds: float = 0.0  # of training, over all sessions


DRAFT_METRICS = ("loss/policy", "loss/kl", "grad_norm", "entropy", "mismatch/kl_k1", "mismatch/abs_dlogp_mean")
Missing = dict[int, tuple[str, tuple[int, ...]]]  # group id -> (prompt id, indices of samples that have not arrived)
Batch = tuple[list[tuple[int, int]], dict[str, float]]  # ((group id, response tokens) ..., statistics)


@dataclass(slots=True)
class Clocks:
    """Seconds of the current step, by what they were spent on."""

    parts: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self.parts[name] = self.parts.get(name, 0.0) + time.monotonic() - start


class Saver(Protocol):
    """Makes run checkpoints: a cut of the run's state in memory, then its way to the disk while the run goes on."""

    async def begin(self, controller: Controller) -> None:
        """Cut the state, during which nothing of the run moves, and start writing it."""

    async def done(self, *, last: bool = False) -> None:
        """Wait for the checkpoint being written. Raises StageError if it is the `last` one and the disk refused it."""

    async def poll(self) -> None:
        """The same if it is written already, else nothing."""

    def cancel(self) -> None:
        """Give up the checkpoint being written."""


class Controller:
    """Runs the four tasks until the plan's steps are done, a stop is asked for, or one of them fails."""

    def __init__(
        self,
        plan: Plan,
        *,
        fleet: Fleet,
        buffer: Any,
        scorer: Any,
        learners: list[Any],
        prompts: PromptSource,
        requests: RequestMaker,
        evaluator: Evaluator,
        reporter: Reporter,
        saver: Saver,
        progress: Progress | None = None,
        resumed_from: str | None = None,
        wanted_actors: Callable[[], dict[str, int] | None] = lambda: None,
        draft_learners: Sequence[Any] = (),
    ) -> None:
        self.plan, self.fleet, self.buffer, self.scorer = plan, fleet, buffer, scorer
        self.ranks = Ranks(learners, timeout_s=plan.step_timeout_s)
        # a draft that is trained beside the policy, on the same batches
        self.draft = None
        if draft_learners:
            self.draft = Ranks(list(draft_learners), timeout_s=plan.step_timeout_s, name="draft learner")
        self.prompts, self.requests, self.evaluator, self.reporter = prompts, requests, evaluator, reporter
        self._saver, self._wanted_actors = saver, wanted_actors
        self.progress = progress or Progress()
        self.stop_requested = False
        # the learner's checkpoint folder, when a run goes on in the middle of an update phase
        middle = bool(self.progress.step % self.plan.phase_steps)
        self._resume_phase_from = resumed_from if middle else None
        self._publishing: asyncio.Task[dict[str, float]] | None = None
        self.latest: dict[str, float] = {}  # newest value of every metric
        self._publish_parts: dict[str, float] = {}
        self._evals: dict[str, float] = {}  # results for the next row
        self._arrived_tokens = 0.0
        self._row_at = time.monotonic()
        self._gate = asyncio.Event()  # synchronous schedules: open while generation, and only generation, may start
        self._admitting = asyncio.Lock()  # an admission is whole or not at all in a checkpoint
        self._live: dict[int, float] = {}  # group id -> deadline of its arrival (monotonic)

    # ---- the tasks ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Train to the end of the plan. Any task's failure ends all of them and is raised."""
        roles = RoleWatch(
            self._roles(),
            self.scorer,
            heartbeat_s=self.plan.heartbeat_s,
            hang_timeout_s=self.plan.hang_timeout_s,
            note=self.reporter.note,
            restarted=self._reissue_unscored,
        )
        background = [asyncio.create_task(t) for t in (self._feed(), self._watch_fleet(), roles.run())]
        learn = asyncio.create_task(self._train())
        try:
            done, _ = await asyncio.wait([learn, *background], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            await learn
        finally:
            tasks: list[asyncio.Task[Any] | None] = [learn, *background, self._publishing]
            for task in filter(None, tasks):
                task.cancel()
            await asyncio.gather(*filter(None, tasks), return_exceptions=True)
            self._saver.cancel()
            await self.fleet.close()

    async def _train(self) -> None:
        await self._start()
        await self._learn()

    async def _start(self) -> None:
        """Publish the learner's weights with a full arrival check, and hand in-flight groups of a resume out again.

        A resume in the middle of a phase publishes the weights that the phase began with: what is evaluated or drawn
        again must come from the version that the rest of the phase was drawn from.
        """
        middle = self._resume_phase_from is not None
        await self._publish(full=True, version=self.progress.phase_version if middle else self.progress.step)
        await self._publish_done()
        in_flight = await self._buffer_call(self.buffer.in_flight.remote(), "the groups in flight")
        if in_flight:
            named = ", ".join(map(str, sorted(in_flight)[:12])) + (", ..." if len(in_flight) > 12 else "")
            self.reporter.note(f"{len(in_flight)} groups were in flight at the checkpoint: handed out again ({named})")
            await self._hand_out(in_flight)
        if self.progress.evaluated < self.progress.step and self.evaluator.wants(self.progress.step, self.plan.steps):
            await self._evaluate()
            if self.plan.synchronous:
                self._evals = await self.evaluator.collect(wait=True)
        self._row_at = time.monotonic()
        self._gate.set()

    async def _feed(self) -> None:
        """Admit prompts wherever the bound leaves room."""
        plan = self.plan
        while True:
            await self._gate.wait()
            await self._buffer_call(
                self.buffer.wait_room.remote(plan.heartbeat_s, plan.synchronous, plan.total_groups),
                "room in the buffer",
            )
            async with self._admitting:
                if not self._gate.is_set():
                    continue
                await self._reissue_overdue()
                room = await self._buffer_call(
                    self.buffer.wait_room.remote(0.0, plan.synchronous, plan.total_groups), "room in the buffer"
                )
                if room:
                    items = [self.prompts.next() for _ in range(room)]
                    prompt_ids = [i.prompt_id for i in items]
                    ids = await self._buffer_call(self.buffer.admit.remote(prompt_ids), "an admission")
                    everything = tuple(range(self.requests.samples))
                    await self._hand_out({g: (p, everything) for g, p in zip(ids, prompt_ids)})

    async def _hand_out(self, groups: Missing) -> None:
        """Ask the fleet for these samples of these groups."""
        deadline = time.monotonic() + self.plan.request_timeout_s
        self._live.update(dict.fromkeys(groups, deadline))
        await self.fleet.assign(
            {
                g: [r for r in self.requests.group(g, prompt_id) if r.sample_index in samples]
                for g, (prompt_id, samples) in groups.items()
            }
        )

    async def _in_flight(self) -> Missing:
        return dict(await self._buffer_call(self.buffer.in_flight.remote(), "the groups in flight"))

    async def _reissue_overdue(self) -> None:
        """Groups that an actor or the scorer lost without a word are handed out again; nothing waits for ever."""
        in_flight = await self._in_flight()
        self._live = {g: d for g, d in self._live.items() if g in in_flight}
        self.fleet.forget(set(self._live))
        overdue = {g: in_flight[g] for g, d in self._live.items() if d < time.monotonic()}
        if overdue:
            self.reporter.note(f"{len(overdue)} groups missed rollout.request_timeout_s: handed out again")
            await self._hand_out(overdue)

    async def _watch_fleet(self) -> None:
        """Heartbeats of the rollout actors, the size asked for, and what sick ones left undone."""
        while True:
            await self.fleet.news(self.plan.heartbeat_s)
            wanted = self._wanted_actors()
            if wanted is not None:
                try:
                    self.fleet.resize(wanted)
                except UserError as e:
                    self.reporter.note(f"rlcore scale was refused: {e}")
            await self.fleet.watch()
            lost = self.fleet.take_lost()
            if lost:
                in_flight = await self._in_flight()
                again = {g: in_flight[g] for g in lost if g in in_flight}
                self.reporter.note(f"{len(again)} groups of lost actors are handed out again")
                await self._hand_out(again)
                await self.fleet.assign({g: requests for g, requests in lost.items() if g < 0})  # evaluation

    def _roles(self) -> list[tuple[Any, str]]:
        """Processes without which the run cannot go on, by the names that the user is told."""
        roles = [(self.buffer, "the replay buffer")]
        for group in filter(None, (self.ranks, self.draft)):
            roles += [(handle, f"{group.name} rank {i}") for i, handle in enumerate(group.handles)]
        return roles

    async def _reissue_unscored(self) -> None:
        """The graders' process died with what waited in it: what no actor is still sampling is asked for again."""
        in_flight, still_open = await self._in_flight(), await self.fleet.open_requests()
        lost = {}
        for group_id, (prompt_id, samples) in in_flight.items():
            gone = tuple(i for i in samples if f"train:{group_id}:{i}" not in still_open)
            if gone:
                lost[group_id] = (prompt_id, samples)
        self.reporter.note(f"the graders' process died and was restarted: {len(lost)} groups are handed out again")
        await self._hand_out(lost)
        await self.evaluator.again()

    async def _learn(self) -> None:
        plan, progress = self.plan, self.progress
        while progress.step < plan.steps and not self.stop_requested:
            phase = list(range(progress.step, self._phase_end(progress.step)))
            clocks = Clocks()
            with clocks.measure("wait_data"):
                batches = await self._take(phase)
            if batches is None:
                break
            await self._begin_phase(batches, clocks)
            for step, (_, stats) in batches.items():
                await self._one_step(step, stats, clocks)
                clocks = Clocks()
                if self.stop_requested:
                    break
        if self.stop_requested or self.plan.checkpoint_at_end:
            await self._checkpoint()
            await self._saver.done(last=True)

    async def _one_step(self, step: int, stats: dict[str, float], clocks: Clocks) -> None:
        plan, progress = self.plan, self.progress
        if plan.synchronous and step + 1 == self._phase_end(step):
            self._gate.clear()
        with clocks.measure("learn"):
            metrics = await self._train_step(step)
        await self._buffer_call(self.buffer.commit.remote(step), "a commit")
        progress.step = step + 1
        await self.buffer.set_versions.remote(progress.published, progress.step)
        last = progress.step == plan.steps
        if progress.step % plan.steps_per_publish == 0 or last or self.stop_requested:
            with clocks.measure("publish"):
                await self._publish(full=False, version=progress.step)
                if plan.synchronous or last:
                    await self._publish_done()
        await self._evaluate_if_due(last)
        await self._report(metrics | stats | self._evals, clocks)
        self._evals = {}
        if plan.checkpoint_every and progress.step % plan.checkpoint_every == 0 and not last:
            await self._checkpoint()
        self._gate.set()

    async def _train_step(self, step: int) -> dict[str, float]:
        """One optimizer step of the policy, and of its draft where one is trained beside it."""
        what = f"optimizer step {step + 1}"
        if self.draft is None:
            return dict(await self.ranks.call("train_step", step, what=what))
        mine = self.ranks.call("train_step", step, what=what)
        metrics, drafts = await asyncio.gather(mine, self.draft.call("train_step", step, what=f"the draft's {what}"))
        return metrics | {f"draft/{name.replace('/', '_')}": drafts[name] for name in DRAFT_METRICS if name in drafts}

    def _phase_end(self, step: int) -> int:
        phase = self.plan.phase_steps
        return min((step // phase + 1) * phase, self.plan.steps)

    def request_stop(self) -> None:
        """End after the current step, with a checkpoint."""
        self.stop_requested = True

    async def cut_parts(self, learner_folder: str) -> None:
        """Have learner and buffer fix their parts of a run checkpoint in memory."""
        in_phase = bool(self.progress.step % self.plan.phase_steps)
        await self.ranks.call("save", learner_folder, in_phase, what="a copy of the learner's state")
        if self.draft is not None:
            await self.draft.call("save", beside(learner_folder), in_phase, what="a copy of the draft learner's state")
        await self._buffer_call(self.buffer.snapshot.remote(), "a snapshot of the buffer")

    async def write_parts(self, buffer_folder: str) -> None:
        """Wait until learner and buffer have written what they fixed."""
        await self._buffer_call(self.buffer.save.remote(buffer_folder), "the buffer to write its journal")
        await self.ranks.call("saved", what="the learner to write its checkpoint")
        if self.draft is not None:
            await self.draft.call("saved", what="the draft's learner to write its checkpoint")

    # ---- parts of a step ------------------------------------------------------------------------------------------

    async def _take(self, steps: list[int]) -> dict[int, Batch] | None:
        """The batches of a phase, each as soon as it is there; None when a stop was asked for first."""
        deadline = time.monotonic() + self.plan.wait_data_timeout_s
        batches: dict[int, Batch] = {}
        wave = self.plan.total_groups if self.plan.synchronous else None
        for step in steps:
            while not await self._buffer_call(
                self.buffer.wait_ready.remote(step, self.plan.heartbeat_s, wave), "a training batch"
            ):
                if self.stop_requested:
                    return None
                if time.monotonic() > deadline:
                    lacking = await self._buffer_call(self.buffer.waiting_for.remote(step), "the buffer's state")
                    raise DeadlineExceeded(
                        f"waited {self.plan.wait_data_timeout_s:g} s for a batch (schedule.wait_data_timeout_s): "
                        f"{lacking}."
                    )
            batches[step] = await self._buffer_call(self.buffer.take.remote(step), "a training batch")
        return batches

    async def _begin_phase(self, batches: dict[int, Batch], clocks: Clocks) -> None:
        """Deal whole groups to the ranks by tokens and have p_ref computed; show a few samples."""
        first = min(batches)
        if self.plan.samples_per_step:
            samples = await self._buffer_call(self.buffer.samples.remote(first, self.plan.samples_per_step), "samples")
            decoded = await call(
                self.scorer.decode.remote(samples),
                timeout_s=60,
                what="samples to be decoded",
                key="logging.samples_per_step",
            )
            self.reporter.samples(first + 1, decoded)
        resumed, self._resume_phase_from = self._resume_phase_from, None
        if self.plan.phase_steps > 1 and resumed is None:
            self.progress.phase_version = first
        with clocks.measure("begin"):
            beginning = [self._begin_on(self.ranks, batches, resumed)]
            if self.draft is not None:
                beginning.append(self._begin_on(self.draft, batches, resumed and beside(resumed)))
            await asyncio.gather(*beginning)

    async def _begin_on(self, ranks: Ranks, batches: dict[int, Batch], resumed: str | None) -> None:
        shares: list[dict[int, list[int]]] = [{} for _ in ranks.handles]
        for step, (groups, _) in batches.items():
            for share, dealt in zip(shares, deal(groups, len(ranks.handles))):
                share[step] = dealt
        arguments = [(share, self.plan.phase_steps > 1, resumed, ranks.timeout_s) for share in shares]
        await ranks.call("begin_phase", what="an update phase to begin", per_rank=arguments)

    async def _publish(self, *, full: bool, version: int) -> None:
        """Gather the weights and start giving them to the actors; returns when the learner may go on."""
        await self._publish_done()
        plan, resumed = self.plan, self._resume_phase_from
        common = (version, plan.wire_dtype, full or plan.verify_full, plan.run_seed)
        what = f"weights of version {version}"
        manifest, handle = await self.ranks.call("publish", *common, resumed, what=what)
        others = {}
        if plan.sparse_copy:
            others["sparse"] = await self.ranks.call("publish", *common, None, True, what=f"sparse {what}")
        if self.draft is not None:
            kept = resumed and beside(resumed)
            others["draft"] = await self.draft.call("publish", *common, kept, what=f"the draft's {what}")
            await self.draft.call("follow", manifest, handle, what=f"the draft's learner to take {what}")
        publication = Publication(manifest, handle, others)
        self._publishing = asyncio.create_task(self._deliver(publication))

    async def _deliver(self, publication: Publication) -> dict[str, float]:
        start = time.monotonic()
        parts = await self.fleet.publish(publication)
        self.progress.published = publication.manifest.version
        await self._buffer_call(
            self.buffer.set_versions.remote(self.progress.published, self.progress.step), "a version to be noted"
        )
        return {"time/publish_s": time.monotonic() - start, **{f"time/publish_{k}": v for k, v in parts.items()}}

    async def _publish_done(self) -> None:
        if self._publishing is not None:
            self._publish_parts = await self._publishing
            self._publishing = None

    async def _evaluate_if_due(self, last: bool) -> None:
        """Results go into the row being written when they are there; `eval/policy_version` says whose they are."""
        due = self.evaluator.wants(self.progress.step, self.plan.steps)
        self._evals |= await self.evaluator.collect(wait=due or last)
        if due:
            await self._evaluate()
            self._evals |= await self.evaluator.collect(wait=self.plan.synchronous or last)

    async def _evaluate(self) -> None:
        await self._publish_done()  # the newest weights are what is evaluated
        self.progress.evaluated = self.progress.step
        await self.evaluator.start(self.progress.published)

    async def _checkpoint(self) -> None:
        """Cut a checkpoint between two steps and outside any admission; it is written while the run goes on."""
        await self._publish_done()
        await self._saver.done()
        async with self._admitting:
            await self._saver.begin(self)

    async def _report(self, metrics: dict[str, float], clocks: Clocks) -> None:
        if self._publishing is not None and self._publishing.done():
            await self._publish_done()
        await self._saver.poll()
        now = time.monotonic()
        step_s, self._row_at = now - self._row_at, now
        self.progress.seconds += step_s
        counts = await self._buffer_call(self.buffer.metrics.remote(), "the buffer's counts")
        arrived = counts["buffer/arrived_tokens"]
        learn_s = clocks.parts.get("learn", 0.0) + clocks.parts.get("begin", 0.0)
        row = {
            "step": self.progress.step,
            "policy_version": self.progress.step,
            **metrics,
            **counts,
            **self._publish_parts,
            "time/step_s": step_s,
            "time/wait_data_s": clocks.parts.get("wait_data", 0.0),
            "time/learn_s": learn_s,
            "time/publish_s": clocks.parts.get("publish", 0.0) + self._publish_parts.get("time/publish_s", 0.0),
            "time/total_s": self.progress.seconds,
            "throughput/rollout_tokens_per_s": (arrived - self._arrived_tokens) / step_s,
            "throughput/train_tokens_per_s": metrics.get("train/tokens", 0.0) / max(learn_s, 1e-9),
            "rollout/replacements": self.fleet.replacements,
        }
        self._arrived_tokens, self._publish_parts = arrived, {}
        self.latest.update(row)
        self.reporter.row(row)

    # ---- calls ----------------------------------------------------------------------------------------------------

    async def _buffer_call(self, ref: Any, what: str) -> Any:
        key, who = "schedule.publish_timeout_s", "the replay buffer"
        return await call(ref, timeout_s=self.plan.publish_timeout_s, what=what, key=key, who=who)


def beside(learner_folder: str) -> str:
    """Where a co-trained draft's learner is in the checkpoint that holds the policy's."""
    return str(Path(learner_folder).with_name("draft"))
