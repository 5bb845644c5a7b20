"""Alarms and verdicts from rows: each rule once, when its bound is passed, and Healthy only where
every rule had enough to judge."""

import http.server
import json
import threading

import pytest
from run_rows import after, rows
from timing import deadline

from rlcore.config.compose import load
from rlcore.metrics.health import ALARM, RULES, Health, warned_steps
from rlcore.metrics.log import read_log
from rlcore.metrics.logger import open_logger
from rlcore.metrics.rows import read_rows
from rlcore.metrics.rules.base import RECENT, Course, Fast
from rlcore.metrics.sinks import Sink
from rlcore.metrics.specs import LoggingSpec, WarningsSpec

SPEC = WarningsSpec(window=5, flat_steps=40)
ASYNC = Course(staleness_bound=4)
# rule -> (what its rows have instead of the healthy values, what its sentence names)
BAD = {
    "answer_kl": (
        {"mismatch/kl_k3": after(1, 0.0, 0.3)},
        "6 nats an answer from the policy, k3 0.3 a token",
    ),
    "ess": ({"mismatch/ess": 0.4}, "mismatch/ess is 0.4"),
    "fallen": ({"reward/mean": lambda s: 0.5 if s < 8 else 0.1}, "has fallen to 0.233 from 0.5"),
    "heldout": (
        {"eval/digits/mean@1": lambda s: 0.5 / s},
        "eval/digits/mean@1 is 0.0833 at version 5, below 0.5 at version 0",
    ),
    "cut_off": (
        {"response_length/truncated_share": 0.9, "reward/mean": 0.05},
        "90% of the answers are cut off",
    ),
    "no_signal": ({"reward/equal_share": 1.0}, "equal rewards in 100% of the groups"),
    "entropy": ({"entropy": 0.005}, "algorithm.entropy_coef"),
    "entropy_rise": (
        {"entropy": lambda s: 0.1 * s, "reward/mean": 0.2},
        "becoming noise",
    ),
    "length": (
        {"response_length/mean": lambda s: 20.0 if s < 4 else 2.0, "reward/mean": 0.2},
        "answers have 2 tokens, from 20",
    ),
    "acceptance": ({"mismatch/acceptance": 0.7}, "schedule.max_staleness"),
    "clip_share": ({"policy/clip_low_share": 0.2, "policy/clip_high_share": 0.2}, "40%"),
    "staleness_share": ({"staleness/mean": 3.9}, "3.9 steps old on average, of at most 4"),
    "learner_idle": ({"time/wait_data_s": 1.6}, "waits for data 80% of the time"),
    "engine_idle": ({"time/rollout_s": 0.2}, "engines do not decode 90% of the time"),
    "failed_scores": ({}, "10.0% of the scores"),
    "flat_steps": ({"reward/mean": 0.3}, "reward/mean has not risen"),
}


def warnings(found, spec=SPEC, course=ASYNC):
    health = Health(spec, course)
    health.resume(found)
    return health.warnings


def bad(name, steps=None):
    steps = steps or (40 if name == "flat_steps" else 12)
    return rows(steps, failing=1.0 if name == "failed_scores" else 0.0, **BAD[name][0])


@pytest.mark.parametrize("name", ["learner_idle", "engine_idle"])
def test_advice_names_the_places_where_episodes_wait_for_one(name):
    (sentence,) = warnings(rows(10, **BAD[name][0], **{"environment/waiting": 7.0}))
    assert "7 episodes wait for a place: raise environment.concurrency" in sentence
    (without,) = warnings(rows(10, **BAD[name][0], **{"environment/waiting": 0.0}))
    assert "environment.concurrency" not in without


def test_a_healthy_run_does_not_warn():
    assert warnings(rows(60)) == []


def test_every_rule_is_tried_and_has_its_setting():
    assert set(BAD) == set(RULES)
    assert {*RULES, "window"} == set(WarningsSpec.model_fields)


@pytest.mark.parametrize("name", BAD)
def test_each_warns_once_and_names_its_bound(name):
    (text,) = warnings(bad(name))
    assert f"logging.warnings.{name}=" in text and "(step" in text
    assert BAD[name][1] in text


@pytest.mark.parametrize("name", BAD)
def test_each_can_be_turned_off(name):
    spec = SPEC.model_copy(update={name: RULES[name].off})
    assert warnings(bad(name), spec) == []


