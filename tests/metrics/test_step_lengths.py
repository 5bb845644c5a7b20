"""How long steps may be, by recorded runs, and what is said while the step bound shortens them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_rows import recorded, rows

from rlcore.corrections.step_bound import AGES, Drift, StepBound
from rlcore.metrics.health import Health
from rlcore.metrics.logger import open_logger
from rlcore.metrics.rules.base import Course
from rlcore.metrics.specs import LoggingSpec, WarningsSpec
from rlcore.metrics.step_lengths import EVERY, ShortSteps, StepLengths, kappas, step_lengths

LATE = ["async", "fp8", "fp8 tis", "lag 2", "object store", "vcpo", "async at 1e-5"]


def warmed(run):
    """Rows of a recorded run on a GPU with the warm-up that it had: they are recorded with the rate
    from then on."""
    return [{**row, "lr": row["lr"] * min(1.0, row["step"] / 3)} for row in recorded()[run]]


@pytest.mark.parametrize("run", LATE)
def test_the_rate_for_samples_of_two_steps_is_the_one_that_learned(run):
    # 5e-5 lost all but one of these runs, which was of 1e-5; they had samples of about two steps
    found = step_lengths(warmed(run))
    assert 7.5e-6 <= found.rate(2) <= 1.1e-5
    assert found.rate(8) <= 4e-6 < found.rate(2) and found.staleness(5e-5) == 0


@pytest.mark.parametrize("run", ["async", "fp8", "lag 2", "object store"])
def test_five_rows_of_a_run_that_is_lost_say_what_all_of_them_do(run):
    assert step_lengths(warmed(run)[:3]) == step_lengths(warmed(run))


def test_fresh_samples_have_no_measure():
    assert step_lengths(recorded()["on policy"]) is None and step_lengths([]) is None


def bounded(kappa, lr, lag, steps=40):
    """Rows of a rule against answers that lie kappa l^2 nats apart, and the same without its
    columns."""
    rule, taken, found = StepBound(0.5), [], []
    for now in range(steps):
        age = min(now, lag)
        each = kappa * sum(taken[now - age :]) ** 2 / 10
        tokens, kl = [0.0] * AGES, [0.0] * AGES
        tokens[age], kl[age] = 100.0, 100.0 * each
        scale, metrics = rule.scale(now, lr, Drift([tokens], [kl], [100.0], [10.0]))
        rule.took(now, scale * lr)
        taken.append(scale * lr)
        found.append(
            {
                "step": now + 1,
                "lr": taken[-1],
                "mismatch/kl_k3": each,
                "response_length/mean": 10.0,
                "staleness/mean": float(age),
                "staleness/max": float(age),
                "mismatch/ess": 0.9,
                **{f"step_bound/{name}": value for name, value in metrics.items()},
            }
        )
    plain = [{n: v for n, v in row.items() if not n.startswith("step_bound/")} for row in found]
    return found, plain


@given(kappa=st.floats(1e6, 1e10), lr=st.sampled_from([1e-5, 1e-4]), lag=st.sampled_from([1, 2, 4]))
def test_rows_with_and_without_the_columns_of_the_rule_say_the_same(kappa, lr, lag):
    found, plain = bounded(kappa, lr, lag)
    assert step_lengths(found).kappa == pytest.approx(kappa, rel=1e-6)
    # a plain row further than two nats ends what is known; the first one never does
    assert step_lengths(plain).kappa == pytest.approx(kappa, rel=1e-6)


def test_what_is_proposed_needs_no_bound():
    lr, lag = 1e-4, 4
    found, _ = bounded(1e9, lr, lag)
    assert min(row["step_bound/scale"] for row in found) < 0.5
    rate = step_lengths(found).rate(lag)
    calm, _ = bounded(1e9, rate, lag)
    assert {row["step_bound/scale"] for row in calm} == {1.0}


def test_mixed_ages_count_as_the_two_next_to_their_mean():
    lr = 1e-4
    row = {"step": 3, "staleness/mean": 1.5, "staleness/max": 2.0, "lr": lr}
    row |= {"mismatch/kl_k3": 0.01, "response_length/mean": 10.0}
    before = [{"step": s, "lr": lr, "staleness/max": 0.0, "mismatch/kl_k3": 0.0} for s in (1, 2)]
    assert kappas([*before, row])[3] == pytest.approx(0.1 / (0.5 * lr**2 + 0.5 * (2 * lr) ** 2))


def test_rates_and_ages_are_each_others():
    lengths = StepLengths(kappa=0.5 / 9e-5**2, bound=0.5)
    assert [lengths.rate(age) for age in (0, 2, 8)] == [9e-5, 3e-5, 1e-5]
    assert [lengths.staleness(rate) for rate in (9e-5, 3e-5, 1e-5, 1e-3)] == [0, 2, 8, 0]
    # never above what fits
    assert StepLengths(kappa=0.5 / 1.79e-4**2, bound=0.5).rate(0) == 1.7e-4


def test_short_steps_are_told_once_and_then_by_their_share():
    found, _ = bounded(1e9, 1e-4, 4, steps=250)
    told = ShortSteps(Course(staleness_bound=4, lr=1e-4))
    said = {row["step"]: text for row in found if (text := told.add(row))}
    first = min(row["step"] for row in found if row["step_bound/scale"] < 0.5)
    assert list(said) == [first, first + EVERY, first + 2 * EVERY]
    # before there is a measure no setting follows from a short step
    bare = {"step": 1, "step_bound/scale": 0.2, "step_bound/kappa": 0.0, "step_bound/bound": 0.5}
    assert ShortSteps(Course(staleness_bound=4, lr=1e-4)).add(bare) is None
    rate = step_lengths(found).rate(4)
    assert f"learner.lr={rate:g}" in said[first] and "learner.step_bound=0.5" in said[first]
    assert "max_staleness" not in said[first]  # no late samples at all would fit this rate
    assert f"of {EVERY} steps" in said[first + EVERY]


def test_fresher_samples_are_the_other_remedy():
    kappa = 0.5 / (3.2e-4) ** 2
    row = {"step": 9, "staleness/mean": 6.0, "step_bound/scale": 0.4, "step_bound/bound": 0.5}
    row |= {"step_bound/kappa": kappa, "step_bound/answer_kl": 1.0}
    said = ShortSteps(Course(staleness_bound=8, lr=1e-4)).add(row)
    assert "learner.lr=3.5e-05" in said and "samples at most 2 steps old" in said
    turns = ShortSteps(Course(staleness_bound=8, lr=1e-4, takes_turns=True)).add(row)
    assert "samples at most" not in turns


def test_a_run_says_it_on_its_console_and_in_its_log_and_not_again_when_resumed(tmp_path, capsys):
    found, _ = bounded(1e9, 1e-4, 4, steps=12)
    quiet = LoggingSpec(console="plain", wandb="disabled", report=False)

    def logged(part, after=None):
        health = Health(WarningsSpec(), Course(staleness_bound=4, lr=1e-4))
        with open_logger(tmp_path, quiet, config={}, total_steps=12, health=health) as logger:
            if after is not None:
                logger.resume_at(after)
            for row in part:
                logger.log(row)

    logged(found[:6])
    logged(found[6:], after=6)
    entries = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    [entry] = [e for e in entries if e["event"] == "step_bound"]
    assert entry["level"] == "info" and f"step {entry['step']}: the samples are" in entry["text"]
    assert capsys.readouterr().out.count("the samples are") == 1


def test_an_alarm_names_the_bound_where_there_is_none():
    far = rows(12, **{"mismatch/kl_k3": lambda step: 0.3 if step in (5, 7) else 0.001})
    for bound in (False, True):
        health = Health(WarningsSpec(), Course(staleness_bound=8))
        health.resume([{**r, **({"step_bound/scale": 1.0} if bound else {})} for r in far])
        [alarm] = [a for a in health.alarms if a.rule == "answer_kl"]
        assert ("learner.step_bound=0.5" in alarm.text) is not bound
