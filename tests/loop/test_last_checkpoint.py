"""Whatever ends the controller, or refuses to be written or read beside it, costs no step that a
checkpoint could have saved."""

import asyncio
import errno
import os
from pathlib import Path

import pytest
from loop_audit import audit_uses

from rlcore.advisor.simulate.clock import run_simulated
from rlcore.advisor.simulate.loop import Scenario, Simulation
from rlcore.errors import DeadlineExceeded, NoSpace, OwnershipLost, RoleLost, StageError, UserError
from rlcore.loop import checkpoint
from rlcore.loop.controller import Controller
from rlcore.loop.dispatcher import LoopParts
from rlcore.loop.specs import CheckpointSpec, ScheduleSpec
from rlcore.metrics.health import Health
from rlcore.metrics.log import read_log
from rlcore.metrics.logger import RunReporter, open_logger
from rlcore.metrics.rows import read_rows
from rlcore.metrics.rules.base import Course
from rlcore.metrics.specs import LoggingSpec, WarningsSpec

SCHEDULES = {
    "synchronous": ScheduleSpec(steps=8, groups_per_step=2, max_staleness=0),
    "asynchronous": ScheduleSpec(steps=8, groups_per_step=2, max_staleness=1),
}
QUIET = LoggingSpec(console="plain", wandb="disabled")
COURSE = Course(staleness_bound=1, takes_turns=False)
# Each place at which a run touches its folder while it trains, and where what is written goes.
WRITES = {
    "rlcore.metrics.rows.RowFile._append": "details.jsonl",
    "rlcore.metrics.sinks.replace_file": "samples/",
    "rlcore.metrics.logger.TimelineSink.timeline": "timeline.jsonl",
    "rlcore.metrics.log.LogSink._write": "log.jsonl",
    "rlcore.metrics.console.ConsoleSink.show": "console",
    "rlcore.metrics.health.Health.add": "warnings",
    "rlcore.loop.saver.replace_file": "checkpoint",
    "rlcore.loop.checkpoint.replace_file": "checkpoint",
    "rlcore.loop.checkpoint.sync": "checkpoint",
    "rlcore.loop.checkpoint.new_folder": "checkpoint",
    "rlcore.loop.checkpoint.prune": "checkpoint",
}
ERRNOS = (errno.ENOSPC, errno.EIO, errno.EACCES, errno.ESTALE)


class Recorded(Simulation):
    """A simulation whose reporter also writes the files of a run folder."""

    logger = None

    def make_reporter(self, beside):
        reporter = super().make_reporter(RunReporter(self.logger))
        reporter.samples = lambda step, shown: self.logger.samples(f"step_{step:06d}", shown)
        reporter.timeline = self.logger.timeline
        return reporter


def _run(schedule, root, events=None, *, resume=False):
    """(the simulation, what ended it). Its checkpoints are by steps, every third."""
    scenario = Scenario(schedule, checkpoint=CheckpointSpec(every=3, every_s=0))
    found = []

    async def main(logger):
        Recorded.logger = logger
        found.append(Recorded(scenario, root / "checkpoints"))
        if resume:
            logger.resume_at(checkpoint.step_of(_newest(root)))
        await found[0].run(events, resume=resume)

    error = None
    health = Health(WarningsSpec(), COURSE)
    with open_logger(root, QUIET, config={}, total_steps=8, health=health) as logger:
        try:
            run_simulated(main(logger))
        except Exception as e:
            error = e
    return found[0], error


def _newest(root):
    return checkpoint.newest_valid(root / "checkpoints", lambda _: None)