@pytest.mark.parametrize("name", [n for n, rule in RULES.items() if isinstance(rule, Fast)])
def test_fast_rules_judge_before_the_window_is_full(name):
    health = Health(WarningsSpec(), ASYNC)
    health.resume(bad(name))
    assert [alarm.rule for alarm in health.alarms] == [name]
    assert health.alarms[0].step < WarningsSpec().window
    assert RULES[name].rows(WarningsSpec()) == RECENT


def test_one_odd_step_among_good_ones_does_not_warn():
    good = rows(10)
    good[6]["mismatch/ess"] = 0.1
    good[7]["mismatch/ess"] = None  # was not finite
    assert warnings(good) == []


def test_who_waits_by_design_is_not_warned_of():
    turns = Course(staleness_bound=0, takes_turns=True)
    waiting = rows(10, **{"time/wait_data_s": 1.9, "time/rollout_s": 0.1})
    assert warnings(waiting, course=turns) == []
    assert len(warnings(waiting)) == 2


def test_an_age_of_one_step_is_ordinary_where_the_bound_is_one():
    aged = rows(10, **{"staleness/mean": 1.0})
    assert warnings(aged, course=Course(staleness_bound=1)) == []


@pytest.mark.parametrize("rise", [0.0, -0.0005])
def test_rewards_that_do_not_rise_are_flat(rise):
    (text,) = warnings(rows(60, rise=rise, evals=0))
    assert "reward/mean has not risen" in text and "steps 1 to 40" in text
    assert warnings(rows(39, rise=rise, evals=0)) == []
    off = SPEC.model_copy(update={"flat_steps": 0})
    assert warnings(rows(60, rise=rise, evals=0), off) == []


def test_a_resumed_run_does_not_repeat_what_it_said():
    health = Health(SPEC, ASYNC)
    health.resume(bad("ess"))
    going_on = [{**row, "step": step, "entropy": 1e-9} for step, row in enumerate(bad("ess"), 13)]
    said = [alarm for row in going_on for alarm in health.add(row)]
    assert [alarm.rule for alarm in said] == ["entropy"] and said[0].step == 15


def test_a_row_that_comes_again_gives_its_alarms_again_and_counts_once():
    health = Health(SPEC, ASYNC)
    first = [health.add(row) for row in bad("ess", 3)]
    assert [a.rule for a in first[-1]] == ["ess"] and health.add(bad("ess", 3)[-1]) == first[-1]
    assert len(health.alarms) == 1 and "3 steps" in health.verdict().said


# ----- verdicts -----


def test_healthy_is_said_with_the_bounds_that_were_kept():
    health = Health(SPEC, ASYNC)
    health.resume(rows(30))
    verdict = health.verdict()
    assert verdict.kind == "well" and verdict.said == "Healthy: nothing to warn of in 30 steps."
    assert "samples spoke for the learner's policy (mismatch/ess 0.5 or more)" in verdict.kept
    assert not any("rewards rose" in text for text in verdict.kept)  # of longer runs


def test_a_machine_that_is_slow_makes_no_policy_ill():
    """Its warnings are said and listed last; they neither give nor take the verdict."""
    slow = {"time/wait_data_s": 1.9, "time/rollout_s": 0.1, "staleness/mean": 3.9}
    idle = Health(SPEC, ASYNC)
    idle.resume(rows(30, **slow))
    found = idle.verdict()
    assert found.kind == "well" and len(found.warnings) == 3
    said = "Healthy: nothing to warn of in 30 steps; 3 warnings of the machine's speed:"
    assert found.said == said and "fresher" in found.line
    assert not any("waited for data" in text or "did not decode" in text for text in found.kept)
    lost = Health(SPEC, ASYNC)
    lost.resume(rows(30, **{**slow, "mismatch/ess": 0.1}))
    found = lost.verdict()
    assert found.kind == "ill" and "mismatch/ess" in found.warnings[0]
    assert found.said == "1 warning in 30 steps, and 3 warnings of the machine's speed:"
    few = Health(WarningsSpec(), ASYNC)
    few.resume(rows(25, evals=0, **slow))
    found = few.verdict()
    assert found.kind == "unsure" and "Healthy" not in found.line and len(found.warnings) == 3


