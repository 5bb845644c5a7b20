"""Progress of long commands on standard error."""

import io

import pytest

from rlcore import progress
from rlcore.progress import ProgressLine, waiting


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """Seconds that a test sets."""
    seconds = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: seconds[0])
    return seconds


def test_without_a_terminal_a_line_comes_every_ten_seconds(clock):
    out = io.StringIO()
    shown = ProgressLine("eval", "answers", out)
    for second in range(35):
        clock[0] = 100.0 + second
        shown.show(second, 70)
    shown.close()
    assert out.getvalue().splitlines() == [
        "rlcore eval: 10 of 70 answers, 10 s, 60 s remain",
        "rlcore eval: 20 of 70 answers, 20 s, 50 s remain",
        "rlcore eval: 30 of 70 answers, 30 s, 40 s remain",
    ]


def test_in_a_terminal_one_line_is_written_over_and_removed(clock):
    out = Terminal()
    shown = ProgressLine("fetch a/b", "MB", out)
    shown.show(2e6, None)
    clock[0] += 1
    shown.show(4e6, 8e6)
    shown.close()
    assert out.getvalue().split("\r")[1:3] == [
        "rlcore fetch a/b: 2 MB, 0 s",
        "rlcore fetch a/b: 4 of 8 MB, 1 s, 1 s remain",
    ]
    assert "\n" not in out.getvalue() and out.getvalue().endswith("\r")


def test_a_stage_is_named_while_it_lasts_and_nothing_is_left(monkeypatch):
    monkeypatch.setattr(progress, "SHOWN_S", 0.01)
    out = Terminal()
    with waiting("replay", "step 1", out) as stage:
        stage("step 2")
        while "step 2" not in out.getvalue():
            progress.time.sleep(0.01)
    assert out.getvalue().endswith("\r")