@pytest.mark.parametrize("code", ERRNOS, ids=errno.errorcode.get)
@pytest.mark.parametrize("place", WRITES)
def test_an_error_at_any_write_costs_no_step(tmp_path, monkeypatch, capsys, place, code):
    """The disk refuses one kind of write from step 4 on, until the run is over or a while has
    passed. Where the run must end for it, its steps are in a checkpoint; and whoever reads what the
    run said knows which file it was."""

    async def refuse(run):
        await run.until(4)
        with monkeypatch.context() as patch:

            def refused(*args, **kwargs):
                raise OSError(code, os.strerror(code))

            patch.setattr(place, refused)
            await asyncio.sleep(7.0)

    run, error = _run(SCHEDULES["asynchronous"], tmp_path, refuse)
    logged = [entry["text"] for entry in read_log(tmp_path)[0]]
    said = "\n".join([*logged, capsys.readouterr().out, str(error or "")])
    said = " ".join(said.split())
    assert os.strerror(code) in said and WRITES[place] in said, said
    if error is None:
        assert run.progress.step == 8
    else:
        assert place == "rlcore.metrics.rows.RowFile._append" and code != errno.ENOSPC
        assert isinstance(error, StageError)
    saved = checkpoint.state_of(_newest(tmp_path))["progress"]["step"]
    assert saved == run.progress.step
    again, error = _run(SCHEDULES["asynchronous"], tmp_path, resume=True)
    assert error is None and again.progress.step == 8
    if place != "rlcore.metrics.rows.RowFile._append":
        assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == list(range(1, 9))


@pytest.mark.parametrize("left", [0, 2])
def test_rows_that_were_lost_come_back_from_the_checkpoint(tmp_path, left):
    async def fail(run):
        await run.until(4)
        raise StageError("the test ends it")

    _run(SCHEDULES["asynchronous"], tmp_path, fail)
    path = tmp_path / "metrics.jsonl"
    before = read_rows(path)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:left]))
    run, error = _run(SCHEDULES["asynchronous"], tmp_path, resume=True)
    assert error is None and run.progress.step == 8
    after = read_rows(path)
    assert [row["step"] for row in after] == list(range(1, 9))
    assert after[: len(before)] == before


class Killed(BaseException):
    """As the end of the process: nothing catches it, so nothing is saved."""


@pytest.mark.parametrize("at", [3, 4, 5])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_controller_killed_between_publish_and_commit_trains_nothing_twice(
    tmp_path, schedule, at
):
    """The step is trained and the weights before it are published; the buffer knows nothing yet."""

    async def kill(run):
        commit = run.buffer.commit

        async def killed(step):
            if step == at:
                raise Killed
            await commit(step)

        run.buffer.commit = killed
        await asyncio.sleep(1e6)

    with pytest.raises(Killed):
        _run(SCHEDULES[schedule], tmp_path, kill)
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")][-1] == at
    again, error = _run(SCHEDULES[schedule], tmp_path, resume=True)
    assert error is None and again.progress.step == 8
    audit_uses(again)
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == list(range(1, 9))


def _kill_the_dispatcher(run, error):
    async def fail():
        raise error

    run.controller._dispatcher.note_failed_scores = fail


FAILURES = {
    "an actor failed too often": StageError("bf16-0 failed 11 times within an hour"),
    "no healthy actor": DeadlineExceeded("waited 300 s for a healthy rollout actor"),
    "a refused request": UserError("the engine refuses"),
    "a mistake of ours": KeyError("label"),
    "a disk": OSError(errno.EIO, "Input/output error"),
}


def test_a_run_whose_first_samples_all_fail_alike_ends_with_their_error(tmp_path):
    async def fail(run):
        async def failed_scores():
            return 128, 128, "128 of 128 samples: reset raised TemplateError: no role tool"

        run.buffer.failed_scores = failed_scores

    _, ended_by = _run(next(iter(SCHEDULES.values())), tmp_path, fail)
    assert isinstance(ended_by, StageError) and "no role tool" in str(ended_by)
    assert "supervision.first_failures=0" in str(ended_by)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("why", FAILURES)
def test_a_failure_beside_training_leaves_a_last_checkpoint(tmp_path, schedule, why):
    error = FAILURES[why]

    async def fail(run):
        await run.until(4)
        _kill_the_dispatcher(run, error)

    run, ended_by = _run(SCHEDULES[schedule], tmp_path, fail)
    assert ended_by is error
    assert checkpoint.step_of(_newest(tmp_path)) == run.progress.step >= 4
    again, error = _run(SCHEDULES[schedule], tmp_path, resume=True)
    assert error is None
    trained = [key for step in sorted(again.learner.trained) for key in again.learner.trained[step]]
    assert len(trained) == len(set(trained)) == 8 * 2 * 2


