"""Which correction fits a measured mismatch."""

import pytest

from rlcore.advisor.doctor import (
    Probe,
    Token,
    advise,
    diagnosis,
    lines,
    shortened,
    uncontrolled,
    worst_tokens,
)
from rlcore.config.compose import load

ROUNDING = {"abs_dlogp_mean": 1e-6, "abs_dlogp_max": 1e-5, "ess": 1.0, "acceptance": 1.0}
NOISY = {
    "abs_dlogp_mean": 0.05,
    "abs_dlogp_max": 1.5,
    "ess": 0.98,
    "acceptance": 0.97,
    "truncated_share": 0.001,
    "masked_share": 0.002,
}
LARGE = {"n_star": 900.0, "variance_added": 1.0, "fixed_share": 1.0}
UNSEEN = {"bias2": -0.1, "variance_added": 1.0}
FLOOR = {"floor_tokens": 3.0, "tail_slope": 0.05, "floor_level": 1e-5}
HEAVY = NOISY | {"masked_share": 0.03, "ess": 0.9}


def row(figures, **others):
    found = {f"mismatch/{name}": value for name, value in (figures | others).items()}
    return found | {"response_length/mean": 8.0, "mismatch/acceptance@fp8": 0.1}


@pytest.mark.parametrize(
    "figures, stale, answers, use",
    [
        (ROUNDING, 0, 128, ()),
        (ROUNDING, 4, 128, ("tis",)),
        (NOISY, 0, 128, ("tis",)),
        (NOISY, 0, 16, ()),  # below N*, where weights add more variance than they remove bias
        (NOISY, 1, 16, ("tis",)),
        (NOISY | LARGE, 0, 512, ()),  # whether the error repeats in one context decides nothing
        (NOISY | LARGE, 0, 1024, ("tis",)),
        (NOISY | UNSEEN, 0, 10**6, ()),  # no bias was seen: correcting pays in no batch
        (HEAVY, 4, 128, ("tis",)),  # masks lose direction
        (HEAVY | {"acceptance": 0.6}, 0, 128, ("tis",)),
        (HEAVY | {"unlikely_share": 0.01, "floor_tokens": 0.3}, 0, 128, ("tis",)),
        (HEAVY | {"unlikely_share": 0.05} | FLOOR, 0, 128, ("dvp",)),
        (HEAVY | FLOOR, 1, 128, ("dvp", "tis")),
        (HEAVY | FLOOR | {"floor_tokens": 1.1}, 0, 128, ("tis",)),  # too few to pay
        # of INT4, stale, sparse and long answers the errors alone count as many
        (HEAVY | FLOOR | {"tail_slope": 1.0, "floor_tokens": 90.0}, 0, 128, ("tis",)),
        (HEAVY | {"floor_tokens": 90.0}, 0, 128, ("tis",)),  # fewer than 40 such tokens
    ],
)
def test_what_is_measured_decides(figures, stale, answers, use):
    found = advise(row(figures), stale=stale, answers=answers)
    assert found.use == use
    assert found.because and not set(found.use) & set(found.without)


def test_what_is_advised_is_a_configuration_that_is_accepted():
    for figures in (NOISY, HEAVY | FLOOR | {"unlikely_share": 0.05}):
        advice = advise(row(figures), stale=0, answers=128)
        words = [f"correction=[{','.join(advice.use)}]", *advice.settings]
        chosen = load(["run_dir=x", *words]).correction.chosen()
        assert chosen and ("dvp" not in chosen or chosen["dvp"].rho == pytest.approx(1.5e-4))


def test_what_is_unnecessary_is_said_with_its_figure():
    without = advise(row(ROUNDING), stale=0, answers=128).without
    assert {"tis", "mis", "icepop", "veto", "dvp", "jackpot"} == set(without)
    assert "mis" not in advise(row(NOISY), stale=0, answers=128).without
    low = advise(row(HEAVY, ess=0.3), stale=0, answers=128).because
    assert any("few effective samples (ess 0.3)" in said for said in low)


