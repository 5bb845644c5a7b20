"""Declarations of metrics: what they cover, and how steps combine."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.metrics.names import METRICS, combine, declared, is_accuracy, split_kind
from rlcore.objectives.specs import LOSSES
from rlcore.registry import resolve

CONTRACT = """step policy_version reward/mean eval/digits/greedy response_length/mean
staleness/mean staleness/max mismatch/kl_k1 mismatch/kl_k3 mismatch/abs_dlogp_mean mismatch/ess
correction/tis/truncated_share loss/policy grad_norm entropy time/step_s time/wait_data_s
time/publish_s throughput/rollout_tokens_per_s throughput/train_tokens_per_s buffer/groups
ledger/consumed"""


def test_the_outside_contract_is_declared_with_unit_and_meaning():
    assert [name for name in CONTRACT.split() if declared(name) is None] == []
    assert all(m.unit and m.meaning for m in METRICS)
    assert len({m.name for m in METRICS}) == len(METRICS)


def test_only_names_that_users_choose_are_left_open():
    """A further figure of a package is declared by name, so that no other one passes for it."""
    last = [m.name for m in METRICS if m.name.rpartition("/")[2].startswith("<")]
    assert last == [
        "reward_parts/<part>",
        "task/<task>/reward_parts/<part>",
        "correction/<name>/<statistic>",
        "ledger/evicted/<reason>",
        "ledger/failed/<reason>",
    ]
    others = ["policy/largest_weight", "train/x", "time/x_s", "buffer/x", "eval/digits/x"]
    assert [declared(name) for name in others] == [None] * len(others)


def test_the_names_of_a_run_and_of_every_loss_are_declared():
    rows = (Path(__file__).parent / "recorded_run" / "metrics.jsonl").read_text().splitlines()
    names = {name for row in rows for name in json.loads(row)}
    for loss in LOSSES:
        names |= {
            f"policy/{name}" for name in resolve(LOSSES, loss, key="algorithm.loss").indicators
        }
    assert sorted(name for name in names if declared(name) is None) == []


def test_a_name_is_matched_segment_by_segment():
    others = ["reward/meanness", "xreward/mean", "reward", "eval/a/b/c", "eval/digits/", "loss"]
    assert [declared(name) for name in others] == [None] * len(others)
    assert declared("eval/digits/mean@8").name == "eval/<task>/mean@<k>"
    assert (
        declared("mismatch/ess").name == "mismatch/ess"
    )  # its own declaration before the family's


def test_metrics_of_samples_exist_by_kind_of_actors():
    assert declared("mismatch/ess@fp8").name == "mismatch/ess"
    assert declared("correction/mis/masked_share@fp8").name == "correction/<name>/masked_share"
    assert split_kind("reward_parts/correct@fp8") == ("reward_parts/correct", "fp8")
    assert split_kind("eval/digits/mean@8") == ("eval/digits/mean@8", "")
    others = ["time/step_s@fp8", "mismatch/ess@", "mismatch/nothing@fp8", "loss/policy@fp8"]
    assert [declared(name) for name in others] == [None] * len(others)


def test_no_declaration_hides_another():
    assert [m.name for m in METRICS if declared(re.sub("<.*?>", "x", m.name)) is not m] == []


def test_accuracies_are_told_from_other_evaluation_results():
    names = [
        "eval/a/greedy",
        "eval/a/pass@4",
        "eval/a@sparse/majority@4",
        "eval/a/stderr_pass@4",
        "eval/a/greedy_failed_share",
        "eval/a/greedy_length",
        "eval/a/greedy_reward",
        "eval/policy_version",
    ]
    assert [n for n in names if is_accuracy(n)] == names[:3]


def test_steps_combine_as_declared():
    rows = [
        {
            "step": 1,
            "time/step_s": 1.0,
            "staleness/max": 3,
            "reward/mean": 0.2,
            "ledger/consumed": 4,
            "entropy": None,
        },
        {
            "step": 2,
            "time/step_s": 2.0,
            "staleness/max": 1,
            "reward/mean": 0.4,
            "ledger/consumed": 8,
            "entropy": 0.5,
        },
    ]
    assert combine(rows) == {
        "step": 2,
        "time/step_s": 3.0,
        "staleness/max": 3,
        "reward/mean": pytest.approx(0.3),
        "ledger/consumed": 8,
        "entropy": 0.5,
    }
    with pytest.raises(ValueError, match="no/such"):
        combine([{"no/such": 1.0}])


@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20))
def test_combining_one_metric_stays_within_its_values(values):
    combined = combine([{"reward/mean": v, "staleness/max": v} for v in values])
    assert min(values) - 1e-6 <= combined["reward/mean"] <= max(values) + 1e-6
    assert combined["staleness/max"] == max(values)
