"""Whole runs by schedule: phases, a fixed lag, turns on a GPU, bounded steps."""

import json
import signal

import pytest
from conftest import rows, without_times
from equal_bits import differ

PHASES = (
    "schedule.steps_per_phase=2",
    "schedule.epochs=2",
    "evaluation.every=0",
    "evaluation.at_start=false",
    # steps long enough for a ratio to leave the clip
    "learner.lr=1e-3",
    "learner.lr_warmup_steps=0",
    "algorithm.eps_low=0.05",
    "algorithm.eps_high=0.05",
)


def clipped(row):
    return row["policy/clip_low_share"] + row["policy/clip_high_share"]


def audit(found):
    """Every group was used twice, within the staleness bound, and clipped in its second epoch."""
    assert [row["step"] for row in found] == list(range(1, len(found) + 1))
    last = found[-1]
    assert last["ledger/consumed"] == len(found) // 2 * 8 == last["ledger/admitted"]
    assert max(row["staleness/max"] for row in found) <= 4 - 1 + 2
    for row in found:
        first = (row["step"] - 1) % 4 == 0
        assert (row["policy/ratio"] == pytest.approx(1.0, abs=1e-6)) == first, row["step"]
        assert not first or clipped(row) == 0.0
    assert max(map(clipped, found)) > 0.0


@pytest.mark.engine
@pytest.mark.ranks
@pytest.mark.slow
def test_an_asynchronous_run_uses_every_group_twice(command, small, tmp_path):
    run_dir = tmp_path / "run"
    words = (*small, *PHASES, "schedule.max_staleness=2", "schedule.steps=12")
    run = command("train", *words, f"run_dir={run_dir}")
    assert run.wait() == 0, run.text[-3000:]
    audit(rows(run_dir))
    assert "never binds" not in run.text