FAR = NOISY | {"agreement_p5": 0.45}
SPARSE = ("actor=[sparse]", "correction=[tis]")
SET_POINT = "actor.sparse.target={moves: pages}"


def test_sparse_actors_far_from_the_policy_are_to_be_changed():
    for found in (row(FAR), row(FAR | {"agreement_p5": 0.9, "agreement_p5@sparse": 0.45})):
        advised = advise(found, stale=0, answers=128, sparse=("sparse",))
        assert any("far from the policy (sparse_agreement_p5 0.45)" in s for s in advised.because)
    for near in (
        advise(row(NOISY, agreement_p5=0.7), stale=0, answers=128, sparse=("sparse",)),
        advise(row(FAR), stale=0, answers=128),
        # no token of the sparse actors in this step: the pooled figure is that of others
        advise(row(FAR | {"agreement_p5@bf16": 0.45}), stale=0, answers=128, sparse=("sparse",)),
    ):
        assert not any("far from the policy" in said for said in near.because)


def test_sparse_actors_with_a_set_point_or_adapters_are_near_by_themselves():
    assert uncontrolled(load(["run_dir=x", *SPARSE])) == ("sparse",)
    assert uncontrolled(load(["run_dir=x", *SPARSE, "learner.distill={}"])) == ()
    age = ("schedule=async", "schedule.max_staleness=4", "actor.sparse.target={moves: staleness}")
    assert uncontrolled(load(["run_dir=x", *SPARSE, *age])) == ("sparse",)
    pages = "actor.sparse.sparse={blocks: null, blocks_by_length: [2, 2], length_step: 64}"
    assert uncontrolled(load(["run_dir=x", *SPARSE, pages, SET_POINT])) == ()


def test_a_diagnosis_in_words_and_in_data():
    config = load(["run_dir=x", "correction=[mis]", "schedule=async"])
    figures = row(NOISY) | {"train/tokens": 384.0}
    worst = [Token("digits/train/3", "80=", "7", 0.6931472, "bf16-0")]
    shown = diagnosis(config, Probe(12.3, row=figures, worst=worst), ())
    assert shown["starts"] and shown["advice"]["use"] == ("tis",)
    assert shown["mismatch"]["ess"] == 0.98 and shown["mismatch"]["n_star"] == pytest.approx(90)
    assert shown["worst_tokens"][0]["text"] == "7"
    text = "\n".join(lines(shown))
    assert "384 fresh tokens" in text and "advice: correction=tis\n" in text
    assert "2  '80=' '7'  bf16-0 digits/train/3" in text
    assert "correction=[mis] lacks tis." in text
    assert "up to 1 steps old" in text and "rates=FILE or gpu=NAME" in text


def test_a_run_that_does_not_start_says_why():
    config = load(["run_dir=x"])
    shown = diagnosis(config, Probe(3.0, "no room for an engine"), ())
    assert not shown["starts"] and "mismatch" not in shown
    assert lines(shown) == [
        "FAIL  a run of this configuration did not take a step: no room for an engine"
    ]


def test_the_step_is_synchronous_small_and_uncorrected():
    config = load(["run_dir=x", "experiment=dvp_mis_veto"])
    short = shortened(config, "elsewhere")
    assert short.schedule.synchronous and short.schedule.steps == 1
    assert not short.correction.chosen() and short.run_dir == "elsewhere"
    assert short.rollout.samples_per_prompt == 2 and short.actor == config.actor


def test_the_worst_tokens_stand_with_the_text_before_them():
    sample = {
        "prompt_id": "a/train/1",
        "prompt": "12=",
        "actor": "bf16-0",
        "pieces": [["3", "4"], ["5"]],
        "log_ratio": [0.1, None, -2.0],
        "turns": [{"observed": ""}, {"observed": "<"}],
    }
    found = worst_tokens([sample, {**sample, "log_ratio": [0.5]}], count=2)
    assert [(t.before, t.text, t.log_ratio) for t in found] == [
        ("12=34<", "5", -2.0),
        ("12=", "3", 0.5),
    ]
