"""Forecasts against what can be worked out by hand: answers of one length, constant rates."""

import asyncio
import gc
import math
import sys
from dataclasses import replace
from itertools import pairwise

import pytest

from rlcore.advisor.planner.actor import PlannedScorer
from rlcore.advisor.planner.forecast import forecast
from rlcore.advisor.planner.run import PlannedFleet
from rlcore.advisor.planner.specs import ActorRates, EpisodeSpec, LearnerRates, LengthSpec, Rates
from rlcore.loop.specs import ScheduleSpec
from rlcore.rollout.worker import SpareTime

LENGTH, PROMPT, GROUPS, SAMPLES = 64, 16, 4, 2
SEQUENCES = GROUPS * SAMPLES
DECODE_S = 0.1


def fleet(*, actors=1, learn_s=1.0, spread=0.0, running=64, failures=0.0, **schedule):
    rates = Rates(
        learner=LearnerRates(step_s=learn_s, token_s=0.0, publish_s=1e-3),
        lengths=LengthSpec(prompt=PROMPT, median=LENGTH, spread=spread),
        grade_s=1e-3,
        failures_per_day=failures,
    )
    actor = ActorRates(
        decode_s=DECODE_S,
        prefill_tokens_per_s=1e9,
        load_s=1e-3,
        start_s=1.0,
        max_running=running,
    )
    plan = ScheduleSpec(**{"steps": 12, "groups_per_step": GROUPS, **schedule})
    return PlannedFleet({"bf16": actors}, {"bf16": actor}, rates, plan, SAMPLES, max_tokens=LENGTH)


ROLLOUT_S = LENGTH * DECODE_S  # of a batch that runs together


def test_on_policy_the_step_is_the_sum_of_rollout_and_learning():
    found = forecast(fleet(learn_s=3.0))
    assert found.step_s == pytest.approx(ROLLOUT_S + 3.0, rel=0.05)
    assert found.staleness_max == 0 and found.bottleneck == "turns"
    assert found.actors_idle == pytest.approx(3.0 / (ROLLOUT_S + 3.0), abs=0.03)
    assert found.learner_idle == pytest.approx(ROLLOUT_S / (ROLLOUT_S + 3.0), abs=0.03)


def test_asynchronous_the_slower_role_sets_the_pace():
    slow_learner = forecast(fleet(learn_s=20.0, max_staleness=1, on_publish="in_flight"))
    assert slow_learner.step_s == pytest.approx(20.0, rel=0.05)
    assert slow_learner.bottleneck == "learner"
    slow_actors = forecast(
        fleet(learn_s=0.2, running=SEQUENCES, max_staleness=2, on_publish="in_flight")
    )
    assert slow_actors.step_s == pytest.approx(ROLLOUT_S, rel=0.1)
    assert slow_actors.bottleneck == "actors" and slow_actors.staleness_max <= 2


def test_the_end_of_a_run_at_which_actors_run_out_of_prompts_is_not_counted():
    planned = fleet(
        actors=16,
        groups_per_step=16,
        learn_s=1.0,
        spread=1.0,
        steps=34,
        max_staleness=8,
        on_publish="in_flight",
    )
    found = forecast(planned)
    assert found.bottleneck == "learner"
    assert found.rollout_tokens_per_s == pytest.approx(found.train_tokens_per_s, rel=0.03)
    assert found.actors_idle == pytest.approx(0.0, abs=0.02)


def test_on_policy_messages_and_the_reading_of_a_batch_are_waited_for():
    """They lie between the last token and the step, and nothing else hides them."""
    planned = fleet(learn_s=3.0)
    learner = planned.rates.learner.model_copy(
        update={"fetch_token_s": 0.5 / (SEQUENCES * (LENGTH + PROMPT))}
    )
    rates = planned.rates.model_copy(update={"deliver_s": 0.25, "learner": learner})
    plain, found = forecast(planned), forecast(replace(planned, rates=rates))
    assert found.step_s - plain.step_s == pytest.approx(0.75, abs=0.01)


def test_asynchronous_they_delay_a_batch_and_not_the_engine():
    settings = {"learn_s": 0.2, "running": SEQUENCES, "max_staleness": 2}
    planned = fleet(**settings, on_publish="in_flight")
    rates = planned.rates.model_copy(update={"deliver_s": 0.5})
    plain, found = forecast(planned), forecast(replace(planned, rates=rates))
    assert found.step_s == pytest.approx(plain.step_s, rel=0.02)


