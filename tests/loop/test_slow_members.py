"""A silent or slow actor costs its own work only: the learner goes on."""

import asyncio

import pytest

from rlcore.advisor.simulate.actors import Speed
from rlcore.advisor.simulate.loop import Scenario, simulate
from rlcore.loop.specs import ScheduleSpec, SupervisionSpec

ASYNC = ScheduleSpec(steps=120, groups_per_step=4, max_staleness=1, on_publish="in_flight")
SUPERVISION = SupervisionSpec(heartbeat_s=5, hang_timeout_s=120)


def scenario(**changes):
    made = {"schedule": ASYNC, "supervision": SUPERVISION, "actors": 3, "learn_s": 1.0, **changes}
    return Scenario(**made)


def step_times(simulation, first, last):
    return [r["time/step_s"] for r in simulation.reporter.rows if first <= r["step"] <= last]


def test_one_hung_actor_of_three_holds_the_learner_up_for_no_longer_than_it_takes_to_notice(
    tmp_path,
):
    async def hang(simulation):
        await simulation.until(20)
        simulation.actors["bf16-1"].hang()

    simulation = simulate(scenario(), tmp_path, hang)
    before = max(step_times(simulation, 2, 20))
    longest = max(step_times(simulation, 21, 119))
    # noticed within suspect_after_s (15) and a heartbeat; it is killed after 120 s
    assert longest < 15 + 5 + 5 + 3 * before
    slow = [s for s in step_times(simulation, 21, 119) if s > 3 * before]
    assert len(slow) <= 3
    notes = simulation.reporter.notes
    assert any("bf16-1 has not answered for 15 s" in note for note in notes)
    assert any("bf16-1 is replaced" in note for note in notes)
    assert simulation.reporter.rows[-1]["ledger/failed"] == 0  # silence is not counted as a loss


@pytest.mark.parametrize(("hang_s", "heartbeat_s"), [(1200, 5), (1200, 30), (45, 5)])
def test_a_silent_actor_is_named_within_a_minute_whatever_the_settings(hang_s, heartbeat_s):
    spec = SupervisionSpec(heartbeat_s=heartbeat_s, hang_timeout_s=hang_s)
    assert spec.suspect_after_s <= 40


def test_an_actor_that_was_silent_for_a_while_goes_on_where_it_was(tmp_path):
    async def nap(simulation):
        await simulation.until(20)
        simulation.actors["bf16-1"].hang()
        await asyncio.sleep(60)
        simulation.actors["bf16-1"].wake()

    simulation = simulate(scenario(), tmp_path, nap)
    assert simulation.fleet.supervisor.replacements == 0
    assert any("bf16-1 answers again" in note for note in simulation.reporter.notes)
    assert simulation.actors["bf16-1"].version >= 118
    assert simulation.reporter.rows[-1]["rollout/in_rotation"] == 3


def test_a_hung_actor_does_not_hold_up_what_another_lost(tmp_path):
    async def both(simulation):
        await simulation.until(20)
        simulation.actors["bf16-1"].hang()
        await asyncio.sleep(1)
        simulation.actors["bf16-2"].die()

    simulation = simulate(scenario(), tmp_path, both)
    assert max(step_times(simulation, 21, 119)) < 40
    assert simulation.fleet.supervisor.replacements == 2


def test_an_actor_that_loads_weights_slowly_gets_no_work_and_holds_nobody_up(tmp_path):
    async def slow(simulation):
        await simulation.until(20)
        simulation.actors["bf16-1"].speed = Speed(load_s=100.0)

    simulation = simulate(scenario(), tmp_path, slow)
    assert max(step_times(simulation, 21, 119)) < 20
    assert simulation.fleet.supervisor.replacements == 0
    bound = ASYNC.steps_per_publish - 1 + ASYNC.max_staleness
    assert all(row["staleness/max"] <= bound for row in simulation.reporter.rows)


@pytest.mark.parametrize("on_publish", ["finish", "abort", "in_flight"])
def test_stragglers_of_a_publication_catch_up_with_the_newest_version(on_publish, tmp_path):
    schedule = ASYNC.model_copy(update={"on_publish": on_publish, "steps": 40})
    long = {5, 6}

    def tokens(request):
        return 400 if request.group_id in long else 10

    simulation = simulate(scenario(schedule=schedule, tokens=tokens), tmp_path)
    versions = {actor.version for actor in simulation.actors.values()}
    assert max(versions) == 40 and simulation.fleet.supervisor.replacements == 0
    bound = schedule.steps_per_publish - 1 + schedule.max_staleness
    assert all(row["staleness/max"] <= bound for row in simulation.reporter.rows)


def test_a_synchronous_run_waits_for_every_actor_that_answers(tmp_path):
    """Which samples share an engine step must not depend on timing."""

    async def slow(simulation):
        simulation.actors["bf16-1"].speed = Speed(load_s=30.0)

    schedule = ScheduleSpec(steps=3, groups_per_step=4)
    simulation = simulate(scenario(schedule=schedule), tmp_path, slow)
    assert all(row["time/publish_s"] > 29 for row in simulation.reporter.rows)
    assert all(row["rollout/in_rotation"] == 3 for row in simulation.reporter.rows)


def test_a_synchronous_run_goes_on_without_a_silent_actor(tmp_path):
    async def hang(simulation):
        await simulation.until(5)
        simulation.actors["bf16-1"].hang()

    schedule = ScheduleSpec(steps=30, groups_per_step=4)
    simulation = simulate(scenario(schedule=schedule), tmp_path, hang)
    assert max(r["time/step_s"] for r in simulation.reporter.rows) < 40


def test_a_slow_answer_to_what_is_open_does_not_hold_up_the_graders_restart(tmp_path):
    async def hang(simulation):
        await simulation.until(20)
        simulation.actors["bf16-1"].hang()
        simulation.scorer.restart()

    simulation = simulate(scenario(), tmp_path, hang)
    assert max(step_times(simulation, 21, 119)) < 40
