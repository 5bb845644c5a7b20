"""status.json: what a run does at this moment."""

import json
import os

import pytest

from rlcore.metrics.logger import open_logger
from rlcore.metrics.specs import LoggingSpec

QUIET = LoggingSpec(console="off", wandb="disabled")


def status(folder):
    (line,) = (folder / "status.json").read_text().splitlines()
    return json.loads(line)


def test_it_says_what_the_run_does_and_waits_for(tmp_path):
    with open_logger(tmp_path, QUIET, config={}, total_steps=9) as logger:
        logger.activity("rollout", "a training batch", 3)
        shown = status(tmp_path)
        assert shown.pop("since").endswith("Z")
        assert shown == {
            "phase": "rollout",
            "step": 3,
            "steps": 9,
            "waits_for": "a training batch",
            "pid": os.getpid(),
        }
        logger.activity("training", "optimizer step 4", 3)
        assert status(tmp_path)["phase"] == "training"
        logger.finish({"steps": 4})
    ended = status(tmp_path)
    assert (ended["phase"], ended["step"], ended["waits_for"]) == ("ended", 4, "")


def test_since_is_when_it_began_to_wait(tmp_path, monkeypatch):
    clock = iter(["10:00", "10:05"])
    monkeypatch.setattr("rlcore.metrics.sinks.time.strftime", lambda *_: next(clock))
    with open_logger(tmp_path, QUIET, config={}, total_steps=9) as logger:
        for _ in range(3):
            logger.activity("rollout", "a training batch", 3)
        assert status(tmp_path)["since"] == "10:00"
        logger.finish({"steps": 3})


def test_a_run_that_goes_on_is_not_ended_any_more(tmp_path):
    for step in (0, 3):
        with open_logger(tmp_path, QUIET, config={}, total_steps=9) as logger:
            logger.resume_at(step)
            assert (status(tmp_path)["phase"], status(tmp_path)["step"]) == ("start", step)
            logger.finish({"steps": 3})
        assert status(tmp_path)["phase"] == "ended"


def test_a_failed_run_says_so(tmp_path):
    with (
        pytest.raises(RuntimeError),
        open_logger(tmp_path, QUIET, config={}, total_steps=9) as logger,
    ):
        logger.activity("training", "optimizer step 4", 3)
        raise RuntimeError("broken")
    assert (status(tmp_path)["phase"], status(tmp_path)["step"]) == ("failed", 3)


def test_a_full_disk_does_not_end_the_run_for_it(tmp_path):
    (tmp_path / ".status.json.partial").mkdir()  # what is written beside cannot be
    with open_logger(tmp_path, QUIET, config={}, total_steps=9) as logger:
        logger.activity("training", "optimizer step 1", 0)
        logger.finish({"steps": 1})
    assert not (tmp_path / "status.json").exists()
