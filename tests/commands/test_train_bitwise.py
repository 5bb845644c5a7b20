"""Whole runs whose actors and learner agree to the bit."""

import pytest
from conftest import rows
from equal_bits import skip_where_they_differ

pytestmark = [pytest.mark.engine, pytest.mark.ranks]
WORDS = ("bitwise=true", "schedule=on_policy", "correction=none")
INT3 = ("actor=fp8", "actor.fp8.rounding=int3", "learner.round_as=fp8")


def _exact(command, run_dir, *words):
    skip_where_they_differ()
    run = command("train", *words, f"run_dir={run_dir}")
    assert run.wait() == 0, run.text[-3000:]
    found = rows(run_dir)
    for row in found:
        assert row["mismatch/abs_dlogp_mean"] == row["mismatch/kl_k3"] == 0.0, row["step"]
        assert row["mismatch/ess"] == 1.0
    return found


@pytest.mark.parametrize("precision", [(), INT3], ids=["float32", "int3"])
def test_log_probs_of_a_run_are_equal_to_the_bit(command, small, tmp_path, precision):
    """Several steps a publication: p_ref is of the published weights."""
    more = ("schedule.steps=4", "schedule.steps_per_publish=2", "learner.micro_batch_tokens=300")
    found = _exact(command, tmp_path / "run", *small, *WORDS, *precision, *more)
    assert len(found) == 4 and found[0]["train/tokens"] > 50


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_log_probs_stay_equal_over_two_hundred_steps(command, small, tmp_path):
    more = ("schedule.steps=200", "evaluation.every=0", "checkpoint.every_s=3600")
    found = _exact(command, tmp_path / "run", *small, *WORDS, *more)
    assert len(found) == 200
