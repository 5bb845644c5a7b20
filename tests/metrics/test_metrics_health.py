"""Warnings from recorded rows: each when its bound is passed, once, and none of a healthy run."""

import random

import pytest

from rlcore.config.compose import load
from rlcore.metrics.health import RULES, Course, Health, warned_steps, warnings
from rlcore.metrics.logger import open_logger
from rlcore.metrics.sinks import HealthSink, Sink
from rlcore.metrics.specs import LoggingSpec, WarningsSpec

SPEC = WarningsSpec(window=5, flat_steps=40)
ASYNC = Course(staleness_bound=4)
# setting -> (what its rows have instead of the healthy values, what its sentence names)
BAD = {
    "ess": ({"mismatch/ess": 0.4}, "mismatch/ess is 0.4"),
    "acceptance": ({"mismatch/acceptance": 0.7}, "schedule.max_staleness"),
    "clip_share": ({"policy/clip_low_share": 0.2, "policy/clip_high_share": 0.2}, "40%"),
    "staleness_share": ({"staleness/mean": 3.9}, "3.9 steps old on average, of at most 4"),
    "learner_idle": ({"time/wait_data_s": 1.6}, "waits for data 80% of the time"),
    "engine_idle": ({"time/rollout_s": 0.2}, "engines do not decode 90% of the time"),
    "entropy": ({"entropy": 0.005}, "algorithm.entropy_coef"),
    "failed_scores": ({}, "10.0% of the scores"),
}


def rows(steps, *, failing=0.0, rise=0.01, **extra):
    """Of a run whose every value is well, but for `extra`; `failing`: failed scores a step."""
    noise = random.Random(0)
    return [
        {
            "step": step,
            "mismatch/ess": 0.95,
            "mismatch/acceptance": 0.98,
            "policy/clip_low_share": 0.01,
            "policy/clip_high_share": 0.02,
            "staleness/mean": 2.0,
            "time/step_s": 2.0,
            "time/wait_data_s": 0.5,
            "time/rollout_s": 1.8,
            "entropy": 0.4,
            "reward/mean": 0.2 + rise * step + noise.gauss(0, 0.02),
            "ledger/score_errors": failing * step,
            "ledger/score_timeouts": 0.0,
            "buffer/arrived_samples": 10.0 * step,
            **extra,
        }
        for step in range(1, steps + 1)
    ]


def bad(name, steps=10):
    return rows(steps, failing=1.0 if name == "failed_scores" else 0.0, **BAD[name][0])


@pytest.mark.parametrize("name", ["learner_idle", "engine_idle"])
def test_advice_names_the_places_where_episodes_wait_for_one(name):
    (sentence,) = warnings(rows(10, **BAD[name][0], **{"environment/waiting": 7.0}), SPEC, ASYNC)
    assert "7 episodes wait for a place: raise environment.concurrency" in sentence
    (without,) = warnings(rows(10, **BAD[name][0], **{"environment/waiting": 0.0}), SPEC, ASYNC)
    assert "environment.concurrency" not in without


def test_a_healthy_run_does_not_warn():
    assert warnings(rows(60), SPEC, ASYNC) == []


def test_every_rule_is_tried_and_has_its_setting():
    assert set(BAD) == set(RULES)
    assert {*RULES, "flat_steps", "window"} == set(WarningsSpec.model_fields)


@pytest.mark.parametrize("name", BAD)
def test_each_warns_once_and_names_its_bound(name):
    (text,) = warnings(bad(name), SPEC, ASYNC)
    assert f"logging.warnings.{name}=" in text and "steps 1 to 5" in text
    assert BAD[name][1] in text


@pytest.mark.parametrize("name", BAD)
def test_each_can_be_turned_off(name):
    off = 0 if name in ("ess", "acceptance", "entropy") else 1
    spec = SPEC.model_copy(update={name: off})
    assert warnings(bad(name), spec, ASYNC) == []


def test_one_odd_step_among_good_ones_does_not_warn():
    good = rows(10)
    good[6]["mismatch/ess"] = 0.1
    good[7]["mismatch/ess"] = None  # was not finite
    assert warnings(good, SPEC, ASYNC) == []


def test_who_waits_by_design_is_not_warned_of():
    turns = Course(staleness_bound=0, takes_turns=True)
    waiting = rows(10, **{"time/wait_data_s": 1.9, "time/rollout_s": 0.1})
    assert warnings(waiting, SPEC, turns) == []
    assert len(warnings(waiting, SPEC, ASYNC)) == 2


def test_an_age_of_one_step_is_ordinary_where_the_bound_is_one():
    aged = rows(10, **{"staleness/mean": 1.0})
    assert warnings(aged, SPEC, Course(staleness_bound=1)) == []


@pytest.mark.parametrize("rise", [0.0, -0.01])
def test_rewards_that_do_not_rise_are_flat(rise):
    (text,) = warnings(rows(60, rise=rise), SPEC, ASYNC)
    assert "reward/mean has not risen" in text and "steps 1 to 40" in text
    assert warnings(rows(39, rise=rise), SPEC, ASYNC) == []
    assert warnings(rows(60, rise=rise), SPEC.model_copy(update={"flat_steps": 0}), ASYNC) == []


def test_a_resumed_run_does_not_repeat_what_it_said():
    health = Health(SPEC, ASYNC)
    health.resume(bad("ess"))
    going_on = [{**row, "step": step, "entropy": 1e-9} for step, row in enumerate(bad("ess"), 11)]
    said = [text for row in going_on for text in health.add(row)]
    assert len(said) == 1 and "steps 11 to 15" in said[0] and "entropy" in said[0]


def test_a_run_notes_them_through_its_sinks_once_also_when_it_goes_on(tmp_path):
    noted = []

    class Notes(Sink):
        def note(self, text):
            noted.append(text)

    spec = LoggingSpec(console="off", wandb="disabled", warnings=SPEC)
    for first in (1, 8):
        with open_logger(tmp_path, spec, config={}, total_steps=9, course=ASYNC) as logger:
            logger.sinks.insert(0, Notes())
            logger.resume_at(first - 1)
            for row in bad("ess")[first - 1 : first + 6]:
                logger.log(row)
    assert len(noted) == 1 and noted[0].startswith("warning: mismatch/ess is 0.4")


def test_the_bounds_are_settings_of_a_run():
    config = load(["run_dir=DIR", "logging.warnings.ess=0.3", "logging.warnings.flat_steps=0"])
    assert config.logging.warnings.ess == 0.3 and config.logging.warnings.flat_steps == 0


@pytest.mark.parametrize("records", [True, False])
def test_the_step_that_gives_cause_is_noted_where_batches_are_recorded(tmp_path, records):
    if records:
        (tmp_path / "recorder").mkdir()
    said = []
    sink = HealthSink(tmp_path, Health(SPEC, ASYNC), said.append)
    for row in bad("entropy"):
        sink.log(row)
    assert len(said) == 1
    assert warned_steps(tmp_path) == ([SPEC.window] if records else [])
