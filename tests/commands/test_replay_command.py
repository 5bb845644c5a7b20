"""`rlcore replay`: a recorded step again, to the bit, and with another correction."""

import json

import pytest
from conftest import rows

pytestmark = [pytest.mark.engine, pytest.mark.ranks]


@pytest.fixture(scope="module")
def run_dir(finished, small, tmp_path_factory):
    """A run in phases of two batches, each trained on twice."""
    folder = tmp_path_factory.mktemp("recorded") / "run"
    words = (*small, "schedule=large_batch", "schedule.steps_per_phase=2", "schedule.epochs=2")
    finished("train", *words, f"run_dir={folder}", "schedule.steps=8", "checkpoint.every=4")
    return folder


def replayed(command, run_dir, *words):
    again = command("replay", f"run_dir={run_dir}", "json=true", *words)
    assert again.wait() == 0, again.text[-3000:]
    text = again.text
    return json.loads(text[text.index("\n{\n") if "\n{\n" in text else text.index("{\n") :])


def test_a_step_is_executed_again_to_the_bit(command, run_dir):
    found = replayed(command, run_dir, "step=7")  # the third of a phase: batches again, old p_ref
    assert found["differing"] == []
    (row,) = (r for r in rows(run_dir) if r["step"] == 7)
    assert found["figures"]["grad_norm"]["again"] == row["grad_norm"]
    assert len(found["figures"]) > 20
    tokens = found["tokens"]
    assert len(tokens) == 20 and tokens[0]["share"] >= tokens[-1]["share"] > 0
    assert all(t["text"] for t in tokens), tokens


def test_another_correction_is_compared_with_the_executed_one(command, run_dir):
    found = replayed(command, run_dir, "step=7", "correction=[mis]", "correction.mis.low=0.999")
    assert found["differing"] == []
    figures = found["figures"]["grad_norm"]
    assert figures["changed"] < figures["again"]
    assert 0 < found["cosine"] < 1
