"""Runs that are ill by construction are called healthy nowhere: not in the console while they go
on or at its end, in `rlcore watch`, or on the page. Those that are well raise no alarm there."""

import re

import pytest
from run_rows import ILL, LATER, UNSURE, WELL, rows

from rlcore.cli import main
from rlcore.commands.derived import health_of
from rlcore.config.compose import load, to_yaml
from rlcore.metrics.logger import open_logger

STEPS = [5, 20, pytest.param(200, marks=pytest.mark.slow)]


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


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("name", ILL)
def test_an_ill_run_is_called_healthy_nowhere(name, steps, tmp_path, capsys):
    spoken_at, extra = ILL[name]
    texts = shown(tmp_path / "run", rows(steps, **extra), capsys)
    if steps >= spoken_at or name not in LATER:
        assert not [place for place, text in texts.items() if "Healthy" in text]
    if steps >= spoken_at:
        assert "warning: " in texts["console"] and "warning: " in texts["watch"]
        assert "<li>" in texts["page"] and re.search(r"[Ww]arn|ill", texts["end"]), texts["end"]


@pytest.mark.parametrize("steps", STEPS)
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
