"""Difficulty pools: what is solved or hopeless is drawn less, by what was remembered."""

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.advisor.simulate.loop import CountingTask, Scenario, simulate
from rlcore.buffer.specs import SelectionSpec, TaskShare
from rlcore.loop.prompts import Difficulty, PromptSource
from rlcore.loop.specs import DifficultySpec, ScheduleSpec

TASKS = {"a": TaskShare(4, 1.0, remember=True), "b": TaskShare(2, 1.0, remember=True)}
SCHEDULES = {
    "on_policy": {},
    "large_batch": {"steps_per_publish": 4},
    "eta_2": {"max_staleness": 2, "on_publish": "in_flight"},
}


def source(spec, *, seed=0, train=None):
    return PromptSource(
        CountingTask(train=train),
        lambda text: [1],
        run_seed=seed,
        max_prompt_tokens=9,
        difficulty=Difficulty(spec, seed),
    )


def index(item):
    return int(item.prompt_id.rpartition("/")[2])


RATES = st.dictionaries(st.integers(0, 11), st.sampled_from([0.0, 0.25, 0.5, 1.0]), max_size=12)


@settings(deadline=None, max_examples=30)
@given(RATES, st.integers(0, 2**62))
def test_shares_of_the_pools_are_those_asked_for(rates, seed):
    walk = source(DifficultySpec(resample_rate=0.25), seed=seed, train=12)
    walk.observe([(f"digits/train/{i}", rate) for i, rate in rates.items()])
    if len(rates) == 12 and set(rates.values()) <= {0.0, 1.0}:
        rates.pop(0)
        walk.observe([("digits/train/0", 0.5)])
    drawn = Counter(index(walk.next()) for _ in range(1200))
    easy_or_hopeless = {i for i, rate in rates.items() if rate in (0.0, 1.0)}
    others = set(range(12)) - easy_or_hopeless
    epochs = walk.cursor / 12
    for i in others:  # in every epoch once
        assert abs(drawn[i] - epochs) <= 1
    expected = epochs * len(easy_or_hopeless) / 4
    seen = sum(drawn[i] for i in easy_or_hopeless)
    assert abs(seen - expected) <= 6 * (expected + 1) ** 0.5  # of independent draws


@settings(deadline=None, max_examples=50)
@given(RATES, st.integers(0, 60), st.integers(1, 40), st.booleans())
def test_resumed_at_any_point_the_walk_is_the_same(rates, before, after, finite):
    spec = DifficultySpec(resample_rate=0.2, problems=None if finite else 12)

    def walk():
        return source(spec, train=12 if finite else None)

    outcomes = [(f"digits/train/{i}", rate) for i, rate in rates.items()]
    whole = walk()
    whole.observe(outcomes)
    ids = [whole.next().prompt_id for _ in range(before + after)]
    stopped = walk()
    stopped.observe(outcomes)
    stopped.advance(before)
    resumed = walk()
    resumed.restore(json.loads(json.dumps(stopped.state())))
    assert [item.prompt_id for item in resumed.peek(after)] == ids[before:]
    assert [resumed.next().prompt_id for _ in range(after)] == ids[before:]


def test_where_everything_is_solved_something_is_still_drawn():
    walk = source(DifficultySpec(resample_rate=1e-9), train=5)
    walk.observe([(f"digits/train/{i}", 1.0) for i in range(5)])
    assert len(walk.peek(3)) == 3
    walk.begin_anew()  # and remembers nothing
    assert walk.metrics()["task/digits/seen"] == 0


def scenario(name, **changes):
    schedule = ScheduleSpec(**{"steps": 16, "groups_per_step": 4, **SCHEDULES[name]})

    def reward(answer):
        number = int(answer.prompt_id.rpartition("/")[2]) % 4
        return {0: 1.0, 1: 0.0}.get(number, float(answer.sample_index % 2))

    spec = DifficultySpec(resample_rate=0.2)
    base = {"schedule": schedule, "tasks": TASKS, "reward": reward, "problems": 8}
    return Scenario(**{**base, "difficulty": spec, **changes})


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_run_draws_less_of_the_solved_and_the_hopeless(name, dynamic, tmp_path):
    prompts = {}

    def tokens(request):
        prompts[request.group_id] = request.prompt_id
        return 10

    selection = SelectionSpec(dynamic_sampling=dynamic)
    simulation = simulate(scenario(name, tokens=tokens, selection=selection), tmp_path)
    assert simulation.progress.step == 16
    last = simulation.reporter.rows[-1]
    for task in "ab":
        counts = {n: last[f"task/{task}/{n}"] for n in ("seen", "solved", "hopeless")}
        assert counts == {"seen": 8.0, "solved": 2.0, "hopeless": 2.0}
    numbers = Counter(int(p.rpartition("/")[2]) % 4 for g, p in prompts.items() if g >= 0)
    assert numbers[0] + numbers[1] < 0.75 * (numbers[2] + numbers[3])


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_stopped_run_remembers(name, tmp_path):
    async def stop(simulation):
        await simulation.until(6)
        simulation.controller.request_stop()

    whole = simulate(scenario(name), tmp_path / "whole")
    simulate(scenario(name), tmp_path / "parts", stop)
    second = simulate(scenario(name), tmp_path / "parts", resume=True)
    seen = {n: v for n, v in second.reporter.rows[-1].items() if n.endswith("/seen")}
    assert seen == {"task/a/seen": 8.0, "task/b/seen": 8.0}
    if whole.scenario.schedule.synchronous:
        assert second.learner.trained == whole.learner.trained
        assert second.prompts.state() == whole.prompts.state()
