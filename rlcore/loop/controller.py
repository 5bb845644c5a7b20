"""The loop. Holds references, counts and versions; no tensors, no trajectories.

    task       consumes             produces                     waits for, unblocked by
    admit      free buffer places   requests to rollout actors   places: a publish, a taken batch,
                                                                 a dropped group
    train      a ready batch        optimizer steps, publishes   a batch: arrivals from actors and
                                                                 graders; the next one while it
                                                                 trains (eta > 0)
    publish    new weights          proven versions on actors    actors' arrival proofs
    watch      heartbeats           replacements, lost groups    cluster.heartbeat_s

Schedules are settings of this one loop: H = steps_per_publish, eta = max_staleness, on_publish, and
the update phases, M = steps_per_phase and E = epochs. A phase gathers M batches, has p_ref computed
for them and takes M*E steps. A schedule with eta = 0 is synchronous. Prompts are admitted in waves
when nothing is in flight, and a publish is awaited before the next wave. So a run depends on
nothing but its seed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from rlcore.errors import Collapsed, DeadlineExceeded, NoSpace, OwnershipLost, RoleLost
from rlcore.interfaces import Reporter
from rlcore.loop.batch_queue import Batches, BatchQueue
from rlcore.loop.collapse import HELD, Collapse
from rlcore.loop.dispatcher import Dispatcher, LoopParts
from rlcore.loop.fleet import Fleet
from rlcore.loop.publisher import Colocation, Publisher
from rlcore.loop.role_protocols import BufferClient, Clients
from rlcore.loop.run_plan import Plan, Progress
from rlcore.loop.saver import CheckpointPace, CheckpointRequest
from rlcore.loop.shares import worth
from rlcore.loop.targets import Ranges, SetPoints
from rlcore.loop.timing import Clocks, Timeline, now

SPACE_POLL_S = 2.0  # between two checks whether a full disk has space again


class RowWriter:
    """Writes one row a step. Counts of a resumed run continue from its checkpoint."""

    def __init__(
        self,
        buffer: BufferClient,
        fleet: Fleet,
        progress: Progress,
        reporter: Reporter,
        timeline: Timeline,
        *,
        space_timeout_s: float,
        stopping: Callable[[], bool],
        prices: Mapping[str, float],
    ) -> None:
        """`space_timeout_s`: how long a full disk is waited for, unless the run is `stopping`.
        `prices`: of an engine an hour, by label."""
        self._prices = prices
        self._buffer = buffer
        self._fleet = fleet
        self._progress = progress
        self._reporter = reporter
        self._timeline = timeline
        self._space_timeout_s = space_timeout_s
        self._stopping = stopping
        self._arrived_tokens = 0.0
        self._row_at = 0.0  # when the last row was written, or the time of the first one began

    async def begin(self) -> None:
        """The time of the first row begins."""
        counts = await self._buffer.metrics()
        self._arrived_tokens = counts["buffer/arrived_tokens"]
        self._fleet.take_busy_s()
        self._row_at = now()
        self._timeline.begin(self._progress.seconds)

    async def write(
        self, metrics: Mapping[str, float], clocks: Clocks, others: Mapping[str, float]
    ) -> frozenset[str]:
        """Report the step just taken; returns the warnings that hold. `metrics`: the learner's, the
        batch's and an evaluation's. `others`: metrics of publications that ended and of
        dispatch."""
        progress, at = self._progress, now()
        step_s, self._row_at = at - self._row_at, at
        progress.seconds += step_s
        counts = await self._buffer.metrics()
        arrived = counts["buffer/arrived_tokens"]
        learn_s = clocks.parts.get("learn", 0.0) + clocks.parts.get("begin", 0.0)
        row = {
            "step": progress.step,
            "policy_version": progress.step,
            **metrics,
            **counts,
            "time/rollout_s": self._fleet.take_busy_s(),
            "time/publish_s": 0.0,
            **self._fleet.step_costs(),
            **self._fleet.accepted(),
            **self._fleet.environment_figures(),
            **others,
            "time/step_s": step_s,
            "time/wait_data_s": clocks.parts.get("wait_data", 0.0),
            "time/learn_s": learn_s,
            "time/total_s": progress.seconds,
            "throughput/rollout_tokens_per_s": (arrived - self._arrived_tokens) / step_s,
            "throughput/train_tokens_per_s": metrics.get("train/tokens", 0.0) / max(learn_s, 1e-9),
            "rollout/replacements": self._fleet.supervisor.replacements,
            "rollout/in_rotation": len(self._fleet.rotation()),
        }
        self._arrived_tokens = arrived
        engines = self._fleet.training_sizes()
        cost = {n: engines[n] * price * step_s / 3600 for n, price in self._prices.items()}
        row |= worth(metrics, self._fleet.busy_s, cost)
        speaking = await self._write(row)
        self._fleet.draw(self._timeline)
        self._reporter.timeline(progress.step, self._timeline.take())
        return speaking

    async def _write(self, row: Mapping[str, float | int | None]) -> frozenset[str]:
        """Report a row; training waits while the disk has no space for it. Raises NoSpace."""
        until = now() + self._space_timeout_s
        waiting = False
        while True:
            try:
                speaking = self._reporter.row(row)
            except NoSpace as e:
                if now() >= until or self._stopping():
                    raise
                if not waiting:
                    self._reporter.note(
                        f"{e}: training waits for space until "
                        f"schedule.wait_space_timeout_s={self._space_timeout_s:g} s have passed"
                    )
                waiting = True
                await asyncio.sleep(SPACE_POLL_S)
                continue
            if waiting:
                self._reporter.note("there is space again: training continues")
            return speaking


VALUES_KEPT = 4096  # tokens of a sample whose ratios are written


class ShownSamples:
    """Samples of at most `count` groups of each update phase."""

    def __init__(self, clients: Clients, reporter: Reporter, count: int) -> None:
        self._scorer = clients.scorer
        self._learner = clients.learner
        self._reporter = reporter
        self._count = count
        self._samples: list[dict[str, Any]] = []
        self._step = 0

    async def fetch(self, first: int) -> None:
        """Show samples of the batch of step `first`, before its step."""
        if not self._count:
            return
        self._step = first
        try:
            self._samples = await self._scorer.samples(first, self._count)
        except DeadlineExceeded as e:  # they are for readers: the step does not need them
            self._samples = []
            self._reporter.note(f"no samples of step {first + 1} are shown: {e}")
            return
        for sample in self._samples:
            sample["learner_version"] = first
        # also now: if the step fails, its samples help to find out why
        self._reporter.samples(first + 1, self._samples)

    async def complete(self) -> None:
        """After the first step on that batch: show them again, with ratios and advantages."""
        samples, self._samples = self._samples, []
        if not samples:
            return
        keys = [(s["group_id"], s["sample"]) for s in samples]
        found = await self._learner.sample_details(keys)
        if not found:
            return
        for key, sample in zip(keys, samples):
            if key in found:
                sample.update(found[key], log_ratio=found[key]["log_ratio"][:VALUES_KEPT])
        self._reporter.samples(self._step + 1, samples)


ANSWER_S = 10.0  # for learner and buffer to answer after a failure
BETWEEN = "between steps"
# The timeline's names of the learner's activities.
ACTIVITIES = {
    "start": BETWEEN,
    "rollout": "waiting for a batch",
    "publication": "waiting for actors to load",
    "evaluation": "waiting for an evaluation",
    "checkpoint": "checkpoint",
}


class Controller:
    """Runs its tasks until the plan's steps are done, a stop is asked for, or one of them fails."""

    def __init__(
        self,
        plan: Plan,
        clients: Clients,
        parts: LoopParts,
        *,
        progress: Progress | None = None,
        resumed_from: str | None = None,
    ) -> None:
        """`resumed_from`: the learner's folder in the checkpoint of `progress`.

        Raises UserError if the plan cannot go on from it.
        """
        self.progress = progress or Progress()
        self.stop_requested = False
        self._plan = plan
        self._clients = clients
        self._parts = parts
        self._timeline = Timeline()
        self._colocation = Colocation(clients.learner, parts.fleet, on=plan.schedule.colocated)
        self._publisher = Publisher(
            plan, clients, parts.fleet, self.progress, self._timeline, self._colocation
        )
        self._dispatcher = Dispatcher(plan, clients.buffer, parts, self.progress)
        self._targets = SetPoints(
            plan.targets,
            Ranges(plan.schedule.max_staleness, plan.own_age, plan.pages, plan.layers),
            several=len(parts.fleet.training_sizes()) > 1,
            state=self.progress.targets,
        )
        self._batches = BatchQueue(plan, clients, lambda: self.stop_requested)
        self._shown = ShownSamples(clients, parts.reporter, plan.samples_per_step)
        self._rows = RowWriter(
            clients.buffer,
            parts.fleet,
            self.progress,
            parts.reporter,
            self._timeline,
            space_timeout_s=plan.schedule.wait_space_timeout_s,
            stopping=lambda: self.stop_requested,
            prices=plan.prices,
        )
        self._pace = CheckpointPace(plan.checkpoint, parts.reporter.note)
        plan.check_resume(self.progress)
        # set while resuming a phase that was interrupted in the middle
        self._resume_phase_from = resumed_from if plan.within_phase(self.progress) else None
        self.progress.phase_batches = plan.phases.batches
        self.progress.phase_epochs = plan.phases.epochs
        self.progress.max_staleness = plan.schedule.max_staleness
        self._collapse = Collapse(plan, self.progress, parts.reporter.note)
        self._evaluated: dict[str, float] = {}  # results for the next row
        self._between_steps = True  # learner and ledger are as after progress.step

    def request_stop(self) -> None:
        """End after the current step, with a checkpoint."""
        self.stop_requested = True

    # ---- the tasks -------------------------------------------------------------------------------

    async def run(self) -> None:
        """Train to the end of the plan. Any task's failure ends all of them and is raised, after a
        last checkpoint where one can be taken."""
        dispatcher, watch = self._dispatcher, self._clients.watch
        background = [
            asyncio.create_task(task)
            for task in (
                dispatcher.admit(),
                dispatcher.watch_fleet(),
                watch.run(dispatcher.groups.reissue_unscored, dispatcher.groups.reissue_stored),
            )
        ]
        train = asyncio.create_task(self._train())
        try:
            done, _ = await asyncio.wait([train, *background], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            await train
        except Exception as e:  # any error; a second signal, which cancels, saves nothing
            await self._save_after(e, train, background)
            raise
        finally:
            for task in (train, *background):
                task.cancel()
            await asyncio.gather(train, *background, return_exceptions=True)
            await self._publisher.cancel()
            self._parts.saver.cancel()
            await self._parts.fleet.supervisor.close()

    async def _save_after(
        self, error: Exception, train: asyncio.Task[None], background: list[asyncio.Task[None]]
    ) -> None:
        """Try to take a last checkpoint after a failure, so that no step is lost that learner and
        buffer still hold. A checkpoint that cannot be saved is noted; raises nothing."""
        if isinstance(error, OwnershipLost | Collapsed):
            return
        if not isinstance(error, RoleLost):  # then no step would come to its end
            self.request_stop()  # the present step, and a checkpoint, as on a signal
            await asyncio.wait([train], timeout=self._plan.schedule.step_timeout_s)
        saver, note = self._parts.saver, self._parts.reporter.note
        unsaved = self.progress.step > saver.newest_step
        if not unsaved or not self._between_steps or self._resume_phase_from is not None:
            return
        if self._plan.schedule.lag is not None and self.progress.published < self.progress.step:
            return  # groups in flight would be sampled by a newer version than their own
        try:
            async with asyncio.timeout(ANSWER_S):  # an admission is whole, and the last one
                await self._dispatcher.admitting.acquire()
            for task in (train, *background):
                task.cancel()
            await asyncio.gather(train, *background, return_exceptions=True)
            await self._publisher.cancel()  # a resumed run publishes anew
            async with asyncio.timeout(ANSWER_S):
                await self._clients.buffer.metrics()
                await self._clients.learner.sample_details([])
            await saver.done()
            await saver.begin(self._clients, self._cut(), last=True)
            await saver.done(last=True)
        except Exception as e:  # any error: the one that ended the run is what is raised
            why = " ".join(str(e).split()) or type(e).__name__
            note(f"no last checkpoint of step {self.progress.step}: {why}")
        else:
            note(f"a last checkpoint was taken of step {self.progress.step}")

    async def _train(self) -> None:
        plan, progress = self._plan, self.progress
        await self._start()
        try:
            while progress.step < plan.steps and not self.stop_requested:
                phase = list(range(progress.step, plan.phase_end(progress.step)))
                clocks = Clocks()
                self._now("rollout", "a training batch")
                with clocks.measure("wait_data"):
                    batches = await self._batches.get(phase)
                if batches is None:
                    break
                await self._begin_phase(batches, clocks)
                if not plan.synchronous and phase[-1] + 1 < plan.steps:
                    self._batches.prepare(range(phase[-1] + 1, plan.phase_end(phase[-1] + 1)))
                for step, batch in batches.items():
                    await self._one_step(step, batch.metrics, clocks)
                    clocks = Clocks()
                    if self.stop_requested:
                        break
        finally:
            await self._batches.cancel()
        # Until a resumed phase has restarted, the learner holds the weights of its beginning, so
        # the checkpoint we resumed from stays the newest.
        wanted = self.stop_requested or self._plan.checkpoint.at_end
        if wanted and self._resume_phase_from is None:
            await self._checkpoint(last=True)
            self._now("checkpoint", "the last checkpoint to be written")
            await self._parts.saver.done(last=True)

    def _now(self, activity: str, waits_for: str) -> None:
        self._timeline.turn(waits_for if activity == "training" else ACTIVITIES[activity])
        self._parts.reporter.activity(activity, waits_for, self.progress.step)

    async def _start(self) -> None:
        """Publish the learner's weights with a full arrival check, and assign the groups that were
        in flight at a resume.

        A synchronous resume in the middle of a phase publishes the weights that the phase began
        with. Evaluations and repeated samples must come from the version that sampled the rest of
        the phase (where several phases share a publish, from a later one). Otherwise newer versions
        may have been published meanwhile, which groups in flight were admitted at, and the
        learner's own weights are published.
        """
        progress = self.progress
        resumed = self._resume_phase_from if self._plan.synchronous else None
        version = progress.step if resumed is None else progress.phase_version
        self._now("start", f"the actors to prove version {version}")
        self._parts.fleet.keep_precise(self._targets.precise_layers)
        await self._publisher.begin(version, full=True, resumed=resumed)
        await self._publisher.done()
        await self._follow_targets()
        await self._dispatcher.groups.resume()
        due = self._parts.evaluator.wants(progress.step, self._plan.steps)
        if due and progress.evaluated < progress.step:
            await self._evaluate()
            if self._plan.synchronous:
                self._evaluated = await self._collect(wait=True)
        # discard the seconds of this publication, which precedes the first row
        self._publisher.take_costs()
        await self._rows.begin()
        self._pace.begin()
        self._dispatcher.gate.set()

    # ---- parts of a step -------------------------------------------------------------------------

    async def _begin_phase(self, batches: Batches, clocks: Clocks) -> None:
        """Show a few samples, and have the learner compute p_ref."""
        plan, clients, first = self._plan, self._clients, min(batches)
        await self._shown.fetch(first)
        await self._colocation.to_learner()
        resumed, self._resume_phase_from = self._resume_phase_from, None
        several = plan.phases.steps > 1
        if several and resumed is None:
            self.progress.phase_version = first
        self._now("training", "p_ref of the batch")
        self._between_steps = False
        with clocks.measure("begin"):
            await clients.learner.begin_phase(
                list(batches),
                batches=min(plan.phases.batches, len(batches)),
                keep_start=several,
                resumed=resumed,
            )

    async def _one_step(self, step: int, batch_metrics: dict[str, float], clocks: Clocks) -> None:
        plan, progress, clients = self._plan, self.progress, self._clients
        if plan.synchronous and step + 1 == plan.phase_end(step):
            self._dispatcher.gate.clear()
        self._now("training", f"optimizer step {step + 1}")
        self._between_steps = False
        with clocks.measure("learn"):
            metrics = await clients.learner.train_step(step)
        await self._follow_targets(metrics)
        await clients.buffer.commit(step)
        progress.step = step + 1
        progress.in_phase = progress.step != plan.phases.end(step)
        await clients.buffer.set_versions(progress.published, progress.step)
        self._between_steps = True
        await self._shown.complete()
        last = progress.step == plan.steps
        # no publish after a stop: the checkpoint does not need it
        if plan.publishes_after(progress.step):
            self._timeline.turn("gathering weights")
            await self._publisher.begin(progress.step, full=False)
            if plan.synchronous or last:
                self._now("publication", f"the actors to prove version {progress.step}")
                await self._publisher.done()
        self._timeline.turn(BETWEEN)
        await self._evaluate_if_due(last)
        await self._report(metrics | batch_metrics | self._evaluated, clocks)
        self._evaluated = {}
        if self._collapse.take_hold() and not last:
            await self._hold()
        if not last:  # the final checkpoint is written separately
            await self._checkpoint_if_due()
        self._dispatcher.gate.set()

    async def _follow_targets(self, metrics: Mapping[str, float] = MappingProxyType({})) -> None:
        """Have admission and requests follow the set-points, updated by the metrics of a step if
        given."""
        self._targets.observe(metrics)
        self._parts.fleet.assignments.page_rules = self._targets.page_rules
        self._parts.fleet.keep_precise(self._targets.precise_layers)
        self._dispatcher.groups.kinds.limit(self._targets.shares)
        if self._targets.bound is not None:
            await self._clients.buffer.limit_staleness(self._targets.bound)

    async def _evaluate_if_due(self, last: bool) -> None:
        """Results go into the current row as soon as they exist; `eval/policy_version` says
        which version they are of."""
        due = self._evaluation_due()
        self._evaluated |= await self._collect(wait=due or last)
        if due:
            await self._evaluate()
            self._evaluated |= await self._collect(wait=self._plan.synchronous or last)

    def _evaluation_due(self) -> bool:
        """Colocated engines sleep within a phase: an evaluation that was due there waits for its
        end."""
        step, wants = self.progress.step, self._parts.evaluator.wants
        if not self._colocation.on:
            return wants(step, self._plan.steps)
        earlier = range(self.progress.evaluated + 1, step + 1)
        awake = self.progress.published == step
        return awake and any(wants(s, self._plan.steps) for s in earlier)

    async def _evaluate(self) -> None:
        await self._publisher.done()  # an evaluation uses the newest weights
        self.progress.evaluated = self.progress.step
        self._parts.evaluator.start(self.progress.published)

    async def _collect(self, *, wait: bool) -> dict[str, float]:
        """Collect results of the evaluation under way, if complete; they also score the checkpoint
        of its version."""
        version = self._parts.evaluator.awaited
        if wait and version is not None:
            self._now("evaluation", f"verdicts on version {version}")
        results = await self._parts.evaluator.collect(wait=wait)
        if results and version is not None:
            self._parts.saver.scored(version, results, self.progress.scores)
        return results

    async def _report(self, metrics: dict[str, float], clocks: Clocks) -> None:
        await self._publisher.poll()
        await self._parts.saver.poll()
        others = self._publisher.take_costs()
        others["rollout/migrated_requests"] = float(self._dispatcher.groups.cut_requests)
        others["time/checkpoint_s"] = self._pace.take_standstill_s()
        others["checkpoint/interval_s"] = self._pace.interval_s
        others |= self._colocation.take_costs() | self._dispatcher.groups.kinds.metrics()
        others |= self._targets.metrics()
        others |= self._parts.saver.metrics() | self._parts.requests.prompts.metrics()
        self._collapse.judge(await self._rows.write(metrics, clocks, others))

    async def _hold(self) -> None:
        """Give up all that was sampled and not trained on: admission pauses, running requests are
        withdrawn, the ledger counts them, and fresh samples come from the newest version."""
        async with self._dispatcher.admitting:
            await self._batches.settle()
            await self._publisher.done()
            count = await self._clients.buffer.give_up(HELD)
            await self._dispatcher.groups.look()
        self._parts.reporter.note(
            f"step {self.progress.step}: the policy has fallen, with samples far from it: {count} "
            "groups are given up and fresh ones sampled (schedule.on_collapse=hold)"
        )

    async def _checkpoint_if_due(self) -> None:
        """Training does not wait for a slow disk. A checkpoint that is due by time is taken when
        the one before is written; one that is due by steps is left out."""
        pace, step, saver = self._pace, self.progress.step, self._parts.saver
        by_steps = pace.due_by_steps(step)
        if not by_steps and not pace.due_by_time():
            return
        if not saver.busy:
            # not counted: the next publication would have to wait for this one as well
            await self._publisher.done()
            with pace.taking():
                await self._checkpoint()
        elif by_steps:
            saver.skipped(step)

    async def _checkpoint(self, *, last: bool = False) -> None:
        """Take a checkpoint between two steps and outside any admission; it is written in the
        background."""
        self._now("checkpoint", "the checkpoint to be cut")
        await self._publisher.done()
        await self._parts.saver.done()
        async with self._dispatcher.admitting:
            await self._parts.saver.begin(self._clients, self._cut(), last=last)

    def _cut(self) -> CheckpointRequest:
        return CheckpointRequest(
            replace(
                self.progress,
                kinds=self._dispatcher.groups.kinds.state(),
                targets=self._targets.state(),
            ),
            self._parts.requests.prompts.state(),
            self._plan.within_phase(self.progress),
            self._parts.evaluator.awaited,
        )