@pytest.mark.parametrize(
    ("found", "lacks"),
    [
        (rows(5), "20 steps are needed"),
        (rows(25, evals=0), "there are no two held-out results to compare"),
        (rows(25, evals=50), "there are no two held-out results to compare"),
        (rows(25, **{"reward/mean": None}), "no reward/mean"),
        ([{"step": 1}], "no rewards were seen"),
    ],
)
def test_without_enough_to_judge_the_verdict_says_what_was_seen(found, lacks):
    health = Health(WarningsSpec(no_signal=1), ASYNC)
    health.resume(found)
    verdict = health.verdict()
    assert verdict.kind == "unsure" and lacks in verdict.said and "Healthy" not in verdict.said


def test_metrics_that_a_run_does_not_have_are_none_of_its_concern():
    found = [{n: v for n, v in row.items() if "clip" not in n} for row in rows(30)]
    health = Health(SPEC, ASYNC)
    health.resume(found)
    assert health.verdict().kind == "well"
    assert not any("clipped" in text for text in health.verdict().kept)


# ----- where alarms go -----


class Notes(Sink):
    def __init__(self):
        self.noted, self.summary = [], {}

    def note(self, text):
        self.noted.append(text)

    def finish(self, summary):
        self.summary = summary


def logged(folder, found, spec=None, steps=12):
    """What sinks of a run with these rows are told."""
    notes = Notes()
    spec = spec or LoggingSpec(console="off", wandb="disabled", warnings=SPEC)
    health = Health(spec.warnings, ASYNC)
    with open_logger(folder, spec, config={}, total_steps=steps, health=health) as logger:
        logger.sinks.insert(0, notes)
        logger.resume_at(int(found[0]["step"]) - 1)
        for row in found:
            logger.log(row)
        logger.finish({"steps": len(found)})
    return notes


def test_a_run_notes_an_alarm_once_also_when_it_goes_on(tmp_path):
    noted = [
        text
        for first in (1, 8)
        for text in logged(tmp_path, bad("ess")[first - 1 : first + 6]).noted
    ]
    assert len(noted) == 1 and noted[0].startswith("warning: mismatch/ess is 0.4")


def test_an_alarm_is_an_event_of_the_log_and_counted_in_every_row(tmp_path):
    notes = logged(tmp_path, bad("ess"))
    (event,) = [e for e in read_log(tmp_path)[0] if e["event"] == "alarm"]
    assert event["rule"] == "ess" and event["step"] == 3 and event["level"] == "warning"
    assert [row[ALARM] for row in read_rows(tmp_path / "metrics.jsonl")] == [0.0] * 2 + [1.0] * 10
    assert notes.summary["verdict"].startswith("1 warning in 12 steps: mismatch/ess is 0.4")


def test_a_webhook_is_posted_alarms_and_the_end(tmp_path):
    posted, came = [], threading.Event()

    class Receiver(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            size = int(self.headers["Content-Length"])
            posted.append(json.loads(self.rfile.read(size)))
            self.send_response(204)
            self.end_headers()
            if posted[-1]["event"] == "ended":
                came.set()

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/"
        spec = LoggingSpec(console="off", wandb="disabled", warnings=SPEC, webhook=url)
        logged(tmp_path, bad("ess"), spec)
        assert came.wait(deadline(20))
        server.shutdown()
    alarm, ended = posted
    assert (alarm["event"], alarm["rule"], alarm["step"]) == ("alarm", "ess", 3)
    assert str(tmp_path) in alarm["text"] and "mismatch/ess is 0.4" in alarm["text"]
    assert ended["event"] == "ended" and "1 warning in 12 steps" in ended["text"]


def test_a_webhook_that_nobody_answers_costs_a_note_and_not_the_run(tmp_path):
    spec = LoggingSpec(
        console="off", wandb="disabled", warnings=SPEC, webhook="http://127.0.0.1:9/"
    )
    logged(tmp_path, bad("ess"), spec)
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 12
    texts = [e["text"] for e in read_log(tmp_path)[0]]
    assert any("the webhook (logging.webhook) could not be written" in text for text in texts)


def test_the_bounds_are_settings_of_a_run():
    config = load(["run_dir=DIR", "logging.warnings.ess=0.3", "logging.warnings.flat_steps=0"])
    assert config.logging.warnings.ess == 0.3 and config.logging.warnings.flat_steps == 0


@pytest.mark.parametrize("records", [True, False])
def test_the_step_that_gives_cause_is_noted_where_batches_are_recorded(tmp_path, records):
    if records:
        (tmp_path / "recorder").mkdir()
    logged(tmp_path, bad("entropy"))
    assert warned_steps(tmp_path) == ([3] if records else [])
