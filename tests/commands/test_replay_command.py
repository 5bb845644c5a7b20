"""`rlcore replay`: a recorded step again, to the bit, and with another correction."""

import json
import shutil

import pytest
from conftest import rows
from tiny_mixture import tiny_mixture

from rlcore.cli import main

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
    gradient = found["gradient"]
    assert 0 < gradient["cosine"] < 1
    assert gradient["norm"] == pytest.approx(figures["changed"], rel=1e-4)
    assert gradient["executed_norm"] == pytest.approx(figures["again"], rel=1e-4)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("step=99", "has no such step; its last is 8"),
        ("step=7 learner.lr=1e-5", "learner differs from the run's"),
        ("step=7 schedule=async", "schedule differs from the run's"),
        ("step=7 algorithm.dynamic_sampling=true", "decides which samples a batch has"),
    ],
)
def test_what_cannot_be_executed_again_is_refused(run_dir, capsys, words, sentence):
    assert main(["replay", f"run_dir={run_dir}", *words.split()]) == 2
    assert sentence in capsys.readouterr().err


def test_a_damaged_recording_costs_its_steps_and_is_named(run_dir, command, tmp_path):
    copy = shutil.copytree(run_dir, tmp_path / "copy")
    file = copy / "recorder" / "step_000005" / "policy-0.bin"
    file.write_bytes(file.read_bytes()[:-1])
    again = command("replay", f"run_dir={copy}", "step=7")
    assert again.wait() == 2
    assert "step_000005/policy-0.bin cannot be read: its records do not match" in again.text


def test_a_step_without_its_batches_is_refused(run_dir, tmp_path, capsys):
    copy = shutil.copytree(run_dir, tmp_path / "copy", ignore=shutil.ignore_patterns("step_000005"))
    assert main(["replay", f"run_dir={copy}", "step=7"]) == 2
    assert "is not recorded" in capsys.readouterr().err


KINDS = {
    "two ranks, ZeRO-3": ("learner.ranks=2", "learner.zero_stage=3", "correction=[centre,tis]"),
    "ZeRO-0": ("learner.zero_stage=0",),
    "two ranks, ZeRO-1": ("learner.ranks=2", "learner.zero_stage=1"),
    "two ranks, ZeRO-2": ("learner.ranks=2", "learner.zero_stage=2"),
    "episodes of several turns": ("environment=attempts",),
    "LoRA": ("learner=lora", "learner.lora.rank=4", "learner.dtype=float32"),
    "two tasks": (
        *("task=[digits,arithmetic]", "task.digits.args.credit=digits"),
        *("task.digits.args.min_digits=2", "task.digits.args.max_digits=3"),
    ),
    "Jackpot, micro-batches": ("correction=[jackpot]", "learner.micro_batch_tokens=256"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_learner_executes_a_step_again(command, small, tmp_path, kind):
    own = [w for w in small if not (kind == "two tasks" and w.startswith("task.args"))]
    words = (*own, *KINDS[kind], "schedule=on_policy", "checkpoint.every=2")
    run = command("train", *words, f"run_dir={tmp_path}/run", "schedule.steps=4")
    assert run.wait() == 0, run.text[-3000:]
    found = replayed(command, tmp_path / "run", "step=4")
    assert found["differing"] == []
    assert found["figures"]["grad_norm"]["again"] > 0


@pytest.mark.slow
def test_a_mixture_of_experts_executes_a_step_again(command, tmp_path):
    tiny_mixture(tmp_path / "mixture", "0123456789+=", seed=3)
    (tmp_path / "mine.py").write_text(
        "def grade(item, response):\n    return min(1.0, response.count('1') / 4)\n"
    )
    data = [json.dumps({"question": f"{i}+{i}=", "answer": str(2 * i)}) for i in range(64)]
    (tmp_path / "rows.jsonl").write_text("\n".join(data))
    run = command(
        *("train", "experiment=quickstart", "model=path", f"model.path={tmp_path / 'mixture'}"),
        *("model.max_len=64", "task=file", f"task.args.train_path={tmp_path / 'rows.jsonl'}"),
        *(f"task.args.grader={tmp_path / 'mine.py'}:grade", "schedule=on_policy"),
        *("schedule.steps=3", "schedule.groups_per_step=8", "rollout.samples_per_prompt=4"),
        *("rollout.max_new_tokens=12", "learner.lr=3e-3", "learner.router_replay=true"),
        *("cluster.object_store_mib=128", "evaluation.every=0", "evaluation.at_start=false"),
        *("logging=quiet", f"run_dir={tmp_path}/run"),
    )
    assert run.wait() == 0, run.text[-3000:]
    found = replayed(command, tmp_path / "run", "step=3")
    assert found["differing"] == []
    assert found["figures"]["grad_norm"]["again"] > 1e-3


@pytest.mark.slow
def test_a_killed_run_executes_steps_from_before_and_after_the_kill_again(command, small, tmp_path):
    """It is killed, and replayed, in the middle of phases."""
    words = (*small, "schedule=large_batch", "schedule.steps_per_publish=4", "schedule.steps=16")
    words = (*words, "checkpoint.every=3", "checkpoint.keep=9", "logging.recorder.steps=16")
    run = command("train", *words, f"run_dir={tmp_path}/run")
    run.wait_for(lambda: len(rows(tmp_path / "run")) >= 5, what="five steps")
    run.kill()
    run.wait()
    resumed = command("train", f"run_dir={tmp_path}/run", "resume=auto")
    assert resumed.wait() == 0, resumed.text[-3000:]
    (line,) = (t for t in resumed.text.splitlines() if "continuing from step_" in t)
    at = int(line.partition("continuing from step_")[2][:6])
    assert at in (3, 6, 9, 12)
    for step in (2, at, at + 2, 16):  # from the start, and from checkpoints inside of phases
        found = replayed(command, tmp_path / "run", f"step={step}")
        assert found["differing"] == [], (at, step)
        assert found["figures"]["grad_norm"]["again"] > 0