def test_an_engine_with_time_to_spare_serves_older_requests_first(monkeypatch):
    """As `RolloutWorker` has it. Served as they come, two batches are whole at once, and the engine
    is idle in every second step."""

    def step_s(learn_s):
        wide = {"groups_per_step": 16, "steps": 40, "max_staleness": 1, "on_publish": "in_flight"}
        planned = fleet(learn_s=learn_s, spread=0.3, **wide)
        engine = planned.actor_rates["bf16"]
        engine = engine.model_copy(update={"decode_s": 0.01, "decode_request_s": 0.003})
        found = forecast(replace(planned, max_tokens=160, actor_rates={"bf16": engine}))
        return found.step_s

    ordered, busy = step_s(6.0), step_s(0.1)
    monkeypatch.setattr(SpareTime, "BEGINS", 1.0)
    assert ordered < 0.95 * step_s(6.0)
    assert busy == step_s(0.1)


def test_answers_leave_an_engine_together_while_it_has_more(monkeypatch):
    times = set()
    finished = PlannedScorer.finished

    def noted(self, answered):
        times.add(asyncio.get_running_loop().time())
        finished(self, answered)

    monkeypatch.setattr(PlannedScorer, "finished", noted)

    def shortest_gap(hand_over_s):
        """Between two messages of an engine that always has more."""
        planned = fleet(spread=0.5, running=8, max_staleness=4, on_publish="in_flight", learn_s=0.1)
        engine = planned.actor_rates["bf16"].model_copy(update={"hand_over_s": hand_over_s})
        times.clear()
        forecast(replace(planned, actor_rates={"bf16": engine}))
        middle = sorted(times)[5:-10]
        assert len(middle) > 10
        return min(b - a for a, b in pairwise(middle))

    assert shortest_gap(0.0) < 0.5
    assert shortest_gap(2.0) >= 2.0 - 1e-6


def test_slow_graders_are_named():
    quick = fleet(learn_s=0.1, running=SEQUENCES, max_staleness=2, on_publish="in_flight")
    rates = quick.rates.model_copy(update={"grade_s": 2.0})
    found = forecast(replace(quick, rates=rates))
    assert found.step_s == pytest.approx(2.0 * SEQUENCES, rel=0.1) and found.bottleneck == "graders"


def test_a_teacher_scores_every_answer_before_it_is_graded_and_is_named():
    quick = fleet(learn_s=0.1, running=SEQUENCES, max_staleness=2, on_publish="in_flight")
    rates = quick.rates.model_copy(update={"teacher_tokens_per_s": (PROMPT + LENGTH) / 2.0})
    one = forecast(replace(quick, rates=rates, teachers=1))
    assert one.step_s == pytest.approx(2.0 * SEQUENCES, rel=0.1) and one.bottleneck == "teacher"
    two = forecast(replace(quick, rates=rates, teachers=2))
    assert two.step_s == pytest.approx(one.step_s / 2, rel=0.1)
    assert forecast(replace(quick, rates=rates)) == forecast(quick)  # no engine: not its rate


def test_what_is_computed_before_a_phase_is_so_once_for_all_its_steps():
    plan = {"learn_s": 1.0, "steps_per_phase": 4, "steps_per_publish": 4, "steps": 96}
    quick = fleet(**plan)
    tokens = SEQUENCES * (PROMPT + LENGTH)
    learner = quick.rates.learner.model_copy(update={"phase_token_s": 8.0 / (4 * tokens)})
    rates = quick.rates.model_copy(update={"learner": learner})
    more = forecast(replace(quick, rates=rates)).step_s - forecast(quick).step_s
    assert more == pytest.approx(2.0, rel=0.07)  # the rows that count may cut a phase in two


def test_every_node_has_graders_of_its_own():
    quick = fleet(actors=2, learn_s=0.1, running=SEQUENCES, max_staleness=2, on_publish="in_flight")
    rates = quick.rates.model_copy(update={"grade_s": 4.0})
    one, two = (forecast(replace(quick, rates=rates, nodes=n)) for n in (1, 2))
    assert one.step_s == pytest.approx(4.0 * SEQUENCES, rel=0.1)
    assert two.step_s == pytest.approx(one.step_s / 2, rel=0.1) and two.bottleneck == "graders"


@pytest.mark.parametrize("schedule", [
    {},
    {"max_staleness": 2, "on_publish": "in_flight"},
    {"max_staleness": 4, "on_publish": "abort", "steps_per_publish": 4},
])  # fmt: skip
def test_an_answer_costs_a_large_fleet_no_more_than_a_small_one(schedule):
    small, large = (lines_an_answer(actors, schedule) for actors in (8, 32))
    assert large < small


