"""The share of a step that its matrix products need."""

import pytest

from rlcore.metrics.limit import limit_s, limit_share, sentence
from rlcore.metrics.run_folder import Run
from rlcore.report.page import described

# 1e9 parameters on 200 GFLOP/s, groups of 8
FACTS = {"gflops": 200.0, "pass_gflop": 2.0, "trained_gflop": 6.0, "samples": 8}


def row(step_s=10.0, tokens=80, positions=160, **more):
    counts = {"train/tokens": tokens, "train/sequence_positions": positions}
    return {**counts, "time/step_s": step_s, **more}


def test_engines_sample_and_read_each_prompt_once_and_the_learner_computes_all():
    # 80 sampled and 10 prompt positions at 2, 160 trained at 6
    assert limit_s(FACTS, row()) == pytest.approx((90 * 2 + 160 * 6) / 200)
    apart = limit_s(FACTS, row(**{"time/learner_ref_s": 1.0}))  # p_ref has a pass of its own
    assert apart == pytest.approx((90 * 2 + 160 * 8) / 200)
    assert limit_s(FACTS, {"time/step_s": 1.0}) is None


def test_the_share_is_of_the_steps_between_the_first_and_the_last():
    rows = [row(1e6)] * 3 + [row(10.0), row(30.0)] + [row(1e6)]
    share = limit_share({"limit": FACTS}, rows)
    assert share == pytest.approx(2 * 5.7 / 40)
    assert sentence(share).startswith("limit / step 0.29: ")
    rows[3] = {"step": 4}  # evaluations alone
    assert limit_share({"limit": FACTS}, rows) == pytest.approx(5.7 / 30)


@pytest.mark.parametrize("about", [{}, {"limit": None}, {"limit": FACTS}])
def test_nothing_is_said_where_it_is_unknown(about):
    assert limit_share(about, [row()] * 4) == 0.0 and sentence(0.0) == ""


def test_the_report_says_it_of_a_run(tmp_path):
    rows = [{"step": i + 1, **row()} for i in range(6)]
    said = described(Run("a", tmp_path, rows, "", about={"limit": FACTS}))["speed"]
    assert said.startswith("limit / step 0.57: ")
    assert "speed" not in described(Run("a", tmp_path, rows, ""))
