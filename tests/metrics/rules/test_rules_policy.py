"""Rules about the policy, on recorded runs and on rows that are ill by construction."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_rows import ILL, LATER, UNSURE, WELL, after, recorded, rows

from rlcore.metrics.health import Health
from rlcore.metrics.rules.base import Course, Past, held_out
from rlcore.metrics.rules.policy import answer_kl, rate_that_holds
from rlcore.metrics.specs import WarningsSpec

ASYNC = Course(staleness_bound=8)
ON_POLICY = Course(takes_turns=True)
# The step at which samples that have left the policy are seen, in the runs that lose it; the
# rewards of the last one fell at step 23.
SEEN = {
    "async": 4,
    "fp8": 4,
    "fp8 tis": 4,
    "lag 2": 5,
    "object store": 5,
    "vcpo": 15,
    "cpu, async": 4,
}


def alarms(found, course=ASYNC, spec=None):
    health = Health(spec or WarningsSpec(), course)
    health.resume(found)
    return {alarm.rule: alarm for alarm in health.alarms}


@pytest.mark.parametrize("run", SEEN)
def test_a_run_that_loses_its_policy_is_seen_at_the_first_sign(run):
    found = alarms(recorded()[run])
    assert min(alarm.step for alarm in found.values()) == found["answer_kl"].step == SEEN[run]
    assert found["fallen"].step > SEEN[run]


def test_the_held_out_result_is_lost_after_the_alarm():
    rows = recorded()["cpu, async"]
    rewards = {r["step"]: v for r in rows if (v := r.get("eval/digits/sampled_reward"))}
    lost = [step for step, reward in rewards.items() if reward < 0.8 * rewards[1]]
    assert alarms(rows)["answer_kl"].step < min(lost)


@pytest.mark.parametrize(
    ("run", "course"),
    [("on policy", ON_POLICY), ("async at 1e-5", ASYNC), ("cpu, quickstart", ASYNC)],
    ids=str,
)
def test_recorded_runs_that_learn_raise_no_alarm(run, course):
    assert alarms(recorded()[run], course) == {}


@pytest.mark.parametrize("run", ["async", "fp8", "lag 2", "object store"])
def test_the_advice_is_a_rate_that_has_learned(run):
    # the same run at 1e-5 learns; all of these had 5e-5
    assert "set learner.lr=1e-05" in alarms(recorded()[run])["answer_kl"].text


def test_the_advice_is_by_the_rate_of_the_step_that_led_there():
    warming = rows(
        8,
        **{
            "lr": lambda step: 2e-5 * step,
            "mismatch/kl_k3": lambda step: 0.001 if step < 5 else 0.3,
        },
    )
    # 6 nats by steps of at most 8e-5: a fifth of that rate
    assert "set learner.lr=1e-05" in alarms(warming)["answer_kl"].text


@given(lr=st.floats(1e-7, 1e-2), nats=st.floats(0.01, 1e4))
def test_an_advised_rate_is_no_larger_and_has_one_digit(lr, nats):
    rate = rate_that_holds(lr, nats)
    assert 0 < rate <= lr * (1 + 1e-9)
    assert float(f"{rate:.0e}") == rate
    if nats <= 0.5:
        assert rate > lr / 2  # nothing to lower but the rounding


@pytest.mark.parametrize("name", ILL)
@pytest.mark.parametrize("steps", [5, 20, 200])
def test_no_run_that_is_ill_is_called_healthy(name, steps):
    spoken_at, extra = ILL[name]
    health = Health(WarningsSpec(), ASYNC)
    health.resume(rows(steps, **extra))
    verdict = health.verdict()
    if steps >= spoken_at or name not in LATER:
        assert verdict.kind != "well" and "Healthy" not in verdict.line
    if steps >= spoken_at:
        assert verdict.kind == "ill" and verdict.warnings


@pytest.mark.parametrize("name", UNSURE)
def test_a_run_without_alarm_is_not_called_healthy_while_something_is_missing_or_falls(name):
    extra, lacks = UNSURE[name]
    health = Health(WarningsSpec(), ASYNC)
    health.resume(rows(20, rise=0.004, **extra))
    verdict = health.verdict()
    assert verdict.kind == "unsure" and not verdict.warnings
    assert verdict.said.startswith("Not judged: ") and lacks in verdict.said


@pytest.mark.parametrize("name", WELL)
@pytest.mark.parametrize("steps", [5, 20, 200])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_run_that_is_well_raises_no_alarm(name, steps, seed):
    health = Health(WarningsSpec(), ASYNC)
    health.resume(rows(steps, rise=0.004, seed=seed, **WELL[name]))
    verdict = health.verdict()
    assert health.alarms == []
    assert verdict.kind == ("well" if steps >= 20 else "unsure"), verdict
    assert verdict.said.startswith("Healthy" if steps >= 20 else "Too few steps to judge")


def test_the_distance_of_an_answer_is_above_that_of_fresh_samples_and_of_128_tokens():
    row = {"mismatch/kl_k3": 0.02, "response_length/mean": 50.0, "staleness/max": 2.0}
    assert answer_kl(row, 0.0) == pytest.approx(1.0)
    assert answer_kl(row, 0.015) == pytest.approx(0.25)
    assert answer_kl({**row, "response_length/mean": 4000.0}, 0.0) == pytest.approx(2.56)
    assert answer_kl({**row, "staleness/max": 0.0}, 0.0) == 0.0
    assert answer_kl({**row, "step_bound/answer_kl": 7.0}, 0.0) == 7.0
    assert answer_kl({**row, "mismatch/kl_k3": None}, 0.0) is None


def test_one_of_three_steps_is_no_alarm_and_two_are():
    def far(*steps):
        return rows(12, **{"mismatch/kl_k3": lambda step: 0.3 if step in steps else 0.001})

    assert alarms(far(5)) == {} == alarms(far(5, 8))
    assert alarms(far(5, 7))["answer_kl"].step == 7
    assert alarms(far(5, 7), spec=WarningsSpec(answer_kl=0)) == {}


def test_rewards_that_scatter_have_not_fallen():
    scattered = [0.1, 0.5, 0.1, 0.5, 0.3, 0.5, 0.1, 0.5, 0.1, 0.4, 0.1, 0.1, 0.2, 0.4]
    found = rows(14, **{"reward/mean": lambda step: scattered[step - 1]})
    assert "fallen" not in alarms(found)
    steady = rows(14, **{"reward/mean": lambda step: 0.3 if step < 12 else 0.13})
    assert alarms(steady)["fallen"].step == 13


def test_negative_rewards_fall_too():
    found = rows(14, **{"reward/mean": lambda step: -0.2 if step < 12 else -0.9})
    assert alarms(found)["fallen"].step == 12


def test_a_best_reward_of_0_has_its_spread_as_the_scale():
    """Penalties alone: one answer in a hundred that gets -1 is no fall, half of them are."""
    for share, fell in ((0.01, False), (0.5, True)):
        spread = (share - share**2) ** 0.5
        found = rows(
            16, **{"reward/mean": after(11, 0.0, -share), "reward/std": after(11, 0.0, spread)}
        )
        assert ("fallen" in alarms(found)) is fell


def test_a_held_out_result_counts_with_its_standard_error_and_pass_at_k_does_not():
    row = {
        "step": 1,
        "eval/policy_version": 0,
        "eval/a/mean@4": 0.5,
        "eval/a/stderr_mean@4": 0.01,
        "eval/a/pass@4": 0.9,
        "eval/a/stderr_pass@4": 0.01,
        "eval/a/greedy": 0.4,
        "eval/a/stderr_greedy": 0.02,
        "eval/a/sampled_reward": 0.6,
        "eval/a@fp8/mean@4": 0.5,
        "eval/a@fp8/stderr_mean@4": 0.01,
    }
    assert set(held_out(row)) == {"eval/a/mean@4"}  # a reward without an error says nothing
    greedy = {n: v for n, v in row.items() if "mean@4" not in n}
    assert set(held_out(greedy)) == {"eval/a/greedy"}
    past = Past()
    past.add(row)
    past.add({**row, "step": 2, "eval/policy_version": 5, "eval/a/mean@4": 0.3})
    assert past.first["eval/a/mean@4"].value == 0.5
    assert past.last["eval/a/mean@4"].version == 5


def test_held_out_results_within_two_standard_errors_are_no_alarm():
    near = rows(11, **{"eval/digits/mean@1": lambda step: 0.5 if step == 1 else 0.45})
    far = rows(11, **{"eval/digits/mean@1": lambda step: 0.5 if step == 1 else 0.44})
    assert "heldout" not in alarms(near)
    assert alarms(far)["heldout"].step == 6


def test_advantages_that_compare_no_groups_learn_from_groups_of_equal_rewards():
    found = rows(8, **{"reward/equal_share": 1.0})
    assert "no_signal" in alarms(found)
    assert alarms(found, Course(staleness_bound=8, compares_groups=False)) == {}


def test_steps_that_the_bound_holds_now_and_then_are_no_missing_signal():
    """A few in a row are its way; a run of which it leaves nothing is not called healthy."""

    def judged(held):
        scale = {"step_bound/scale": lambda step: 0.0 if held(step) else 0.4}
        found = rows(40, lr=lambda step: 0.0 if held(step) else 2e-5, **scale)
        return alarms(found).get("no_signal")

    assert judged(lambda step: step % 20 > 11) is None
    alarm = judged(lambda step: step > 3)
    assert alarm.step == 23 and "step_bound/scale is 0 in the mean" in alarm.text
    assert "learner.step_bound leaves nothing" in alarm.text and "samples/" not in alarm.text


def test_a_critic_that_learns_alone_is_no_missing_signal():
    found = rows(40, **{name: lambda step: 0.3 * (step > 6) for name in ("grad_norm", "lr")})
    assert "no_signal" in alarms(found)
    assert alarms(found, Course(staleness_bound=8, waits=6)) == {}
