"""Runs whose engines sleep while the learner trains (schedule.colocated): on CPUs the same code as
on GPUs, with keys and values to free."""

import pytest
from conftest import rows, without_times

pytestmark = [pytest.mark.engine, pytest.mark.ranks, pytest.mark.slow]

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


@pytest.mark.parametrize("name", OTHERS)
def test_a_kind_of_run_takes_turns(name, run):
    found = run("run", *COLOCATED, *OTHERS[name])
    assert [row["step"] for row in found] == [1, 2, 3, 4]
    assert turns(found) == [2, 4]


def test_it_goes_on_in_the_middle_of_a_phase(run):
    whole = run("whole", *COLOCATED)
    run("parts", *COLOCATED, "schedule.steps=3")
    parts = run("parts", "resume=auto", "schedule.steps=4")
    assert list(map(learnt, parts)) == list(map(learnt, whole))
