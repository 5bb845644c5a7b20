"""Deadlines of tests follow the machine, and children share the calibration."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import timing


@pytest.fixture
def calibrated(monkeypatch):
    """Give the test run another calibration."""

    def calibrate(cpu, wall):
        monkeypatch.setenv(timing.VARIABLE, f"{cpu} {wall}")
        timing.slowness.cache_clear()

    yield calibrate
    timing.slowness.cache_clear()


def test_a_deadline_grows_with_the_slowness_of_the_machine(calibrated):
    calibrated(0.8, 2.5)
    assert timing.deadline(10) == 25


def test_programs_side_by_side_have_more_time_each(calibrated):
    calibrated(0.8, 2.5)
    timing.crowd(2)
    assert timing.deadline(10) == 50 and timing.slowness().cpu == 0.8


def test_a_child_takes_the_calibration_of_its_parent(calibrated):
    calibrated(1.5, 7.25)
    program = "import timing; print(timing.deadline(1), timing.slowness().cpu)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        timeout=timing.deadline(30),
    )
    assert done.stdout.split() == ["7.25", "1.5"]


def test_the_first_measurement_is_kept(monkeypatch):
    monkeypatch.delenv(timing.VARIABLE, raising=False)
    timing.slowness.cache_clear()
    first = timing.slowness()
    timing.slowness.cache_clear()
    assert timing.slowness() == pytest.approx(first, abs=0.001) and first.wall >= 1
    timing.slowness.cache_clear()


def test_a_wait_returns_what_its_condition_gave_and_fails_with_what_it_waited_for(calibrated):
    found = iter([None, 0, "there"])
    assert timing.wait_until(lambda: next(found), 60) == "there"
    calibrated(1, 1)
    with pytest.raises(AssertionError, match="for a file"):
        timing.wait_until(lambda: False, 0.01, "a file")
