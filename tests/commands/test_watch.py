"""Judgements of runs: `rlcore watch`, `rlcore report`, and an ill run called healthy nowhere."""

import io
import json
import re

import pytest
from rich.console import Console
from run_rows import ILL, LATER, UNSURE, WELL, rows

from rlcore.cli import main
from rlcore.commands.derived import course_of, health_of
from rlcore.commands.watch import watch, watch_log
from rlcore.config.compose import load, to_yaml
from rlcore.metrics.logger import open_logger

STEPS = 9


def row(step, **extra):
    return {
        "step": step,
        "policy_version": step,
        "reward/mean": step / 10,
        "reward/std": 0.1,
        "mismatch/ess": 0.2,
        "time/step_s": 2.0,
        "time/total_s": 2.0 * step,
        **extra,
    }


class Folder:
    """A run directory as a run writes it."""

    def __init__(self, path):
        self.path = path
        words = ["experiment=quickstart", f"run_dir={path}", f"schedule.steps={STEPS}"]
        self.config = load([*words, "logging.warnings.window=2"])
        (path / "config.yaml").write_text(to_yaml(self.config))

    def rows(self, *steps, mode="a"):
        with (self.path / "metrics.jsonl").open(mode) as file:
            file.writelines(json.dumps(row(step)) + "\n" for step in steps)

    def status(self, phase, step, waits_for=""):
        shown = {"phase": phase, "step": step, "steps": STEPS, "waits_for": waits_for}
        text = json.dumps({**shown, "since": "2026-01-31T12:00:05Z", "pid": 1})
        (self.path / "status.json").write_text(text)

    def watched(self, *events):
        """Exit code and output of a watcher; each event happens in one of its pauses."""
        out, coming = io.StringIO(), list(events)
        console = Console(file=out, width=160)
        # A watcher that pauses without an event left has missed the end: IndexError.
        code = watch(self.config, once=False, console=console, sleep=lambda _: coming.pop(0)())
        assert not coming
        return code, out.getvalue()


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


def test_it_shows_steps_as_they_come_and_ends_with_the_run(folder):
    folder.rows(1)
    folder.status("rollout", 1, "a training batch")

    def second():
        folder.rows(2)

    def last():
        folder.rows(3)
        folder.status("ended", 3)

    code, text = folder.watched(second, last)
    assert code == 0
    assert [text.count(f"step {step}/{STEPS}") for step in (1, 2, 3)] == [1, 1, 1]
    assert text.count("warning: mismatch/ess is 0.2") == 1
    assert "reward/mean" in text and "seconds" in text  # the summary


def test_half_a_row_waits_for_its_other_half(folder):
    folder.rows(1)
    whole = json.dumps(row(2)) + "\n"

    def part():
        with (folder.path / "metrics.jsonl").open("a") as file:
            file.write(whole[:20])

    def rest():
        with (folder.path / "metrics.jsonl").open("a") as file:
            file.write(whole[20:])
        folder.status("ended", 2)

    code, text = folder.watched(part, rest)
    assert code == 0 and text.count(f"step 2/{STEPS}") == 1


def test_a_run_that_fails_ends_it_with_1(folder):
    folder.rows(1, 2)
    code, text = folder.watched(lambda: folder.status("failed", 2))
    assert code == 1
    assert f"the run failed after step 2: see {folder.path}/log.jsonl" in text


def test_the_log_is_shown_as_it_grows(folder, capsys):
    def says(text):
        with (folder.path / "log.jsonl").open("a") as file:
            file.write(json.dumps({"role": "LearnerActor 42", "event": "stderr", "text": text}))
            file.write("\n")

    says("CUDA error")
    assert main(["watch", f"run_dir={folder.path}", "log=true", "once=true"]) == 0
    assert "LearnerActor 42 stderr: CUDA error\n" in capsys.readouterr().out
    coming = [lambda: says("at line 7"), lambda: folder.status("failed", 2)]
    assert watch_log(folder.path, once=False, sleep=lambda _: coming.pop(0)()) == 1
    shown = capsys.readouterr().out
    assert (shown.count("CUDA error"), shown.count("at line 7"), coming) == (1, 1, [])


def test_it_starts_anew_with_a_run_that_lost_its_last_steps(folder):
    folder.rows(1, 2, 3)

    def resumed():
        folder.rows(1, mode="w")

    def end():
        folder.rows(2)
        folder.status("ended", 2)

    _, text = folder.watched(resumed, end)
    assert text.count(f"step 3/{STEPS}") == 1 and text.count(f"step 2/{STEPS}") == 1
    assert text.count("warning:") == 1


def test_the_answers_before_and_after_are_shown_at_the_end(folder):
    folder.rows(1)
    folder.status("ended", 1)
    samples = folder.path / "samples"
    samples.mkdir()
    for version, answer in ((0, "wrong"), (1, "right")):
        sample = {"prompt_id": "digits/1", "prompt": "32=", "response": answer, "reward": 1.0}
        name = f"eval_{version:06d}_digits_greedy.jsonl"
        (samples / name).write_text(json.dumps(sample) + "\n")
    _, text = folder.watched()
    assert "before" in text and "wrong" in text and "after" in text and "right" in text


def test_once_prints_the_present_state_and_ends(folder, capsys):
    folder.rows(1, 2, 3)
    folder.status("rollout", 3, "a training batch")
    assert main(["watch", f"run_dir={folder.path}", "once=true"]) == 0
    text = capsys.readouterr().out
    assert f"step 3/{STEPS}" in text and "0.3 ± 0.1" in text
    assert "rollout, waits for a training batch, for" in text
    assert "logging.warnings.ess=0.5" in text
    words = [f"run_dir={folder.path}", "once=true", "logging.warnings.ess=0.1"]
    assert main(["watch", *words]) == 0
    text = capsys.readouterr().out
    assert "warning: " not in text and "Too few steps to judge" in text and "Healthy" not in text


