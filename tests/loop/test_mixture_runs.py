"""Runs with several tasks on the real controller and buffer, in simulated time."""

from collections import Counter

import pytest

from rlcore.advisor.simulate.actors import Speed
from rlcore.advisor.simulate.loop import Scenario, simulate
from rlcore.buffer.specs import SelectionSpec, TaskShare
from rlcore.errors import UserError
from rlcore.loop.specs import CheckpointSpec, EvaluationSpec, ScheduleSpec

TASKS = {"a": TaskShare(2, 3.0), "b": TaskShare(5, 1.0)}
SCHEDULES = {
    "on_policy": {},
    "large_batch": {"steps_per_publish": 4},
    "eta_1": {"max_staleness": 1, "on_publish": "in_flight"},
    "eta_3_by_task": {"max_staleness": 3, "steps_per_publish": 2, "sampling": "by_task"},
    "by_task": {"sampling": "by_task"},
    "uniform": {"max_staleness": 2, "sampling": "uniform"},
}


class Tokens:
    """The tokens of a request, by its task; remembers what was asked."""

    def __init__(self):
        self.prompts = {}

    def __call__(self, request):
        self.prompts[request.group_id] = request.prompt_id
        return 12 if request.prompt_id.startswith("a/") else 5


def scenario(name, **changes):
    schedule = ScheduleSpec(**{"steps": 12, "groups_per_step": 4, **SCHEDULES[name]})
    return Scenario(**{"schedule": schedule, "tasks": TASKS, "tokens": Tokens(), **changes})


def task_of_group(simulation):
    """group id -> label, of every group that was ever assigned to an actor."""
    prompts = simulation.scenario.tokens.prompts
    return {g: prompt_id.split("/")[0] for g, prompt_id in prompts.items() if g >= 0}


def sizes(simulation):
    """(label, samples trained on) of every group."""
    labels = task_of_group(simulation)
    groups = Counter(g for step in simulation.learner.trained.values() for g, _ in step)
    return [(labels[g], n) for g, n in sorted(groups.items())]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_group_has_the_samples_of_its_task_and_shares_follow_the_weights(name, tmp_path):
    simulation = simulate(scenario(name), tmp_path)
    trained = sizes(simulation)
    assert len(trained) == 48 and {*trained} == {("a", 2), ("b", 5)}
    assert abs(sum(label == "a" for label, _ in trained) - 36) <= 4
    last = simulation.reporter.rows[-1]
    assert last["ledger/admitted"] == sum(
        last[f"ledger/{k}"] for k in ("consumed", "evicted", "failed", "live")
    )
    assert last["task/a/consumed"] + last["task/b/consumed"] == last["ledger/consumed"] == 48
    assert all(r["task/a/groups"] + r["task/b/groups"] == 4 for r in simulation.reporter.rows)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_stopped_run_goes_on_with_the_next_prompt_of_each_task(name, tmp_path):
    async def stop(simulation):
        await simulation.until(4)
        simulation.controller.request_stop()

    whole = simulate(scenario(name), tmp_path / "whole")
    first = simulate(scenario(name), tmp_path / "parts", stop)
    second = simulate(scenario(name), tmp_path / "parts", resume=True)
    assert 5 <= first.progress.step < 12
    trained = [g for step in second.learner.trained.values() for g in {g for g, _ in step}]
    assert len(trained) == len(set(trained)) == 48
    if whole.scenario.schedule.synchronous:
        assert second.learner.trained == whole.learner.trained
        whole_labels = task_of_group(whole)
        labels = task_of_group(first) | task_of_group(second)
        assert labels == whole_labels
    else:
        assert second.prompts.drawn == second.reporter.rows[-1]["ledger/admitted"]


