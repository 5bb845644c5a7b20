"""What becomes of groups that an actor or the graders lost unnoticed."""

import asyncio
from collections import Counter

import numpy as np
import pytest

from rlcore.advisor.simulate.actors import Speed
from rlcore.advisor.simulate.loop import Scenario, simulate
from rlcore.loop.assignment import allowed_s
from rlcore.loop.dispatcher import spans
from rlcore.loop.specs import ScheduleSpec
from rlcore.testing.records import make_sampling
from rlcore.types import Request

ASYNC = ScheduleSpec(steps=30, groups_per_step=2, max_staleness=1, on_publish="in_flight")


def losing(losses, tokens=0):
    """Token counts by which group 3 vanishes the first `losses` times that it is asked for."""
    asked = Counter()

    def count(request):
        asked[request.request_id] += 1
        lost = request.group_id == 3 and asked[request.request_id] <= losses
        return tokens if lost else 10

    return count


def test_a_group_that_does_not_come_back_is_asked_for_again(tmp_path):
    scenario = Scenario(ASYNC, request_timeout_s=20, tokens=losing(1))
    simulation = simulate(scenario, tmp_path)
    missed = [n for n in simulation.reporter.notes if "rollout.request_timeout_s" in n]
    assert missed == ["1 groups missed rollout.request_timeout_s: assigned again (3)"]
    assert simulation.reporter.rows[-1]["ledger/failed"] == 0


def test_after_three_losses_it_is_given_up_and_another_prompt_takes_its_place(tmp_path):
    scenario = Scenario(ASYNC, request_timeout_s=20, tokens=losing(3))
    simulation = simulate(scenario, tmp_path)
    assert simulation.reporter.rows[-1]["ledger/failed/lost_3_times"] == 1
    assert simulation.reporter.rows[-1]["ledger/consumed"] == 60
    assert any("given up (3 (digits/train/3))" in n for n in simulation.reporter.notes)


def unfinished(simulation):
    return [name for actor in simulation.actors.values() for name in actor.unfinished]


def test_what_is_given_up_is_aborted_on_its_engine(tmp_path):
    """Of group 3 one sample is lost and the other one never finishes."""

    def tokens(request):
        if request.group_id != 3:
            return 10
        return 10**9 if request.sample_index else 0

    simulation = simulate(Scenario(ASYNC, request_timeout_s=20, tokens=tokens), tmp_path)
    assert simulation.reporter.rows[-1]["ledger/failed/lost_3_times"] == 1
    assert unfinished(simulation) == []


def test_what_is_evicted_while_it_is_sampled_is_aborted_on_its_engine(tmp_path):
    """A policy that may pass groups over evicts those that became too old."""
    schedule = ASYNC.model_copy(update={"sampling": "uniform"})
    simulation = simulate(Scenario(schedule, tokens=losing(9, tokens=10**9)), tmp_path)
    assert simulation.reporter.rows[-1]["ledger/evicted/stale"] >= 1
    assert not [name for name in unfinished(simulation) if name.startswith("train:3:")]


def test_time_in_a_queue_does_not_count(tmp_path):
    """Each sample waits for minutes before it decodes for two seconds."""
    schedule = ASYNC.model_copy(update={"groups_per_step": 64, "steps": 4})
    scenario = Scenario(
        schedule,
        samples=4,
        request_timeout_s=20,
        speed=Speed(step_s=0.2, max_running=2),
        tokens=lambda request: 10,
    )
    rows = simulate(scenario, tmp_path).reporter.rows
    assert max(row["time/step_s"] for row in rows) > 60
    assert rows[-1]["rollout/migrated_requests"] == rows[-1]["buffer/duplicates"] == 0
    assert rows[-1]["ledger/failed"] == 0


@pytest.mark.parametrize("on_publish", ["finish", "abort", "in_flight"])
def test_an_answer_that_takes_too_long_goes_on_at_another_actor_and_is_not_drawn_anew(
    on_publish, tmp_path
):
    """bf16-0 becomes forty times slower than the others. Every third answer is long."""

    async def slow(simulation):
        await simulation.until(5)
        simulation.actors["bf16-0"].speed = Speed(step_s=4.0)

    def tokens(request):
        return 30 if request.group_id % 3 == 0 else 5

    schedule = ASYNC.model_copy(update={"on_publish": on_publish, "steps": 40})
    scenario = Scenario(schedule, request_timeout_s=10, actors=3, tokens=tokens)
    simulation = simulate(scenario, tmp_path, slow)
    last = simulation.reporter.rows[-1]
    assert last["rollout/migrated_requests"] > 0 and last["ledger/failed"] == 0
    # no sample was drawn twice, so none could come first for being short
    assert last["buffer/duplicates"] == last["buffer/late"] == 0
    assert any("other actors go on with them" in note for note in simulation.reporter.notes)
    assert simulation.fleet.supervisor.replacements == 0
    trained = [g for step in simulation.learner.trained.values() for g, _ in step]
    long = sum(g % 3 == 0 for g in trained) / len(trained)
    assert long == pytest.approx(1 / 3, abs=0.03)


def test_what_a_moved_answer_had_is_kept(tmp_path):
    async def slow(simulation):
        await simulation.until(5)
        simulation.actors["bf16-0"].speed = Speed(step_s=4.0)
        asked = simulation.actors["bf16-1"].submit

        async def submit(requests, begun=None):
            kept.extend(len(had) for had in (begun or {}).values())
            await asked(requests, begun)

        simulation.actors["bf16-1"].submit = submit

    kept = []
    scenario = Scenario(ASYNC, request_timeout_s=10, tokens=lambda request: 30)
    simulation = simulate(scenario, tmp_path, slow)
    assert kept and max(kept) >= 3
    assert simulation.reporter.rows[-1]["rollout/migrated_requests"] >= len(kept)


def test_an_actor_that_dies_while_it_gives_a_group_up_loses_it_as_any_other(tmp_path):
    async def slow(simulation):
        await simulation.until(5)
        first = simulation.actors["bf16-0"]
        first.speed = Speed(step_s=4.0, answer_s=0.5)
        while not any("go on with them" in note for note in simulation.reporter.notes):
            await asyncio.sleep(0.1)
        first.die()

    scenario = Scenario(ASYNC, request_timeout_s=10, tokens=lambda request: 30)
    simulation = simulate(scenario, tmp_path, slow)
    assert simulation.fleet.supervisor.replacements == 1
    assert simulation.reporter.rows[-1]["ledger/failed"] == 0
    assert unfinished(simulation) == []


def test_more_time_is_allowed_for_more_tokens():
    def allowed(tokens):
        ids = np.ones(2, np.int32)
        sampling = make_sampling(max_new_tokens=tokens)
        return allowed_s(Request(0, 0, "t/train/0", ids, sampling, seed=0), 600.0)

    assert allowed(16) == allowed(1024) == 600.0
    assert allowed(16384) == 9600.0


def test_groups_are_all_named():
    assert spans([*range(3, 40), 50, 1]) == "1, 3-39, 50"
