"""Runs with a teacher, of real actors and a real learner."""

import signal

import pytest
from conftest import left_over, rows, without_times

pytestmark = [pytest.mark.engine, pytest.mark.ranks, pytest.mark.slow]
ON_POLICY = ("schedule=on_policy", "schedule.on_publish=finish", "algorithm=distill")
COMPARED = ("loss/teacher", "teacher/divergence", "teacher/top1_agreement", "grad_norm")


@pytest.fixture(scope="module")
def warmed_up(finished, small, tmp_path_factory):
    """Folder of a warmed-up model: the starting model of a run of one step."""
    root = tmp_path_factory.mktemp("teacher")
    finished("train", *small, "schedule.steps=1", f"run_dir={root / 'start'}")
    finished("export", f"run_dir={root / 'start'}", f"out={root / 'model'}")
    return root / "model"


def taught(small, folder, kind):
    """Words of a run in which a fresh model learns of a warmed-up one."""
    student = ("model.warmup=null", f"teacher={kind}", f"teacher.path={folder}", "learner.lr=2e-3")
    return ("train", *small, *ON_POLICY, *student, "rollout.samples_per_prompt=1")


def whole_and_resumed(finished, words, root):
    """Rows of a run of six steps, which one that was continued after four must equal."""
    whole, parts = root / "whole", root / "parts"
    finished(*words, f"run_dir={whole}", "schedule.steps=6")
    finished(*words, f"run_dir={parts}", "schedule.steps=4")
    finished("train", f"run_dir={parts}", "resume=auto", "schedule.steps=6")
    found = rows(whole)
    assert [without_times(r) for r in rows(parts)] == [without_times(r) for r in found]
    return found


def test_a_frozen_teacher_in_the_learner_and_one_in_an_engine(
    finished, small, warmed_up, tmp_path
) -> None:
    """Both resume exactly, and take the same steps but for the engine's rounding."""
    found = {}
    for kind in ("frozen", "engine"):
        words = taught(small, warmed_up, kind)
        found[kind] = whole_and_resumed(finished, words, tmp_path / kind)
        assert all(r["teacher/divergence"] > 0 and r["grad_norm"] > 0 for r in found[kind])
        last = found[kind][-1]
        assert last["loss/teacher"] == pytest.approx(last["teacher/divergence"], rel=1e-4)
        assert all(r["teacher/token_share"] == 1.0 for r in found[kind])
        assert all(r["teacher/unscored"] == 0 for r in found[kind])
    for mine, theirs in zip(found["engine"][:2], found["frozen"]):
        for name in COMPARED:
            assert mine[name] == pytest.approx(theirs[name], rel=1e-3), name
    assert all(r["time/teacher_engine_s"] > 0 for r in found["engine"])


def test_a_draft_that_samples_teaches_as_its_folder_does(
    finished, small, warmed_up, tmp_path
) -> None:
    """Two engines of the draft's model give the steps of one that has the folder by its path."""
    fleet = ("actor=[bf16,draft]", f"actor.draft.draft_path={warmed_up}", "schedule.steps=3")
    words = ("train", *small, *ON_POLICY, *fleet, "model.warmup=null", "teacher=engine")
    named, given = tmp_path / "named", tmp_path / "given"
    finished(*words, "teacher.actor=draft", "teacher.engine.count=2", f"run_dir={named}")
    finished(*words, f"teacher.path={warmed_up}", f"run_dir={given}")
    found = rows(named)
    assert [without_times(r) for r in found] == [without_times(r) for r in rows(given)]
    assert all(r["teacher/token_share"] == 1.0 and r["teacher/divergence"] > 0 for r in found)
    assert all(r["mismatch/kl_k3@draft"] > r["mismatch/kl_k3@bf16"] for r in found)


def test_self_distillation_beside_rewards_resumes_exactly(finished, small, tmp_path) -> None:
    """The previous policy reads a better answer, and is refreshed between both parts."""
    beside = ("algorithm=grpo", "teacher=previous", "teacher.refresh_steps=3", "teacher.weight=0.1")
    found = whole_and_resumed(finished, ("train", *small, *ON_POLICY[:2], *beside), tmp_path)
    assert any(0 < r["teacher/token_share"] < 1 for r in found)
    assert any(r["teacher/unscored"] > 0 for r in found)
    assert all(r["loss/policy"] != 0 or r["loss/teacher"] != 0 for r in found)


@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_an_engine_that_dies_and_one_that_hangs_are_replaced(
    installed, small, warmed_up, tmp_path
) -> None:
    """Records are late meanwhile and have no distance; then each has one again."""
    engine = ("teacher=engine", f"teacher.path={warmed_up}", "teacher.engine.timeout_s=3")
    beside = ("algorithm=grpo", "cluster.num_cpus=3", "cluster.heartbeat_s=1")
    limits = ("cluster.hang_timeout_s=20", "schedule.steps=10000", "evaluation.every=1000")
    run = installed("train", *small, *engine, *beside, *limits, f"run_dir={tmp_path / 'run'}")

    def scored():
        return [r["teacher/unscored"] == 0 for r in rows(tmp_path / "run")]

    run.wait_for(lambda: all(scored()[-3:]) and len(scored()) >= 3, what="three scored steps")
    for sent in (signal.SIGKILL, signal.SIGSTOP):
        before = len(scored())
        (process,) = [p for p in run.descendants() if "TeacherActor" in " ".join(p.cmdline())]
        process.send_signal(sent)
        run.wait_for(lambda at=before: not all(scored()[at:]), what="records without a teacher")
        at = len(scored())
        run.wait_for(
            lambda at=at: len(scored()) >= at + 3 and all(scored()[-3:]), what="scores again"
        )
    family = run.descendants()
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 130, run.text[-3000:]
    assert not left_over(family)
