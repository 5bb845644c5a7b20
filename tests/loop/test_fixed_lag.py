"""A fixed lag (schedule.lag): every batch is exactly so many steps old, whatever the speeds."""

import asyncio
import random

import pytest
from loop_audit import audit_uses

from rlcore.advisor.simulate.actors import Speed
from rlcore.advisor.simulate.loop import Scenario, simulate
from rlcore.buffer.specs import SelectionSpec
from rlcore.errors import DeadlineExceeded, StageError, UserError
from rlcore.loop.specs import CheckpointSpec, EvaluationSpec, ScheduleSpec, SupervisionSpec
from rlcore.serialization import record_bytes

STEPS = 24


def scenario(lag, **changes):
    schedule = ScheduleSpec(steps=STEPS, groups_per_step=3, lag=lag)
    return Scenario(schedule, **{"actors": 3, **changes})


def lengths(request):
    return random.Random(request.group_id).choice([1, 3, 10, 60])


def ages(simulation):
    """By step, the ages of the oldest and of the newest tokens of every sample."""
    return {
        step: {step - version for versions in samples.values() for version in versions}
        for step, samples in simulation.learner.trained.items()
    }


def due(lag, steps=STEPS):
    return {step: {min(step, lag)} for step in range(steps)}


@pytest.mark.parametrize("lag", [1, 2, 8])
@pytest.mark.parametrize("learn_s", [0.05, 1.0, 20.0])
@pytest.mark.parametrize("joined", [False, True], ids=["own", "joined"])
def test_every_batch_is_exactly_so_old(lag, learn_s, joined, tmp_path):
    simulation = simulate(scenario(lag, learn_s=learn_s, joined=joined, tokens=lengths), tmp_path)
    audit_uses(simulation)
    assert ages(simulation) == due(lag)
    rows = simulation.reporter.rows
    assert [row["staleness/max"] for row in rows] == [min(s, lag) for s in range(STEPS)]
    assert simulation.learner.published == list(range(STEPS + 1))


def test_an_asynchronous_schedule_of_this_bound_is_fresher(tmp_path):
    """So that the test above would notice a lag that nothing holds."""
    schedule = ScheduleSpec(steps=STEPS, groups_per_step=3, max_staleness=8, on_publish="in_flight")
    found = ages(simulate(Scenario(schedule, learn_s=0.05, tokens=lengths), tmp_path))
    assert found != due(8)


def test_groups_that_are_filtered_are_replaced_by_ones_of_their_version(tmp_path):
    def reward(answer):
        equal = answer.group_id % 3 == 0
        return 1.0 if equal else float(answer.sample_index % 2)

    selection = SelectionSpec(dynamic_sampling=True)
    simulation = simulate(scenario(4, reward=reward, selection=selection), tmp_path)
    assert simulation.reporter.rows[-1]["ledger/evicted"] > 0
    assert ages(simulation) == due(4)


def test_the_order_of_training_does_not_depend_on_timing(tmp_path):
    trained = [
        simulate(
            scenario(4, tokens=lengths, learn_s=learn_s, actors=actors), tmp_path / str(learn_s)
        ).learner.trained
        for learn_s, actors in ((0.05, 1), (5.0, 4))
    ]
    assert trained[0] == trained[1]


async def faults(simulation, rng):
    while True:
        await asyncio.sleep(rng.expovariate(1 / 8))
        actor = rng.choice(list(simulation.actors.values()))
        match rng.choice(["die", "hang", "slow", "graders", "scale"]):
            case "die":
                actor.die()
            case "hang":
                actor.hang()
                await asyncio.sleep(rng.uniform(0, 30))
                actor.wake()
            case "slow":
                actor.speed = Speed(step_s=rng.choice([0.02, 0.5]), load_s=rng.choice([0.1, 15.0]))
            case "graders":
                simulation.scorer.restart()
            case "scale":
                simulation.wanted = {"bf16": rng.choice([1, 2, 3, 4])}


@pytest.mark.parametrize("seed", range(12))
def test_faults_of_actors_and_graders_change_no_age(seed, tmp_path):
    rng = random.Random(seed)
    lag = rng.choice([1, 3, 8])
    simulation = simulate(
        scenario(
            lag,
            tokens=lengths,
            learn_s=rng.choice([0.2, 4.0]),
            supervision=SupervisionSpec(heartbeat_s=2, hang_timeout_s=40, max_restarts=100),
            evaluation=EvaluationSpec(every=3, prompts=4),
            request_timeout_s=rng.choice([20.0, 600.0]),
        ),
        tmp_path,
        lambda simulation: faults(simulation, rng),
    )
    audit_uses(simulation)
    assert ages(simulation) == due(lag)


@pytest.mark.parametrize("at", [1, 4, 5, 17])
def test_a_run_that_is_stopped_and_resumed_keeps_it(at, tmp_path):
    async def stop(simulation):
        await simulation.until(at - 1)
        simulation.controller.request_stop()

    simulate(scenario(4, tokens=lengths), tmp_path / "run", stop)
    second = simulate(scenario(4, tokens=lengths), tmp_path / "run", resume=True)
    audit_uses(second)
    assert ages(second) == due(4)
    whole = simulate(scenario(4, tokens=lengths), tmp_path / "whole")
    assert second.learner.trained == whole.learner.trained


def test_a_failure_while_weights_wait_resumes_at_a_step_that_keeps_it(tmp_path):
    """The last checkpoint would have groups in flight of a version that is gone."""

    async def lose_the_actors(simulation):
        await simulation.until(9)
        for actor in simulation.actors.values():
            actor.hang()

    plain = scenario(
        4,
        tokens=lengths,
        checkpoint=CheckpointSpec(every=4),
        supervision=SupervisionSpec(heartbeat_s=2, hang_timeout_s=40, max_restarts=0),
    )
    with pytest.raises(StageError, match="max_restarts"):
        simulate(plain, tmp_path, lose_the_actors)
    second = simulate(plain, tmp_path, resume=True)
    assert ages(second) == due(4)


def test_samples_that_never_come_end_the_run_in_a_sentence(tmp_path):
    async def hang(simulation):
        await simulation.until(3)
        for actor in simulation.actors.values():
            actor.speed = Speed(step_s=1e6)

    late = ScheduleSpec(steps=STEPS, groups_per_step=3, lag=8, wait_data_timeout_s=50)
    with pytest.raises(DeadlineExceeded, match="wait_data_timeout_s"):
        simulate(Scenario(late, request_timeout_s=1e7), tmp_path, hang)


def test_a_buffer_too_small_for_the_batches_between_is_refused():
    from rlcore.buffer.admission import check_capacity

    limits = dict(samples_per_group=4, longest=record_bytes(512, 256, 20))
    plain, fixed = ScheduleSpec(), ScheduleSpec(lag=8)
    for mib in range(1, 4096):
        try:
            check_capacity(mib << 20, plain, **limits)
        except UserError:
            continue
        break
    with pytest.raises(UserError, match="9 batches"):
        check_capacity(8 * mib << 20, fixed, **limits)
    check_capacity(9 * mib << 20, fixed, **limits)
