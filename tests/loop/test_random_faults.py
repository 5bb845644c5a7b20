"""Random schedules under random faults: whatever happens to actors and graders, a run ends with
every step taken, every account balanced, and every group trained on once an epoch and never too
late."""

import asyncio
import random

import pytest
from loop_audit import audit_uses

from rlcore.advisor.simulate.actors import Speed
from rlcore.advisor.simulate.loop import Scenario, simulate
from rlcore.loop.specs import CheckpointSpec, EvaluationSpec, ScheduleSpec, SupervisionSpec

STEPS = 24


def scenario(rng):
    eta = rng.choice([0, 0, 1, 2, 4])
    # phases of 1 to 6 steps, which divide the run's, and publishes within or between them
    batches, epochs = rng.choice([(None, 1)] * 3 + [(2, 1), (1, 2), (2, 2), (1, 3), (3, 2), (2, 3)])
    steps = (batches or 1) * epochs
    schedule = ScheduleSpec(
        steps=STEPS,
        groups_per_step=rng.choice([1, 3, 4]),
        steps_per_publish=rng.choice([1, 1, 2, 5] if steps == 1 else [1, steps, 2 * steps]),
        steps_per_phase=batches,
        epochs=epochs,
        max_staleness=eta,
        on_publish=rng.choice(["finish", "abort"] + ["in_flight"] * (eta > 0)),
    )
    lengths = {i: rng.choice([1, 3, 10, 10, 60]) for i in range(50)}
    return Scenario(
        schedule,
        supervision=SupervisionSpec(heartbeat_s=2, hang_timeout_s=40, max_restarts=100),
        checkpoint=CheckpointSpec(every=rng.choice([0, 1, 4])),
        evaluation=EvaluationSpec(every=rng.choice([0, 3]), prompts=4),
        actors=rng.choice([1, 2, 3, 4]),
        speed=Speed(step_s=rng.choice([0.02, 0.1]), load_s=rng.choice([0.1, 2.0])),
        learn_s=rng.choice([0.2, 2.0]),
        request_timeout_s=rng.choice([20.0, 600.0]),
        tokens=lambda request: lengths[request.group_id % 50],
        nodes=rng.choice([1, 2, 4]),
    )


async def faults(simulation, rng):
    while True:
        await asyncio.sleep(rng.expovariate(1 / 8))
        actor = rng.choice(list(simulation.actors.values()))
        match rng.choice(["die", "hang", "wake", "slow", "graders", "scale", "node"]):
            case "die":
                actor.die()
            case "hang":
                actor.hang()
                await asyncio.sleep(rng.uniform(0, 30))
                actor.wake()
            case "wake":
                actor.wake()
            case "slow":
                actor.speed = Speed(step_s=rng.choice([0.02, 0.5]), load_s=rng.choice([0.1, 15.0]))
            case "graders":
                simulation.scorer.restart()
            case "node":
                lose_node(simulation, rng)
            case "scale":
                simulation.wanted = {"bf16": rng.choice([1, 2, 3, 4])}


def lose_node(simulation, rng):
    """A node is cut off, with the records that it kept and its actors. One at most: a shard is not
    started again."""
    nodes = simulation.buffer.nodes
    if nodes.shards:
        node = rng.choice(sorted(nodes.shards))
        nodes.die(node)
        for actor in simulation.actors.values():
            if nodes.of(actor.name) == node:
                actor.die()


def audit(simulation, first_step):
    rows = simulation.reporter.rows
    assert [row["step"] for row in rows] == list(range(first_step, simulation.progress.step + 1))
    audit_uses(simulation)


@pytest.mark.parametrize("seed", range(40))
def test_a_run_under_random_faults(seed, tmp_path):
    rng = random.Random(seed)
    made, stop_at = scenario(rng), rng.randrange(1, STEPS)

    async def until_stopped(simulation):
        happening = asyncio.create_task(faults(simulation, rng))
        await simulation.until(stop_at - 1)
        simulation.controller.request_stop()
        await happening

    first = simulate(made, tmp_path, until_stopped)
    assert stop_at - 1 <= first.progress.step <= STEPS
    audit(first, 1)
    second = simulate(made, tmp_path, lambda simulation: faults(simulation, rng), resume=True)
    assert second.progress.step == STEPS
    audit(second, first.progress.step + 1)