@pytest.mark.engine
@pytest.mark.ranks
@pytest.mark.slow
def test_an_asynchronous_run_stopped_within_a_phase_uses_every_group_twice(
    command, small, tmp_path
):
    words = ("train", *small, *PHASES, "schedule.max_staleness=2")
    for attempt in range(3):
        run_dir = tmp_path / f"run{attempt}"
        run = command(*words, f"run_dir={run_dir}", "schedule.steps=10000")
        run.wait_for(lambda at=run_dir: len(rows(at)) >= 5, what="five steps", every_s=0.02)
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130, run.text[-3000:]
        done = len(rows(run_dir))
        if done % 4:
            break
    assert done % 4, "no stop came within a phase"
    assert rows(run_dir)[-1]["ledger/consumed"] == 8 * (2 * (done // 4) + max(0, done % 4 - 2))
    steps = done - done % 4 + 8
    resumed = command("train", f"run_dir={run_dir}", "resume=auto", f"schedule.steps={steps}")
    assert resumed.wait() == 0, resumed.text[-3000:]
    assert len(rows(run_dir)) == steps
    audit(rows(run_dir))


@pytest.mark.engine
@pytest.mark.ranks
@pytest.mark.slow
def test_a_synchronous_run_continues_within_a_phase_to_the_bit(command, small, tmp_path):
    words = ("train", *small, "schedule=on_policy", "schedule.on_publish=finish", *PHASES)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    first = command(*words, f"run_dir={whole}", "schedule.steps=8")
    assert first.wait() == 0, first.text[-3000:]
    second = command(*words, f"run_dir={parts}", "schedule.steps=5")
    assert second.wait() == 0, second.text[-3000:]
    third = command("train", f"run_dir={parts}", "resume=auto", "schedule.steps=8")
    assert third.wait() == 0, third.text[-3000:]
    # the last row of the stopped run reports its final publish and evaluation too
    resumed, uninterrupted = (
        [without_times(row) for i, row in enumerate(rows(run_dir)) if i != 4]
        for run_dir in (parts, whole)
    )
    assert resumed == uninterrupted
    assert [row["staleness/max"] for row in rows(whole)] == [0, 1, 2, 3] * 2
    assert all(row["grad_norm"] > 0 for row in rows(whole))


# A run with a fixed lag, of real actors and a real learner.


@pytest.mark.engine
@pytest.mark.ranks
@pytest.mark.slow
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


# Runs whose engines sleep while the learner trains (schedule.colocated): on CPUs the same code as
# on GPUs, with keys and values to free.


WORDS = ("schedule=large_batch", "schedule.steps=4", "schedule.steps_per_publish=2")
COLOCATED = (*WORDS, "schedule.colocated=true", "learner.offload_while_sampling=true")


def turns(found):
    """Steps after which engines were woken."""
    return [row["step"] for row in found if row.get("time/asleep_s", 0.0) > 0]


def learnt(row):
    """What follows from the seed alone, however weights travel and turns are taken."""
    other = ("engine/", "publish/", "colocated/", "eval/", "rollout/")
    return {k: v for k, v in without_times(row).items() if not k.startswith(other)}


@pytest.fixture
def run(command, small, tmp_path):
    def train(name, *words):
        known = () if "resume=auto" in words else small
        done = command("train", *known, *words, f"run_dir={tmp_path / name}")
        assert done.wait() == 0, done.text[-3000:]
        return rows(tmp_path / name)

    return train


@pytest.mark.engine
@pytest.mark.ranks
@pytest.mark.slow
def test_a_colocated_run_gives_the_numbers_of_one_that_is_not(run):
    apart = run("apart", *WORDS)
    together = run("together", *COLOCATED, "cluster.transport=gloo")
    assert list(map(learnt, together)) == list(map(learnt, apart))
    assert len({row["loss/policy"] for row in apart}) == 4 and apart[-1]["grad_norm"] > 0
    scores = ("eval/digits/mean@1", "eval/digits/greedy", "eval/policy_version")
    assert [together[-1][n] for n in scores] == [apart[-1][n] for n in scores]
    assert turns(together) == [2, 4] and turns(apart) == []
    freed = [row["colocated/engine_freed_gib"] for row in together if row["step"] % 2 == 1]
    assert all(gib > 0.24 for gib in freed)  # kv_cache_gib=0.25
    assert all(row["colocated/learner_freed_gib"] > 0 for row in together if row["step"] % 2 == 0)


OTHERS = {
    "two pairs, ZeRO-2": ("learner=zero2", "actor.bf16.count=2", "cluster.transport=gloo"),
    "deltas": ("cluster.full_weights_every=2",),
    "emulated FP8": ("actor=fp8",),
    "an adapter": ("learner.lora={publish: adapter}", "cluster.transport=disk"),
    "a sparse copy": ("actor=sparse", "learner.distill={}"),
    "mixed": ("actor=[bf16,fp8]",),
    "episodes": ("environment=attempts",),
}


@pytest.mark.engine
@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_a_kind_of_run_takes_turns(name, run):
    found = run("run", *COLOCATED, *OTHERS[name])
    assert [row["step"] for row in found] == [1, 2, 3, 4]
    assert turns(found) == [2, 4]


@pytest.mark.engine
@pytest.mark.ranks
@pytest.mark.slow
def test_it_goes_on_in_the_middle_of_a_phase(run):
    whole = run("whole", *COLOCATED)
    run("parts", *COLOCATED, "schedule.steps=3")
    parts = run("parts", "resume=auto", "schedule.steps=4")
    assert list(map(learnt, parts)) == list(map(learnt, whole))


# A run whose steps are bounded, killed, resumed and replayed: real actors and a real learner.


# Batches two steps old, at a rate whose steps the bound shortens.
LATE = ("schedule=fixed_lag", "schedule.lag=2", "schedule.steps=7", "checkpoint.every=1")
KEPT = ("checkpoint.keep=9", "logging.recorder.steps=9")
FAST = ("learner.lr=5e-3", "learner.lr_warmup_steps=0")


def learned(row):
    """A row without times, and without how much was asked for by then."""
    counted = ("ledger/", "buffer/")
    return {k: v for k, v in without_times(row).items() if not k.startswith(counted)}


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.ranks
def test_a_killed_run_takes_the_same_steps_and_each_can_be_replayed(command, small, tmp_path):
    """Slow: tests/learner/test_bounded_steps.py holds the state and the replay of ranks."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    words = ("train", *small, *LATE, *FAST, *KEPT)
    first = command(*words, f"run_dir={whole}")
    assert first.wait() == 0, first.text[-3000:]
    second = command(*words, f"run_dir={killed}")
    second.wait_for(lambda: len(rows(killed)) >= 3, what="three steps")
    second.kill()
    second.wait()
    third = command("train", f"run_dir={killed}", "resume=auto")
    assert third.wait() == 0, third.text[-3000:]
    assert "continuing from step_" in third.text
    # answers that were in flight are drawn again, in other batches of the engine: log-probs are as
    # equal as this machine's products are in any company
    near = 1e-3 if differ() else 0.0
    for row, again in zip(rows(whole), rows(killed), strict=True):
        assert learned(again) == pytest.approx(learned(row), rel=near, abs=near / 1e3, nan_ok=True)
    scales = [row["step_bound/scale"] for row in rows(killed)]
    assert len(scales) == 7 and min(scales[3:]) < 0.5 < sum(scales)
    step = min(range(4, 8), key=lambda n: scales[n - 1] or 1.0)  # the shortest that was taken
    again = command("replay", f"run_dir={killed}", "json=true", f"step={step}")
    assert again.wait() == 0, again.text[-3000:]
    text = again.text
    found = json.loads(text[text.index("\n{\n") if "\n{\n" in text else text.index("{\n") :])
    assert found["differing"] == []
    assert found["figures"]["step_bound/scale"]["again"] == scales[step - 1] < 1.0