@pytest.mark.parametrize("name", [n for n in SCHEDULES if not SCHEDULES[n].get("max_staleness")])
def test_rows_of_a_synchronous_run_do_not_depend_on_the_order_of_arrival(name, tmp_path):
    """Groups alternate between two actors, and which of them is faster decides what comes first."""

    def reward(answer):
        return (answer.group_id + 3 * answer.sample_index) % 8 / 7

    def rows(slow):
        async def slow_down(simulation):
            simulation.started[slow].speed = Speed(step_s=1.0)

        changes = {"reward": reward, "evaluation": EvaluationSpec(every=6, prompts=4, samples=2)}
        simulation = simulate(scenario(name, **changes), tmp_path / str(slow), slow_down)
        clock = ("time/", "throughput/", "checkpoint/")
        return [
            {k: v for k, v in row.items() if not k.startswith(clock)}
            for row in simulation.reporter.rows
        ]

    assert rows(slow=0) == rows(slow=1)


def test_evaluation_asks_every_task(tmp_path):
    spec = EvaluationSpec(every=6, prompts=4, samples=2)
    simulation = simulate(scenario("on_policy", evaluation=spec), tmp_path)
    row = next(r for r in simulation.reporter.rows if r["step"] == 12)
    assert {f"eval/{t}/{m}" for t in "ab" for m in ("greedy", "mean@2", "pass@2")} <= row.keys()
    assert (12, "b/greedy") in simulation.reporter.evaluations


def test_samples_that_are_shown_are_of_every_task(tmp_path):
    simulation = simulate(scenario("on_policy"), tmp_path)
    buffer = simulation.buffer.actor.buffer
    shown = [episode for found in buffer._peeks.values() for part in found for episode in part]
    labels = Counter(task_of_group(simulation)[e.score.group_id] for e in shown)
    assert set(labels) == {"a", "b"}


@pytest.mark.parametrize("name", ["on_policy", "eta_1"])
def test_a_task_of_which_all_groups_are_filtered_ends_the_run_in_a_sentence(name, tmp_path):
    def reward(answer):
        return 0.0 if answer.prompt_id.startswith("b/") else float(answer.sample_index % 2)

    selection = SelectionSpec(dynamic_sampling=True, filter_limit=9)
    with pytest.raises(UserError, match=r"filtered the last 9\d* groups of task b.*filter_limit=9"):
        simulate(scenario(name, selection=selection, reward=reward), tmp_path)


@pytest.mark.parametrize("name", ["on_policy", "eta_1", "by_task"])
def test_a_task_that_is_filtered_now_and_then_does_not(name, tmp_path):
    def reward(answer):
        index = int(answer.prompt_id.rpartition("/")[2])
        mixed = answer.prompt_id.startswith("a/") or index % 4 == 0
        return float(answer.sample_index % 2) if mixed else 1.0

    selection = SelectionSpec(dynamic_sampling=True, filter_limit=9)
    simulation = simulate(scenario(name, selection=selection, reward=reward), tmp_path)
    assert simulation.progress.step == 12
    last = simulation.reporter.rows[-1]
    assert last["task/b/filtered"] > last["task/b/consumed"] > 0 == last["task/a/filtered"]


def test_weights_changed_on_resume_hold_from_then_on_and_a_task_must_stay(tmp_path):
    async def stop(simulation):
        await simulation.until(4)
        simulation.controller.request_stop()

    checkpoints = CheckpointSpec(every=1)
    simulate(scenario("on_policy", checkpoint=checkpoints), tmp_path, stop)
    with pytest.raises(UserError, match=r"task=\[a\] lacks b"):
        simulate(scenario("on_policy", tasks={"a": TASKS["a"]}), tmp_path, resume=True)
    other = {"a": TaskShare(2, 0.0), "b": TaskShare(5, 1.0)}
    resumed = simulate(scenario("on_policy", tasks=other), tmp_path, resume=True)
    assert [r["task/a/groups"] for r in resumed.reporter.rows[1:]] == [0.0] * (
        len(resumed.reporter.rows) - 1
    )
