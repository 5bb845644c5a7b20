"""Engines and learner in turn (schedule.colocated). The fakes assert that no engine is awake while
the learner trains, and that it trains and sends only with its memory in the right state."""

import asyncio
import random

import pytest
from loop_audit import audit_uses

from rlcore.advisor.simulate.actors import Speed
from rlcore.advisor.simulate.loop import Scenario, simulate
from rlcore.errors import RoleLost, UserError
from rlcore.loop.specs import CheckpointSpec, EvaluationSpec, ScheduleSpec, SupervisionSpec

STEPS = 12


def scenario(joined=False, every=3, **changes):
    given = {"steps": STEPS, "groups_per_step": 2, "colocated": True, **changes}
    return Scenario(
        ScheduleSpec(**given),
        joined=joined,
        checkpoint=CheckpointSpec(every=2),
        evaluation=EvaluationSpec(every=every, prompts=4),
    )


def evaluated(simulation):
    rows = simulation.reporter.rows
    return {row["step"]: row["eval/policy_version"] for row in rows if "eval/policy_version" in row}


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(
    "phase",
    [{}, {"steps_per_publish": 4}, {"steps_per_phase": 2, "epochs": 2}, {"on_publish": "abort"}],
)
def test_they_take_turns_and_no_step_is_lost(joined, phase, tmp_path):
    simulation = simulate(scenario(joined, **phase), tmp_path)
    audit_uses(simulation)
    rows = simulation.reporter.rows
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    period = simulation.scenario.schedule.publish_period
    turns = [row["step"] for row in rows if row.get("time/asleep_s", 0) > 0]
    assert turns == list(range(period, STEPS + 1, period))
    assert sum(r.get("time/asleep_s", 0) for r in rows) > sum(r["time/learn_s"] for r in rows)
    assert {r["colocated/engine_freed_gib"] for r in rows if "colocated/engine_freed_gib" in r}


def test_it_trains_on_what_a_run_with_gpus_of_its_own_trains_on(tmp_path):
    apart = simulate(scenario(colocated=False, steps_per_publish=4), tmp_path / "apart")
    colocated = simulate(scenario(steps_per_publish=4), tmp_path / "colocated")
    assert colocated.learner.trained == apart.learner.trained
    assert colocated.learner.phases == apart.learner.phases


def test_an_evaluation_that_is_due_within_a_phase_waits_for_its_end(tmp_path):
    simulation = simulate(scenario(every=3, steps_per_publish=4), tmp_path)
    # of 0, 3, 6, 9 and 12; that of 0 is in the first row
    assert evaluated(simulation) == {1: 0, 4: 4, 8: 8, 12: 12}


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("step", [3, 4, 6])
def test_a_stopped_run_goes_on_in_the_middle_of_a_phase(joined, step, tmp_path):
    whole = simulate(scenario(joined, steps_per_publish=4), tmp_path / "whole")

    async def stop(simulation):
        await simulation.until(step - 1)
        simulation.controller.request_stop()

    simulate(scenario(joined, steps_per_publish=4), tmp_path / "parts", stop)
    rest = simulate(scenario(joined, steps_per_publish=4), tmp_path / "parts", resume=True)
    assert rest.learner.trained == whole.learner.trained


@pytest.mark.parametrize("asleep", [True, False])
def test_a_lost_engine_ends_the_attempt(asleep, tmp_path):
    async def lose(simulation):
        await simulation.until(4)
        actor = simulation.actors["bf16-1"]
        while actor.asleep is not asleep:
            await asyncio.sleep(0.01)
        actor.die()

    with pytest.raises(RoleLost, match="bf16-1 is lost, and its GPU is the learner's too"):
        simulate(scenario(steps_per_publish=4), tmp_path, lose)
    simulation = simulate(scenario(steps_per_publish=4), tmp_path, resume=True)
    assert sorted(simulation.learner.trained) == list(range(STEPS))


def test_an_engine_that_does_not_fall_asleep_keeps_the_learner_from_training(tmp_path):
    async def hang(simulation):
        await simulation.until(4)
        simulation.actors["bf16-0"].hang()

    limits = SupervisionSpec(hang_timeout_s=60, heartbeat_s=5)
    spec = scenario(publish_timeout_s=20, wait_data_timeout_s=400)
    with pytest.raises(RoleLost, match="bf16-0 is lost"):
        simulate(Scenario(spec.schedule, supervision=limits), tmp_path, hang)


def test_the_number_of_engines_is_fixed(tmp_path):
    async def scale(simulation):
        await simulation.until(2)
        simulation.wanted = {"bf16": 3}

    simulation = simulate(scenario(), tmp_path, scale)
    assert any("ties every rollout actor" in note for note in simulation.reporter.notes)
    assert len(simulation.fleet.members) == 2


@pytest.mark.parametrize("seed", range(25))
def test_random_phases_and_losses(seed, tmp_path):
    """Whatever is lost, the attempts together take every step."""
    rng = random.Random(seed)
    batches, epochs = rng.choice([(None, 1), (2, 1), (1, 2), (3, 2)])
    schedule = ScheduleSpec(
        steps=STEPS,
        groups_per_step=rng.choice([1, 3]),
        steps_per_publish=rng.choice([1, 2, 4]) if batches is None and epochs == 1 else 1,
        steps_per_phase=batches,
        epochs=epochs,
        on_publish=rng.choice(["finish", "abort"]),
        colocated=True,
    )
    lengths = [rng.choice([1, 3, 10, 60]) for _ in range(50)]
    spec = Scenario(
        schedule,
        supervision=SupervisionSpec(heartbeat_s=2, hang_timeout_s=40),
        checkpoint=CheckpointSpec(every=rng.choice([1, 3])),
        evaluation=EvaluationSpec(every=rng.choice([0, 3]), prompts=4),
        actors=rng.choice([1, 2, 4]),
        joined=rng.random() < 0.5,
        speed=Speed(step_s=rng.choice([0.02, 0.1]), load_s=rng.choice([0.1, 2.0])),
        request_timeout_s=rng.choice([20.0, 600.0]),
        tokens=lambda request: lengths[request.group_id % 50],
    )

    async def lose(simulation):
        while True:
            await asyncio.sleep(rng.expovariate(1 / 20))
            actor = rng.choice(list(simulation.actors.values()))
            match rng.choice(["die", "hang", "graders"]):
                case "die":
                    actor.die()
                case "hang":
                    actor.hang()
                    await asyncio.sleep(rng.uniform(0, 60))
                    actor.wake()
                case _:
                    simulation.scorer.restart()

    for _ in range(40):
        try:
            simulation = simulate(spec, tmp_path, lose, resume=True)
        except RoleLost:
            continue
        break
    assert sorted(simulation.learner.trained) == list(range(STEPS))
    audit_uses(simulation)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"max_staleness": 1}, "max_staleness=1 has them work at the same time"),
        ({"steps_per_publish": 4, "steps_per_phase": 2}, "spans several phases of 2 steps"),
    ],
)
def test_schedules_that_do_not_take_turns_are_refused(changes, says):
    with pytest.raises(UserError, match=says):
        ScheduleSpec(colocated=True, **changes).check("schedule")
