"""The loop. Holds references, counts and versions; no tensors, no trajectories.

    task            consumes                     produces                      waits for, unblocked by
    feed            room in the buffer           requests to rollout actors    room: a publish, a taken batch, a drop
    learn           a ready batch                optimizer steps, publishes    a batch: arrivals through the scorer;
                                                                               the next one while it trains (eta > 0)
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlcore.errors import DeadlineExceeded
from rlcore.interfaces import Reporter
from rlcore.runtime.buffer_client import BufferClient
from rlcore.runtime.busy import BusyTime
from rlcore.runtime.cluster import call
from rlcore.runtime.evaluation import Evaluator
from rlcore.runtime.feed import Feed
from rlcore.runtime.fleet import Fleet
from rlcore.runtime.learners import Batch, Learners
from rlcore.runtime.plan import Plan, Progress
from rlcore.runtime.prompts import PromptSource
from rlcore.runtime.publisher import Publisher
from rlcore.runtime.requests import RequestMaker
from rlcore.runtime.watch import RoleWatch

Coming = asyncio.Task[dict[int, Batch] | None]  # batches of a phase, by step; None when a stop came first


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

    def scored(self, version: int, results: Mapping[str, float], scores: dict[str, float]) -> None:
        """Note in `scores` what an evaluation of `version` says about its checkpoint."""

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
        learners: Sequence[Any],
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
        self.plan, self.fleet, self.scorer, self.prompts = plan, fleet, scorer, prompts
        self.evaluator, self.reporter, self._saver = evaluator, reporter, saver
        self.progress = progress or Progress()
        self.buffer = BufferClient(buffer, timeout_s=plan.publish_timeout_s)
        self.learners = Learners(learners, draft_learners, timeout_s=plan.step_timeout_s)
        self.publisher = Publisher(plan, self.learners, fleet, self.buffer, self.progress)
        self.feed = Feed(
            plan,
            fleet=fleet,
            buffer=self.buffer,
            prompts=prompts,
            requests=requests,
            evaluator=evaluator,
            note=reporter.note,
            wanted_actors=wanted_actors,
        )
        self.stop_requested = False
        # the learner's checkpoint folder, when a run goes on in the middle of an update phase
        middle = bool(self.progress.step % self.plan.phase_steps)
        self._resume_phase_from = resumed_from if middle else None
        self._evals: dict[str, float] = {}  # results for the next row
        self._arrived_tokens = 0.0
        self._busy = BusyTime()
        self._row_at = time.monotonic()

    # ---- the tasks ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Train to the end of the plan. Any task's failure ends all of them and is raised."""
        roles = RoleWatch(
            [(self.buffer.handle, "the replay buffer"), *self.learners.roles()],
            self.scorer,
            heartbeat_s=self.plan.heartbeat_s,
            hang_timeout_s=self.plan.hang_timeout_s,
            note=self.reporter.note,
            restarted=self.feed.reissue_unscored,
        )
        background = [asyncio.create_task(t) for t in (self.feed.admit(), self.feed.watch_fleet(), roles.run())]
        learn = asyncio.create_task(self._train())
        try:
            done, _ = await asyncio.wait([learn, *background], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            await learn
        finally:
            for task in (learn, *background):
                task.cancel()
            await asyncio.gather(learn, *background, return_exceptions=True)
            await self.publisher.cancel()
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
        resumed = self._resume_phase_from
        version = self.progress.step if resumed is None else self.progress.phase_version
        await self.publisher.begin(version, full=True, resumed=resumed)
        await self.publisher.done()
        await self.feed.resume()
        if self.progress.evaluated < self.progress.step and self.evaluator.wants(self.progress.step, self.plan.steps):
            await self._evaluate()
            if self.plan.synchronous:
                self._evals = await self._evaluated(wait=True)
        counts = await self.buffer.call("metrics", what="the buffer's counts")
        self._arrived_tokens = counts["buffer/arrived_tokens"]  # a resumed run's go on from the checkpoint's
        self.publisher.take_seconds()  # these two: before the first row's time began
        self._busy.take(self.fleet.members)
        self._row_at = time.monotonic()
        self.feed.gate.set()

    async def _learn(self) -> None:
        plan, progress = self.plan, self.progress
        coming: Coming | None = None
        try:
            while progress.step < plan.steps and not self.stop_requested:
                phase = list(range(progress.step, plan.phase_end(progress.step)))
                clocks = Clocks()
                coming = coming or asyncio.create_task(self._take(phase))
                with clocks.measure("wait_data"):
                    batches = await self._awaited(coming, phase)
                if batches is None:
                    break
                coming = None
                await self._begin_phase(batches, clocks)
                if not plan.synchronous and phase[-1] + 1 < plan.steps:  # gathered while this phase is trained on
                    coming = asyncio.create_task(self._take([phase[-1] + 1]))
                for step, (_, stats) in batches.items():
                    await self._one_step(step, stats, clocks)
                    clocks = Clocks()
                    if self.stop_requested:
                        break
        finally:
            if coming is not None:
                coming.cancel()
                await asyncio.gather(coming, return_exceptions=True)
        # until a resumed phase has begun anew, the learner holds its first weights: the checkpoint resumed from stands
        if (self.stop_requested or self.plan.checkpoint_at_end) and self._resume_phase_from is None:
            await self._checkpoint()
            await self._saver.done(last=True)

    async def _one_step(self, step: int, stats: dict[str, float], clocks: Clocks) -> None:
        plan, progress = self.plan, self.progress
        if plan.synchronous and step + 1 == plan.phase_end(step):
            self.feed.gate.clear()
        with clocks.measure("learn"):
            metrics = await self.learners.train_step(step)
        await self.buffer.call("commit", step, what="a commit")
        progress.step = step + 1
        await self.buffer.call("set_versions", progress.published, progress.step, what="a version to be noted")
        last = progress.step == plan.steps
        if progress.step % plan.steps_per_publish == 0 or last:  # a stop publishes nothing: its checkpoint needs none
            await self.publisher.begin(progress.step, full=False)
            if plan.synchronous or last:
                await self.publisher.done()
        await self._evaluate_if_due(last)
        await self._report(metrics | stats | self._evals, clocks)
        self._evals = {}
        if plan.checkpoint_every and progress.step % plan.checkpoint_every == 0 and not last:
            await self._checkpoint()
        self.feed.gate.set()

    def request_stop(self) -> None:
        """End after the current step, with a checkpoint."""
        self.stop_requested = True

    async def cut_parts(self, learner_folder: str) -> None:
        """Have learner and buffer fix their parts of a run checkpoint in memory."""
        await self.learners.save(learner_folder, in_phase=bool(self.progress.step % self.plan.phase_steps))
        await self.buffer.call("snapshot", what="a snapshot of the buffer")

    async def write_parts(self, buffer_folder: str) -> None:
        """Wait until learner and buffer have written what they fixed."""
        await self.buffer.call("save", buffer_folder, what="the buffer to write its journal")
        await self.learners.saved()

    # ---- parts of a step ------------------------------------------------------------------------------------------

    async def _take(self, steps: list[int]) -> dict[int, Batch] | None:
        """The batches of a phase, each as soon as it is there, fetched by the learners; None at a stop."""
        batches: dict[int, Batch] = {}
        wave = self.plan.total_groups if self.plan.synchronous else None
        for step in steps:
            while not await self.buffer.call("wait_ready", step, self.plan.heartbeat_s, wave, what="a training batch"):
                if self.stop_requested:
                    return None
            batches[step] = await self.buffer.call("take", step, what="a training batch")
        await self.learners.fetch(batches)
        return batches

    async def _awaited(self, coming: Coming, phase: list[int]) -> dict[int, Batch] | None:
        """What `_take` gives. Raises DeadlineExceeded, saying what is missing, when the learner idled too long."""
        patience = self.plan.wait_data_timeout_s
        await asyncio.wait([coming], timeout=patience)
        if coming.done():
            return coming.result()
        coming.cancel()
        lacking = await self.buffer.call("waiting_for", phase[-1], what="the buffer's state")
        raise DeadlineExceeded(f"waited {patience:g} s for a batch (schedule.wait_data_timeout_s): {lacking}.")

    async def _begin_phase(self, batches: dict[int, Batch], clocks: Clocks) -> None:
        """Show a few samples, and have the learners take their shares and compute p_ref."""
        first = min(batches)
        if self.plan.samples_per_step:
            samples = await self.buffer.call("samples", first, self.plan.samples_per_step, what="samples")
            decoded = await call(
                self.scorer.decode.remote(samples),
                timeout_s=60,
                what="samples to be decoded",
                key="logging.samples_per_step",
            )
            self.reporter.samples(first + 1, decoded)
        resumed, self._resume_phase_from = self._resume_phase_from, None
        several = self.plan.phase_steps > 1
        if several and resumed is None:
            self.progress.phase_version = first
        with clocks.measure("begin"):
            await self.learners.begin_phase(list(batches), keep_start=several, resumed=resumed)

    async def _evaluate_if_due(self, last: bool) -> None:
        """Results go into the row being written when they are there; `eval/policy_version` says whose they are."""
        due = self.evaluator.wants(self.progress.step, self.plan.steps)
        self._evals |= await self._evaluated(wait=due or last)
        if due:
            await self._evaluate()
            self._evals |= await self._evaluated(wait=self.plan.synchronous or last)

    async def _evaluate(self) -> None:
        await self.publisher.done()  # the newest weights are what is evaluated
        self.progress.evaluated = self.progress.step
        await self.evaluator.start(self.progress.published)

    async def _evaluated(self, *, wait: bool) -> dict[str, float]:
        """Results of the evaluation under way, if they are there; they also mark the checkpoint of its version."""
        version = self.evaluator.awaited
        results = await self.evaluator.collect(wait=wait)
        if results and version is not None:
            self._saver.scored(version, results, self.progress.scores)
        return results

    async def _checkpoint(self) -> None:
        """Cut a checkpoint between two steps and outside any admission; it is written while the run goes on."""
        await self.publisher.done()
        await self._saver.done()
        async with self.feed.admitting:
            await self._saver.begin(self)

    async def _report(self, metrics: dict[str, float], clocks: Clocks) -> None:
        await self.publisher.poll()
        await self._saver.poll()
        now = time.monotonic()
        step_s, self._row_at = now - self._row_at, now
        self.progress.seconds += step_s
        counts = await self.buffer.call("metrics", what="the buffer's counts")
        arrived = counts["buffer/arrived_tokens"]
        learn_s = clocks.parts.get("learn", 0.0) + clocks.parts.get("begin", 0.0)
        row = {
            "step": self.progress.step,
            "policy_version": self.progress.step,
            **metrics,
            **counts,
            "time/rollout_s": self._busy.take(self.fleet.members),
            "time/publish_s": 0.0,
            **self.publisher.take_seconds(),
            "time/step_s": step_s,
            "time/wait_data_s": clocks.parts.get("wait_data", 0.0),
            "time/learn_s": learn_s,
            "time/total_s": self.progress.seconds,
            "throughput/rollout_tokens_per_s": (arrived - self._arrived_tokens) / step_s,
            "throughput/train_tokens_per_s": metrics.get("train/tokens", 0.0) / max(learn_s, 1e-9),
            "rollout/replacements": self.fleet.replacements,
        }
        self._arrived_tokens = arrived
        self.reporter.row(row)