def test_a_run_that_has_just_been_started_can_be_watched(folder, capsys):
    assert main(["watch", f"run_dir={folder.path}", "once=true"]) == 0
    assert "starting" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, sentence",
    [
        ([], "run_dir= is missing"),
        (["run_dir=/nowhere"], "run_dir=/nowhere holds no run"),
        (["run_dir=/nowhere", "once=perhaps"], "once=perhaps is not accepted"),
    ],
)
def test_what_is_no_run_is_refused(words, sentence, capsys):
    assert main(["watch", *words]) == 2
    assert sentence in capsys.readouterr().err


def test_warnings_know_the_schedule():
    bound = course_of(load(["run_dir=DIR", "schedule=async", "schedule.max_staleness=4"]))
    assert bound.staleness_bound == 4 and not bound.takes_turns
    turns = course_of(load(["run_dir=DIR", "schedule=on_policy"]))
    assert turns.staleness_bound == 0 and turns.takes_turns


# Runs that are ill by construction are called healthy nowhere: not in the console while they go on
# or at its end, in `rlcore watch`, or on the page. Those that are well raise no alarm there.


LENGTHS = [5, 20, pytest.param(200, marks=pytest.mark.slow)]


def shown(folder, found, capsys):
    """The texts of a run with these rows, by where they stand."""
    words = [f"run_dir={folder}", "schedule=async", "schedule.max_staleness=8"]
    quiet = ["logging.console=plain", "logging.wandb=disabled"]
    config = load([*words, *quiet, f"schedule.steps={len(found)}"])
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(config))
    capsys.readouterr()
    health = health_of(config)
    with open_logger(
        folder, config.logging, config={}, total_steps=len(found), health=health
    ) as logger:
        for row in found:
            logger.log(row)
        console = capsys.readouterr().out
        logger.finish({"steps": len(found)})
    end = capsys.readouterr().out
    assert main(["watch", f"run_dir={folder}", "once=true"]) == 0
    watched = capsys.readouterr().out
    assert main(["report", str(folder)]) == 0
    capsys.readouterr()
    page = re.search(r'<p class="verdict.*?</article>', (folder / "report.html").read_text(), re.S)
    return {"console": console, "end": end, "watch": watched, "page": page[0]}


@pytest.mark.parametrize("steps", LENGTHS)
@pytest.mark.parametrize("name", ILL)
def test_an_ill_run_is_called_healthy_nowhere(name, steps, tmp_path, capsys):
    spoken_at, extra = ILL[name]
    texts = shown(tmp_path / "run", rows(steps, **extra), capsys)
    if steps >= spoken_at or name not in LATER:
        assert not [place for place, text in texts.items() if "Healthy" in text]
    if steps >= spoken_at:
        assert "warning: " in texts["console"] and "warning: " in texts["watch"]
        assert "<li>" in texts["page"] and re.search(r"[Ww]arn|ill", texts["end"]), texts["end"]


@pytest.mark.parametrize("steps", LENGTHS)
@pytest.mark.parametrize("name", WELL)
def test_a_well_run_is_called_so_once_there_is_enough_to_judge(name, steps, tmp_path, capsys):
    found = rows(steps, rise=0.004, seed=0, **WELL[name])
    texts = shown(tmp_path / "run", found, capsys)
    assert not [place for place, text in texts.items() if "warning: " in text]
    said = "Healthy" if steps >= 20 else "Too few steps to judge"
    for place in ("end", "watch", "page"):
        assert said in texts[place]


@pytest.mark.parametrize("name", UNSURE)
def test_what_keeps_a_run_from_being_called_healthy_is_said_everywhere(name, tmp_path, capsys):
    extra, lacks = UNSURE[name]
    texts = shown(tmp_path / "run", rows(20, rise=0.004, **extra), capsys)
    assert not [place for place, text in texts.items() if "Healthy" in text or "warning: " in text]
    for place in ("end", "watch", "page"):
        assert lacks in " ".join(texts[place].split()), texts[place]


# `rlcore report` judges runs by their own bounds.


@pytest.mark.parametrize("ess, warned", [(0.5, True), (0.1, False)])
def test_a_report_lists_the_warnings_of_its_run(ess, warned, tmp_path):
    words = [f"run_dir={tmp_path}", "logging.warnings.window=2", f"logging.warnings.ess={ess}"]
    (tmp_path / "config.yaml").write_text(to_yaml(load(words)))
    rows = [{"step": step, "mismatch/ess": 0.2} for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["report", str(tmp_path)]) == 0
    text = (tmp_path / "report.html").read_text()
    assert ("mismatch/ess is 0.2 (steps 1 to 3" in text) == warned
    assert ("Too few steps to judge" in text) != warned


@pytest.mark.parametrize(
    "config, sentence",
    [
        (None, "not judged, since the folder holds no config.yaml"),
        ("seed: many", "not judged: "),
    ],
)
def test_a_run_that_cannot_be_judged_has_a_report_that_says_so(config, sentence, tmp_path):
    if config is not None:
        (tmp_path / "config.yaml").write_text(config)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "mismatch/ess": 0.2}\n')
    assert main(["report", str(tmp_path)]) == 0
    assert sentence in (tmp_path / "report.html").read_text()