def lines_an_answer(actors, schedule):
    """Lines of Python that a forecast runs for each of its answers."""
    planned = fleet(actors=actors, groups_per_step=actors, spread=0.6, **schedule)
    lines = collections = 0

    def line(frame, event, arg):
        nonlocal lines
        lines += event == "line"
        return line

    def collected(phase, info):
        nonlocal collections
        collections += info["generation"] == 2

    tracing = sys.gettrace()
    gc.callbacks.append(collected)
    sys.settrace(lambda *_: line)
    try:
        forecast(planned)
    finally:
        sys.settrace(tracing)
        gc.callbacks.remove(collected)
    assert not collections  # each looks at all objects of the fleet
    return lines / (actors * SAMPLES * planned.schedule.steps)


def test_tokens_are_counted_in_real_ones_whatever_a_simulated_one_stands_for():
    short = fleet(learn_s=1.0)
    lengths = LengthSpec(prompt=PROMPT, median=640, spread=0.0)
    rates = short.rates.model_copy(update={"lengths": lengths})
    long = replace(short, rates=rates, max_tokens=640)
    assert long.unit == 10
    found = forecast(long)
    assert found.step_s == pytest.approx(640 * DECODE_S + 1.0, rel=0.05)
    assert found.train_tokens_per_s == pytest.approx(SEQUENCES * 640 / found.step_s, rel=0.05)


TURNS, GIVEN, CALL_S = 3, 10, 2.0
CALLS_S = (1 + (TURNS - 1) + 2) * CALL_S  # reset, between turns, the last step and grade


def playing(*, places=64, prefill=1e9, turns=TURNS, max_turns=8, **given):
    """The fleet with an environment: every turn has LENGTH tokens."""
    one = fleet(learn_s=3.0, **given)
    rates = one.rates.model_copy(
        update={"episodes": EpisodeSpec(turns=turns, given=GIVEN, call_s=CALL_S)}
    )
    actor = one.actor_rates["bf16"].model_copy(update={"prefill_tokens_per_s": prefill})
    return replace(
        one, rates=rates, actor_rates={"bf16": actor}, places=places, max_turns=max_turns
    )


def test_an_episode_is_its_turns_and_the_calls_of_its_environment():
    found = forecast(playing())
    assert found.step_s == pytest.approx(TURNS * ROLLOUT_S + CALLS_S + 3.0, rel=0.02)
    assert found.train_tokens_per_s == pytest.approx(
        SEQUENCES * TURNS * LENGTH / found.step_s, rel=0.01
    )
    # the engine has nothing to do while environments are called
    assert found.actors_idle == pytest.approx(1 - TURNS * ROLLOUT_S / found.step_s, abs=0.02)
    assert forecast(playing(max_turns=1)).step_s == pytest.approx(
        ROLLOUT_S + 3 * CALL_S + 3.0, rel=0.02
    )


def test_episodes_without_a_place_wait_for_one():
    found = forecast(playing(places=SEQUENCES // 2))
    assert found.step_s == pytest.approx(2 * (TURNS * ROLLOUT_S + CALLS_S) + 3.0, rel=0.02)


def test_a_turn_computes_what_it_was_given_and_the_rest_again_after_new_weights():
    slow = 20.0  # prompt tokens a second
    once = SEQUENCES * (PROMPT + (TURNS - 1) * GIVEN) / slow
    found = forecast(playing(prefill=slow))
    assert found.step_s == pytest.approx(TURNS * ROLLOUT_S + CALLS_S + 3.0 + once, rel=0.03)
    ahead = {"max_staleness": 1, "on_publish": "in_flight", "steps": 24}
    slowed, quick = (forecast(playing(prefill=p, **ahead)) for p in (slow, 1e9))
    assert slowed.step_s > quick.step_s + 1.1 * once  # contexts of old weights are computed again
    assert 0 < quick.staleness_mean <= quick.staleness_max <= 1


def test_turns_keep_their_mean_and_actors_that_die_cost_episodes_time():
    plain, dying = (
        forecast(playing(turns=2.5, steps=48, failures=f, actors=2)) for f in (0.0, 300.0)
    )
    a_step = plain.train_tokens_per_s * plain.step_s
    assert a_step == pytest.approx(SEQUENCES * 2.5 * LENGTH, rel=0.1)
    assert dying.replacements > 2 and dying.step_s > 1.01 * plain.step_s


def test_more_publish_steps_wait_less_for_the_longest_answers():
    one = forecast(fleet(learn_s=0.1, spread=1.0))
    eight = forecast(fleet(learn_s=0.1, spread=1.0, steps=32, steps_per_publish=8))
    assert eight.step_s < 0.6 * one.step_s and eight.staleness_max == 7


def test_actors_that_die_are_replaced_and_cost_time():
    whole = forecast(fleet(actors=2, steps=24))
    failing = forecast(fleet(actors=2, steps=24, failures=2000.0))
    assert failing.replacements > 0 and failing.step_s > whole.step_s
    assert math.isfinite(failing.staleness_mean)
