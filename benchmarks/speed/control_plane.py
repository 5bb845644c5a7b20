"""What the centre of a run costs as its fleet grows: controller, buffer, ledger, graders' queue.

    python -m benchmarks.speed.control_plane [--actors 8,64,512] [--steps 8] [--parts fleet,arrival]
        [--collector]

`fleet` drives the real controller, buffer and ledger with simulated actors of 5,000 tokens a second
each, in simulated time, and prints processor seconds a simulated second by role, the longest stall
of a role's loop, and bytes through each. Every message between roles is pickled at the cost of both
ends. Payloads (records with their log-probs) are simulated short; their real bytes are worked out,
and what a buffer process can move of them is measured beside (`payload`). Eight actors share a
node, whose shard keeps their records and whose graders score them; the buffer keeps those of the
first node.

`arrival` measures one sample that arrives, and the assignment of a whole wave, by what waits.

All seconds are of processor time, so that a busy machine stretches them little. While a fleet runs,
Python's garbage collector is off. With `--collector` it is set as in a run: then a pass is charged
to the role that makes it, although it looks at young objects of all roles, which have processes of
their own in a run (`benchmarks/speed/collector.py` measures the buffer's alone).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import math
import pickle
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import machine, table
from benchmarks.speed.meters import OUTSIDE, Across, Meter, in_role
from rlcore.advisor.planner.actor import RatedActor
from rlcore.advisor.planner.run import PlannedFleet, PlannedRun
from rlcore.advisor.planner.specs import ActorRates, LearnerRates, LengthSpec, Rates
from rlcore.advisor.simulate.clients import SimulatedLearner, SimulatedNodes, SimulatedScorer
from rlcore.advisor.simulate.clock import run_simulated
from rlcore.buffer.admission import ByteLimit
from rlcore.buffer.specs import BatchingSpec, SelectionSpec
from rlcore.buffer.store import ReplayBuffer
from rlcore.cluster.process_tuning import keep_passes_short
from rlcore.loop.specs import ScheduleSpec
from rlcore.serialization import dump_trajectory, record_bytes
from rlcore.testing.records import make_score, make_trajectory

TOKENS_PER_S = 5_000  # of one actor
RUNNING = 32  # requests that an actor decodes together
SAMPLES = 8  # of a prompt
PROMPT, LONGEST = 128, 1024  # tokens
MEDIAN, SPREAD = 512.0, 0.3  # of answers, log-normal
MEAN = int(MEDIAN * math.exp(SPREAD**2 / 2))
TOP_K = 20
STALENESS = 8  # a fleet holds up to (STALENESS + PUBLISH_EVERY) batches of one group an actor
PUBLISH_EVERY = 4
ON_A_NODE = 8  # actors
PAYLOADS = ("add_records", "fetch", "peek")
RANKS = 64  # of the learner, each of which asks the buffer for its share of a batch
SHARD = "a shard"
GRADERS = "a node's graders"
ROLES = ("controller", "buffer", GRADERS, SHARD)


class MeteredActor(RatedActor):
    """Runs in the role "actors", and counts what the controller sends."""

    meter: Meter

    def _task(self, work: Any) -> asyncio.Task[Any]:
        return in_role("actors", super()._task, work)

    async def submit(self, requests: Sequence[Any], begun: Any = None) -> None:
        self.meter.message("actors", "submit", requests, decode=False)
        await super().submit(requests, begun)

    async def abort(self, request_ids: Sequence[str]) -> None:
        self.meter.message("actors", "abort", request_ids, decode=False)
        await super().abort(request_ids)

    async def status(self) -> dict[str, Any]:
        self.meter.message("actors", "status", (), decode=False)
        status = await super().status()
        receiver = self.meter.switch("actors")
        self.meter.message(receiver, "answer to status", status)
        self.meter.switch(receiver)
        return status

    async def update_weights(self, *args: Any) -> dict[str, float]:
        self.meter.message("actors", "update_weights", args, decode=False)
        return await super().update_weights(*args)


class MeteredScorer(SimulatedScorer):
    """Its processes run in the role "graders"."""

    def _start(self, node: int) -> asyncio.Task[None]:
        return in_role(GRADERS, super()._start, node)


class RankedLearner(SimulatedLearner):
    """Its ranks ask for their groups one after another."""

    async def _read(self, step: int, ids: list[int]) -> list[Any]:
        shares = [ids[rank::RANKS] for rank in range(RANKS) if ids[rank::RANKS]]
        return [
            record for own in shares for record in await SimulatedLearner._read(self, step, own)
        ]


class Measured(Exception):
    """The steps to measure are done."""


class MeteredRun(PlannedRun):
    """A planned run whose roles are told apart."""

    def __init__(self, fleet: PlannedFleet, root: Path, meter: Meter) -> None:
        self.meter = meter
        super().__init__(fleet, root)

    def make_buffer(self) -> Any:
        buffer: Any = super().make_buffer()
        buffer.actor = Across(buffer.actor, "buffer", self.meter, PAYLOADS)
        nodes = SimulatedNodes(self.scenario.nodes, buffer.actor)
        buffer.nodes = Across(nodes, SHARD, self.meter, PAYLOADS)
        return buffer

    def make_scorer(self) -> SimulatedScorer:
        return MeteredScorer(self.buffer, reward=self.scenario.reward)

    def make_learner(self) -> Any:
        rates = self.planned.rates.learner
        learner = RankedLearner(self.buffer, step_s=rates.step_s, publish_s=rates.publish_s)
        return Across(learner, "learner", self.meter)

    def make_actor(self, name: str, **arguments: Any) -> RatedActor:
        # no two of the same speed, so that they do not all answer at once
        rates, number = arguments["rates"], int(name.rpartition("-")[2])
        slower = 1 + 0.1 * ((number * 0.618034) % 1)
        arguments["rates"] = rates.model_copy(update={"decode_s": rates.decode_s * slower})

        def make() -> RatedActor:
            MeteredActor.meter = self.meter
            return MeteredActor(name, self.buffer, self.scorer, **arguments)

        return in_role("actors", make)


def planned(actors: int) -> PlannedFleet:
    """So many equal actors, a learner that keeps up, one group an actor and step; endless."""
    rates = Rates(
        learner=LearnerRates(step_s=0.05, token_s=0.0, publish_s=0.05),
        lengths=LengthSpec(prompt=PROMPT, median=MEDIAN, spread=SPREAD),
        grade_s=1e-7,
    )
    actor = ActorRates(
        decode_s=RUNNING / TOKENS_PER_S,
        prefill_tokens_per_s=1e9,
        load_s=0.05,
        start_s=0.0,
        max_running=RUNNING,
    )
    schedule = ScheduleSpec(
        steps=10_000,
        groups_per_step=actors,
        max_staleness=STALENESS,
        steps_per_publish=PUBLISH_EVERY,
        on_publish="in_flight",
        wait_data_timeout_s=1e9,
    )
    nodes = -(-actors // ON_A_NODE)
    own = {"bf16": actor}
    return PlannedFleet(
        {"bf16": actors}, own, rates, schedule, SAMPLES, max_tokens=LONGEST, nodes=nodes
    )


def fleet_row(
    actors: int, warm_up: int, steps: int, payload_mb_s: float, *, collector: bool
) -> list[dict[str, Any]]:
    """One row for each role, over `steps` steps after those that warm up."""
    meter = Meter()
    start: dict[str, float] = {}  # the longest stalls until then

    async def simulated(folder: Path) -> tuple[float, float]:
        run = MeteredRun(planned(actors), folder, meter)
        clock, report = asyncio.get_running_loop().time, run.reporter.row
        marks: list[tuple[float, float]] = []

        def row(values: Any) -> None:
            report(values)
            marks.append((clock(), values["buffer/arrived_tokens"] * run.planned.unit))
            if len(marks) == warm_up:
                start.update(meter.stall_s)
                meter.reset()
            if len(marks) == warm_up + steps:
                raise Measured

        run.reporter.row = row  # type: ignore[method-assign, assignment]
        with contextlib.suppress(Measured):
            await run.run()
        (t0, n0), (t1, n1) = marks[warm_up - 1], marks[-1]
        return t1 - t0, n1 - n0

    with tempfile.TemporaryDirectory() as folder, meter.watching():
        (keep_passes_short if collector else gc.disable)()
        seconds, tokens = run_simulated(simulated(Path(folder)), limit_s=1e9)
    gc.enable()
    return _rows(actors, meter, start, seconds, tokens / seconds, payload_mb_s)


def _rows(
    actors: int,
    meter: Meter,
    start: dict[str, float],
    seconds: float,
    tokens_per_s: float,
    payload_mb_s: float,
) -> list[dict[str, Any]]:
    payload = tokens_per_s / MEAN * record_bytes(PROMPT + MEAN, MEAN, TOP_K) / 1e6
    rows, nodes = [], planned(actors).nodes
    for role in ROLES if nodes > 1 else ROLES[:-1]:
        processes = {SHARD: nodes - 1, GRADERS: nodes}.get(role, 1)
        moved = (meter.sent[role] + meter.received[role]) / 1e6 / seconds / processes
        # in, and out again: of its own node's actors
        through = payload / nodes if role in ("buffer", SHARD) else 0.0
        share = meter.cpu_s[role] / seconds / processes
        calls = sum(n for (sender, _), n in meter.calls.items() if sender == role)
        rows.append(
            {
                "actors": actors,
                "tokens/s": f"{tokens_per_s:.3g}",
                "role": role,
                "CPU s/s": f"{share:.3g}",
                "with payloads": f"{share + through / payload_mb_s:.3g}",
                "longest stall ms": f"{1e3 * meter.stall_s.get(role, 0.0):.3g}",
                "at the start ms": f"{1e3 * start.get(role, 0.0):.3g}",
                "longest piece ms": f"{1e3 * meter.piece_s.get(role, 0.0):.3g}",
                "of": meter.spent_in.get(role, ""),
                "messages MB/s": f"{moved:.3g}",
                "payload MB/s": f"{through:.3g}",
                "calls/s": f"{calls / seconds:.4g}",
            }
        )
    worst = max(rows, key=lambda r: float(r["with payloads"]))
    print(
        f"{actors} actors: {worst['role']} saturates first, at {worst['with payloads']} of a core; "
        f"the simulation itself took {meter.cpu_s[OUTSIDE] + meter.cpu_s['actors']:.1f} s of "
        f"{seconds:.1f} simulated seconds"
    )
    for (sender, what), n in meter.calls.most_common(12):
        print(f"    {sender} -> {what}: {n / seconds:.1f}/s")
    return rows


# ---- single operations ---------------------------------------------------------------------------


def payload_rate(records: int = 64) -> float:
    """MB of records a second of processor time that go into a buffer process and out of it again
    (arrival, and the fetch of a learner rank)."""
    buffer = _buffer(records, PUBLISH_EVERY, waiting=records, samples=1)
    made = [_sample(g, 0, tokens=MEAN, k=TOP_K) for g in range(records)]
    message = pickle.dumps([record for record, _ in made], protocol=5)
    begun = time.thread_time()
    buffer.add_records(pickle.loads(message))
    buffer.add_scores([score for _, score in made])
    ids = [g for g, _ in buffer.take(0).groups]
    pickle.dumps(buffer.stored(0, ids), protocol=5)
    took = time.thread_time() - begun
    return len(message) / 1e6 / took


def _sample(group_id: int, index: int, *, tokens: int = 16, k: int = 2) -> tuple[bytes, Any]:
    drawn = make_trajectory(group_id, index, turns=[([1] * PROMPT, [7] * tokens)], k=k)
    return dump_trajectory(drawn), make_score(drawn, float(index % 2))


def empty_buffer(batching: BatchingSpec, samples: int) -> ReplayBuffer:
    """A buffer of groups of so many samples, without a bound on its bytes."""
    return ReplayBuffer(
        batching,
        SelectionSpec(),
        samples_per_group=samples,
        limit=ByteLimit(1 << 50),
        run_seed=0,
        keep_samples=8,
    )


def _buffer(groups: int, publish_every: int, *, waiting: int, samples: int = 2) -> ReplayBuffer:
    """With `waiting` groups in flight, of `groups` a step."""
    staleness = max(1, -(-waiting // groups))
    batching = BatchingSpec(
        groups_per_step=groups, max_staleness=staleness, steps_per_publish=publish_every
    )
    buffer = empty_buffer(batching, samples)
    ids = buffer.admit([f"digits/train/{i}" for i in range(waiting)])
    assert len(ids) == waiting
    return buffer


def arrival_ms(groups: int, publish_every: int, waiting: int) -> float:
    """Of one sample: record, score, and what the two long polls of the loop then look at. A batch's
    worth of groups is finished before."""
    buffer = _buffer(groups, publish_every, waiting=waiting)

    def finish(group_id: int, *, polls: bool) -> None:
        for index in range(2):
            record, score = _sample(group_id, index)
            buffer.add_records([record])
            if polls:
                _poll(buffer)
            buffer.add_scores([score])
            if polls:
                _poll(buffer)

    for group_id in range(groups - 1):
        finish(group_id, polls=False)
    _poll(buffer)
    rounds = 40
    # from the newest: the batch of step 0 is not complete in order
    return _ms(lambda: [finish(waiting - 1 - i, polls=True) for i in range(rounds)], 2 * rounds)


def _poll(buffer: ReplayBuffer) -> None:
    buffer.room(total=1 << 40)
    buffer.ready(0)


def step_ms(groups: int, publish_every: int, waiting: int) -> float:
    """Of a taken and committed batch and the admission of as many groups, by group."""
    buffer = _buffer(groups, publish_every, waiting=waiting)
    for group_id in range(groups):
        for index in range(2):
            record, score = _sample(group_id, index)
            buffer.add_records([record])
            buffer.add_scores([score])

    _poll(buffer)

    def step() -> None:
        buffer.take(0)
        buffer.commit(0)
        buffer.set_versions(0, 1)
        buffer.admit(["digits/train/1"] * groups)

    return _ms(step, groups)


def assignment_ms(actors: int, groups_each: int) -> tuple[float, float]:
    """(all turns of the loop, the longest) of a whole wave's assignment to an idle fleet."""

    async def main() -> tuple[float, float]:
        with tempfile.TemporaryDirectory() as folder:
            run = PlannedRun(planned(actors), Path(folder))
            run.fleet._roster.published = -1
            maker, prompt = run.parts.requests, "digits/train/7"
            wave = {g: maker.group(g, prompt) for g in range(actors * groups_each)}
            meter = Meter()
            with meter.watching():
                await asyncio.create_task(run.fleet.assignments.assign_in_turns(wave))
                await asyncio.sleep(0)
            took = 1e3 * meter.cpu_s["controller"], 1e3 * meter.stall_s["controller"]
            await run.fleet.supervisor.close()
            for actor in run.engines:
                actor.die()
            return took

    return run_simulated(main())


