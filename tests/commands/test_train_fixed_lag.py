"""A run with a fixed lag, of real actors and a real learner."""

import json

import pytest
from conftest import rows

pytestmark = [pytest.mark.engine, pytest.mark.ranks, pytest.mark.slow]


def test_every_sampled_token_of_a_run_is_exactly_so_old(command, small, tmp_path):
    """Slow: the loop is the same in tests/loop/test_fixed_lag.py."""
    run_dir = tmp_path / "run"
    words = ("schedule=fixed_lag", "schedule.lag=3", "schedule.steps=9", "actor.bf16.count=2")
    run = command("train", *small, *words, f"run_dir={run_dir}")
    assert run.wait() == 0, run.text[-3000:]
    found = rows(run_dir)
    due = [min(step, 3) for step in range(9)]
    assert [row["staleness/max"] for row in found] == due
    assert [row["staleness/mean"] for row in found] == due
    assert found[-1]["ledger/consumed"] == found[-1]["ledger/admitted"]
    for step, lag in enumerate(due, start=1):
        lines = (run_dir / f"samples/step_{step:06d}.jsonl").read_text().splitlines()
        assert lines
        for line in map(json.loads, lines):
            versions = {version for version, _ in line["token_versions"]}
            assert versions == {step - 1 - lag}
