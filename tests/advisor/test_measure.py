"""Rates from the rows of a run."""

import math
from dataclasses import replace

import numpy as np
import pytest

from rlcore.advisor.planner.measure import MeasuredRun, log_normal, measured
from rlcore.errors import UserError
from rlcore.rollout.worker import HAND_OVER_S

PROMPT, STEP_S, TOKEN_S, BESIDE_S = 20, 0.3, 1e-4, 0.05


def run(groups=8, steps=12, synchronous=False, every=1, **others):
    """A run whose learner takes STEP_S + TOKEN_S a token, and the loop BESIDE_S a step; weights are
    published `every` steps."""
    sequences, rows = groups * 8, []
    for step in range(1, steps + 1):
        tokens = sequences * (30 + step % 3)
        learn_s = STEP_S + TOKEN_S * (tokens + sequences * PROMPT)
        parts = {"receive": 0.01, "stop": 0.2, "drain": 0.0}
        publish = {f"time/publish_{name}_s": s for name, s in parts.items()}
        publish["time/publish_s"] = 0.1 + sum(parts.values())
        stands = publish["time/publish_s"] if synchronous else 0.1
        if step % every:
            publish, stands = {"time/publish_s": 0.0}, 0.0
        row = {
            "step": step,
            "train/tokens": tokens,
            "train/sequences": sequences,
            "train/sequence_positions": tokens + sequences * (PROMPT - 1),
            "response_length/mean": tokens / sequences,
            "response_length/max": 90,
            "response_length/truncated_share": 0.0,
            "time/learn_s": learn_s,
            "time/learner_ref_s": 0.02,
            "time/wait_data_s": 0.5,
            "time/step_s": 0.5 + learn_s + stands + BESIDE_S,
            "time/checkpoint_s": 0.0,
            **publish,
            "engine/bf16/step_s": 0.01 / step + 0.004,
            "engine/bf16/request_s": 2e-5,
            "engine/bf16/context_s": 0.0,
            "engine/bf16/prompt_s": 1e-5,
        }
        rows.append(row)
    known = {"label": "bf16", "max_running": 64, "max_tokens": 128, "ref_pass": False}
    return MeasuredRun("a", rows, synchronous=synchronous, **(known | others))


def test_one_run_gives_the_costs_of_its_own_batch():
    rates = measured([run()], grade_s=2e-3)
    tokens = 64 * (31 + PROMPT)
    step_s = rates.learner.step_s + tokens * rates.learner.token_s
    assert step_s == pytest.approx(STEP_S + TOKEN_S * tokens + BESIDE_S, rel=0.02)
    assert rates.learner.publish_s == pytest.approx(0.1)
    assert rates.actor.load_s == pytest.approx(0.2)
    assert rates.actor.prefill_tokens_per_s == pytest.approx(1e5)
    assert rates.actor.max_running == 64 and rates.grade_s == 2e-3
    assert rates.lengths.prompt == PROMPT


def test_messages_and_reading_are_told_apart_where_a_run_has_measured_them():
    old = measured([run()], grade_s=2e-3)
    assert old.deliver_s == 0.0 and old.learner.fetch_token_s == 0.0
    rows = [
        {**row, "time/score_lag_s": 0.1 / row["step"] + 0.03, "time/fetch_s": 0.05}
        for row in run().rows
    ]
    rates = measured([replace(run(), rows=rows)], grade_s=2e-3)
    # of all samples so far, so that the last of the rows that count knows best
    assert rates.deliver_s == pytest.approx(0.1 / 11 + 0.03 - 2e-3)
    assert rates.learner.fetch_token_s == pytest.approx(0.05 / (64 * (31 + PROMPT)), rel=0.02)
    assert rates.actor.hand_over_s == HAND_OVER_S


def test_the_rate_of_a_teacher_is_that_of_one_engine():
    rows = [{**row, "time/teacher_engine_s": 4.0} for row in run().rows]
    rates = measured(
        [replace(run(), rows=rows)], grade_s=None, beside="teacher=engine", scored=True
    )
    tokens = 64 * (31 + PROMPT)
    assert rates.teacher_tokens_per_s == pytest.approx(tokens / 4.0, rel=0.02)
    assert rates.beside == "teacher=engine"
    assert measured([run()], grade_s=None).teacher_tokens_per_s is None


def test_two_batches_tell_fixed_costs_from_those_of_tokens():
    learner = measured([run(), run(groups=24)], grade_s=None).learner
    assert learner.token_s == pytest.approx(TOKEN_S, rel=1e-3)
    assert learner.step_s == pytest.approx(STEP_S + BESIDE_S, rel=1e-3)


def test_a_publication_that_is_waited_for_is_no_time_of_the_loop():
    runs = [run(synchronous=True), run(groups=3, synchronous=True)]
    learner = measured(runs, grade_s=None).learner
    assert learner.step_s == pytest.approx(STEP_S + BESIDE_S, rel=1e-3)


def test_rare_publications_cost_as_much_each():
    rates = measured([run(every=2, steps=16)], grade_s=None)
    assert rates.learner.publish_s == pytest.approx(0.1)
    assert rates.actor.load_s == pytest.approx(0.2)


def test_a_pass_for_p_ref_is_told_apart():
    learner = measured([run(ref_pass=True)], grade_s=None).learner
    assert learner.ref_token_s == pytest.approx(0.02 / (64 * (31 + PROMPT)), rel=0.02)


def test_a_run_of_an_environment_gives_lengths_of_turns_and_the_time_of_calls():
    plain, one = run(), run(played=True)
    for row in one.rows:
        row |= {"reward_parts/turns": 4.0, "environment/call_s": 0.5 / row["step"] + 0.25}
    rates, answers = (measured([r], grade_s=None) for r in (one, plain))
    assert rates.episodes is not None and answers.episodes is None
    assert rates.episodes.turns == 4.0 and rates.episodes.given == PROMPT / 4
    assert rates.episodes.call_s == pytest.approx(0.25, abs=0.06)
    assert rates.lengths.prompt == PROMPT / 4 and rates.given == PROMPT
    assert rates.lengths.median == pytest.approx(answers.lengths.median / 4, rel=0.01)
    assert rates.learner == answers.learner
    with pytest.raises(UserError, match="measure them apart"):
        measured([one, plain], grade_s=None)


def test_runs_that_are_too_short_or_too_old_are_refused():
    with pytest.raises(UserError, match="has 7 steps, and rates need 8"):
        measured([run(steps=7)], grade_s=None)
    old = run()
    rows = [{k: v for k, v in r.items() if not k.startswith("engine/")} for r in old.rows]
    with pytest.raises(UserError, match="has no engine/bf16/step_s"):
        measured([replace(old, rows=rows)], grade_s=None)


@pytest.mark.parametrize("median, spread, longest", [(7.0, 0.4, 16), (300.0, 0.8, 1024)])
def test_lengths_are_recovered_from_mean_and_cut_share(median, spread, longest):
    drawn = median * np.exp(spread * np.random.default_rng(0).standard_normal(200_000))
    cut = float((drawn > longest).mean())
    found = log_normal(float(np.minimum(drawn, longest).mean()), longest, cut)
    assert found == pytest.approx((median, spread), rel=0.03)


def test_answers_of_one_length_have_no_spread():
    median, spread = log_normal(8.0, 8.0, 0.01)
    assert median == pytest.approx(8.0, rel=1e-6) and math.isclose(spread, 0.0, abs_tol=1e-6)