def _ms(work: Callable[[], Any], count: int) -> float:
    gc.collect()
    begun = time.thread_time()
    work()
    return 1e3 * (time.thread_time() - begun) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--actors", default="8,64,512")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warm-up", type=int, default=6)
    parser.add_argument("--parts", default="fleet,arrival")
    parser.add_argument("--collector", action="store_true")
    args = parser.parse_args()
    print(machine())
    sizes = [int(n) for n in args.actors.split(",")]
    if "arrival" in args.parts:
        print(table([single_row(*of) for of in ((64, 1), (64, 128))]), flush=True)
        wave = []
        for n in sizes:
            whole, longest = assignment_ms(n, 5)
            wave.append({"actors": n, "assignment of a wave ms": whole, "longest turn ms": longest})
        print(table(wave), flush=True)
    if "fleet" in args.parts:
        rate = payload_rate()
        print(f"payload: a buffer process moves {rate:.0f} MB/s of processor time in and out")
        for n in sizes:
            rows = fleet_row(n, args.warm_up, args.steps, rate, collector=args.collector)
            print(table(rows), flush=True)


def single_row(groups: int, publish_every: int) -> dict[str, Any]:
    """Costs of single operations, by the groups that wait."""
    row: dict[str, Any] = {"groups a step": groups, "steps a publish": publish_every}
    for waiting in (100, 20_480):
        row[f"arrival, {waiting} wait, ms"] = arrival_ms(groups, publish_every, waiting)
        row[f"a group's step, {waiting} wait, ms"] = step_ms(groups, publish_every, waiting)
    return row


if __name__ == "__main__":
    main()