def test_a_lost_actor_between_two_steps_costs_no_step_either(tmp_path):
    """As one that shares the learner's GPU: the run goes on from a checkpoint."""

    async def fail(run):
        await run.until(4)
        _kill_the_dispatcher(run, RoleLost("bf16-0 is lost, and its GPU is the learner's too"))

    run, error = _run(SCHEDULES["synchronous"], tmp_path, fail)
    assert isinstance(error, RoleLost)
    assert checkpoint.step_of(_newest(tmp_path)) == run.progress.step >= 4


@pytest.mark.parametrize("who", ["learner", "buffer"])
def test_without_learner_or_buffer_the_failure_is_raised_as_it_was(tmp_path, who):
    async def hang(*args, **kwargs):
        await asyncio.sleep(1e5)

    async def fail(run):
        await run.until(4)
        if who == "learner":
            run.learner.sample_details = hang
        else:
            run.buffer.metrics = hang
        _kill_the_dispatcher(run, RoleLost(f"the {who} did not answer"))

    _, error = _run(SCHEDULES["asynchronous"], tmp_path, fail)
    assert isinstance(error, RoleLost) and who in str(error)
    assert _newest(tmp_path).name == "step_000003"


def test_a_command_that_lost_the_folder_saves_nothing_to_it(tmp_path):
    async def fail(run):
        await run.until(4)
        _kill_the_dispatcher(run, OwnershipLost("run_dir was taken over"))

    _, error = _run(SCHEDULES["asynchronous"], tmp_path, fail)
    assert isinstance(error, OwnershipLost) and _newest(tmp_path).name == "step_000003"


def test_a_step_that_failed_in_its_middle_is_not_saved_as_if_it_were_taken(tmp_path):
    async def fail(run):
        run.learner.fails_at[4] = StageError("optimizer step 5 was not taken: loss/policy nan")

    run, error = _run(SCHEDULES["asynchronous"], tmp_path, fail)
    assert "not taken" in str(error) and run.progress.step == 4
    assert _newest(tmp_path).name == "step_000003"


def test_a_full_disk_is_waited_for_and_no_longer_than_the_key_says(tmp_path, monkeypatch):
    schedule = SCHEDULES["asynchronous"].model_copy(update={"wait_space_timeout_s": 50.0})
    full = []

    async def fill(run):
        await run.until(4)
        plain = run.reporter.row

        def row(values):
            if full:
                raise NoSpace("metrics.jsonl could not be written: No space (900 bytes are needed)")
            return plain(values)

        run.reporter.row = row
        full.append(True)
        await asyncio.sleep(30.0)
        full.clear()
        await run.until(6)
        full.append(True)

    run, error = _run(schedule, tmp_path, fill)
    assert isinstance(error, NoSpace)
    waits = [note for note in run.reporter.notes if "waits for space" in note]
    assert len(waits) == 2 and "schedule.wait_space_timeout_s=50" in waits[0]
    assert "900 bytes are needed" in waits[0]
    assert any("there is space again" in note for note in run.reporter.notes)
    assert _newest(tmp_path).name == checkpoint.name_of(run.progress.step)


@pytest.mark.parametrize(
    "error", [UserError("control/actors.json was not JSON: use rlcore scale.")]
)
def test_a_request_that_cannot_be_read_is_noted_and_answered(tmp_path, error):
    answers = []
    run = []

    def refuse():
        if not run[0].reporter.rows or answers:
            return None
        raise error

    class Asked(Simulation):
        def _parts(self):
            parts = super()._parts()
            return LoopParts(
                parts.fleet,
                parts.requests,
                parts.evaluator,
                parts.saver,
                parts.reporter,
                refuse,
                answers.append,
            )

    async def main():
        run.append(Asked(Scenario(SCHEDULES["asynchronous"]), Path(tmp_path)))
        await run[0].run()

    run_simulated(main())
    assert run[0].progress.step == 8 and answers == [str(error)]
    assert any("rlcore scale was refused: control/actors.json" in n for n in run[0].reporter.notes)
    assert isinstance(run[0].controller, Controller)
