"""Runs with a teacher, of real actors and a real learner."""

import pytest
from conftest import rows, without_times

pytestmark = [pytest.mark.engine, pytest.mark.ranks, pytest.mark.slow]
ON_POLICY = ("schedule=on_policy", "schedule.on_publish=finish", "algorithm=distill")


def test_a_resumed_run_with_a_frozen_teacher_equals_a_whole_one(command, small, tmp_path) -> None:
    """A fresh model learns of a warmed-up one: the starting model of the first run."""
    start, folder = tmp_path / "start", tmp_path / "teacher"
    first = command("train", *small, "schedule.steps=1", f"run_dir={start}")
    assert first.wait() == 0, first.text[-3000:]
    given = command("export", f"run_dir={start}", f"out={folder}")
    assert given.wait() == 0, given.text[-3000:]
    student = ("model.warmup=null", "teacher=frozen", f"teacher.path={folder}", "learner.lr=2e-3")
    words = ("train", *small, *ON_POLICY, *student, "rollout.samples_per_prompt=1")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for run_dir, more in ((whole, ("schedule.steps=6",)), (parts, ("schedule.steps=4",))):
        run = command(*words, f"run_dir={run_dir}", *more)
        assert run.wait() == 0, run.text[-3000:]
    third = command("train", f"run_dir={parts}", "resume=auto", "schedule.steps=6")
    assert third.wait() == 0, third.text[-3000:]
    found = rows(whole)
    assert [without_times(r) for r in rows(parts)] == [without_times(r) for r in found]
    assert all(r["teacher/divergence"] > 0 and r["grad_norm"] > 0 for r in found)
    assert found[-1]["loss/teacher"] == pytest.approx(found[-1]["teacher/divergence"], rel=1e-4)
    assert all(r["teacher/token_share"] == 1.0 for r in found)


def test_self_distillation_beside_rewards_resumes_exactly(command, small, tmp_path) -> None:
    """The previous policy reads a better answer, and is refreshed between both parts."""
    beside = ("algorithm=grpo", "teacher=previous", "teacher.refresh_steps=3", "teacher.weight=0.1")
    words = ("train", *small, *ON_POLICY[:2], *beside)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for run_dir, more in ((whole, ("schedule.steps=6",)), (parts, ("schedule.steps=4",))):
        run = command(*words, f"run_dir={run_dir}", *more)
        assert run.wait() == 0, run.text[-3000:]
    third = command("train", f"run_dir={parts}", "resume=auto", "schedule.steps=6")
    assert third.wait() == 0, third.text[-3000:]
    found = rows(whole)
    assert [without_times(r) for r in rows(parts)] == [without_times(r) for r in found]
    assert any(0 < r["teacher/token_share"] < 1 for r in found)
    assert all(r["loss/policy"] != 0 or r["loss/teacher"] != 0 for r in found)
