"""Runs over several simulated nodes, one of which is lost with the records that it kept."""

import asyncio
from dataclasses import replace

import pytest
from loop_audit import audit_uses

from rlcore.advisor.simulate.loop import Scenario, simulate
from rlcore.loop.specs import CheckpointSpec, ScheduleSpec, SupervisionSpec
from rlcore.references import RecordReference

STEPS = 8
FAST = SupervisionSpec(heartbeat_s=1, hang_timeout_s=20)
SCHEDULES = {
    "asynchronous": {"max_staleness": 2, "on_publish": "in_flight"},
    "synchronous": {"on_publish": "finish"},
    "epochs": {"steps_per_phase": 2, "epochs": 2, "steps_per_publish": 4, "max_staleness": 4},
}


def scenario(name, nodes, every=0):
    schedule = ScheduleSpec(steps=STEPS, groups_per_step=4, **SCHEDULES[name])
    return Scenario(
        schedule,
        supervision=FAST,
        checkpoint=CheckpointSpec(every=every),
        actors=4,
        nodes=nodes,
        request_timeout_s=60.0,
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_run_over_several_nodes_trains_on_what_one_node_does(name, tmp_path):
    one, four = (simulate(scenario(name, n), tmp_path / str(n)) for n in (1, 4))
    audit_uses(four)
    if name == "synchronous":  # elsewhere which group is finished first depends on timing
        assert four.learner.trained == one.learner.trained
    counts = [[len(samples) for samples in r.learner.trained.values()] for r in (one, four)]
    assert counts[0] == counts[1]
    for shard in four.buffer.nodes.shards.values():
        shard.drop(four.buffer.actor.buffer.live.take_released(shard.name))
    assert not any(shard.bytes for shard in four.buffer.nodes.shards.values())


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("after", [0.0, 0.3, 0.8, 1.3])  # seconds since the second row
@pytest.mark.parametrize("every", [0, 1])
def test_a_lost_node_costs_time_alone(name, after, every, tmp_path):
    async def loss(simulation):
        await simulation.until(2)
        await asyncio.sleep(after)
        simulation.buffer.nodes.die(1)
        simulation.actors["bf16-1"].die()

    whole(simulate(scenario(name, 4, every), tmp_path, loss))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("after", [0.0, 0.8])
def test_a_shard_that_dies_alone_costs_time_alone(name, after, tmp_path):
    async def loss(simulation):
        await simulation.until(2)
        await asyncio.sleep(after)
        simulation.buffer.nodes.die(1)
        await asyncio.sleep(1.5)
        simulation.buffer.nodes.revive(1)

    run = simulate(scenario(name, 4), tmp_path, loss)
    whole(run)
    assert run.reporter.rows[-1]["rollout/replacements"] == 0


def whole(run):
    """Nothing is lost or trained on twice, and the loss was noticed."""
    audit_uses(run)
    last = run.reporter.rows[-1]
    assert last["ledger/evicted"] == last["ledger/failed"] == 0
    assert last["ledger/consumed"] == 4 * run.scenario.schedule.phases.batches_before(STEPS)
    groups = {g for samples in run.learner.trained.values() for g, _ in samples}
    assert all(
        {(g, 0), (g, 1)} <= set(samples)
        for samples in run.learner.trained.values()
        for g in groups & {g for g, _ in samples}
    )
    assert any("are sampled again" in note for note in run.reporter.notes)


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_a_resume_reads_records_on_the_nodes_of_now_and_changes_nothing(nodes, tmp_path):
    """In the middle of a phase, whose later batches are in the checkpoint."""
    schedule = ScheduleSpec(
        steps=STEPS, groups_per_step=4, steps_per_phase=4, steps_per_publish=4, max_staleness=0
    )
    spec = replace(scenario("synchronous", 4), schedule=schedule)
    records = []

    async def stop(simulation):
        await simulation.until(2)
        simulation.controller.request_stop()

    async def look(simulation):
        live = simulation.buffer.actor.buffer.live
        records.extend(r for entry in live.entries.values() for r in entry.records())
        assert sum(s.bytes for s in simulation.buffer.nodes.shards.values()) == sum(
            len(r) for r in records if isinstance(r, RecordReference)
        )

    simulate(spec, tmp_path / "parts", stop)
    resumed = simulate(replace(spec, nodes=nodes), tmp_path / "parts", look, resume=True)
    there = sum(isinstance(r, RecordReference) for r in records)
    assert there == (0 if nodes == 1 else len(records) * 3 // 4)  # one node of four is the driver's
    whole = simulate(spec, tmp_path / "whole")
    assert records and resumed.learner.trained == whole.learner.trained
    audit_uses(resumed)


@pytest.mark.parametrize("after", [0.0, 0.3])
def test_a_node_that_is_lost_after_a_resume_costs_nothing_that_the_checkpoint_has(after, tmp_path):
    spec = scenario("asynchronous", 4)

    async def stop(simulation):
        await simulation.until(3)
        simulation.controller.request_stop()

    async def loss(simulation):
        await asyncio.sleep(after)
        simulation.buffer.nodes.die(1)
        simulation.actors["bf16-1"].die()

    simulate(spec, tmp_path, stop)
    resumed = simulate(spec, tmp_path, loss, resume=True)
    audit_uses(resumed)
    if not after:
        assert resumed.reporter.rows[-1]["buffer/resampled"] == 0
