"""Columns of metrics.jsonl, and those that explain them in details.jsonl."""

import json
from pathlib import Path

import pytest
from run_rows import ILL, WELL, recorded, rows

from rlcore.errors import NoSpace
from rlcore.metrics.health import Health
from rlcore.metrics.logger import open_logger
from rlcore.metrics.names import METRICS, split_row
from rlcore.metrics.rows import RowFile, read_rows, run_rows
from rlcore.metrics.rules.base import Course
from rlcore.metrics.sinks import Sink
from rlcore.metrics.specs import LoggingSpec, WarningsSpec

RECORDED = Path(__file__).parent / "recorded_run" / "metrics.jsonl"
ROW = {"policy_version": 1, "reward/mean": 0.5, "mismatch/ess": 0.9, "user/own": 1.0}
DETAILS = {"mismatch/eighth_3/ratio_p95": 1.5, "engine/bf16/step_s": 0.1, "time/fetch_s": 0.2}
# what scripts read of a row, whatever logging.detail says
RELIED_ON = (
    *("step", "policy_version", "reward/mean", "response_length/mean", "staleness/mean"),
    *("staleness/max", "mismatch/kl_k1", "mismatch/kl_k3", "mismatch/abs_dlogp_mean"),
    *("mismatch/ess", "mismatch/ess@fp8", "correction/tis/truncated_share", "loss/policy"),
    *("grad_norm", "entropy", "time/step_s", "time/wait_data_s", "time/publish_s"),
    *("throughput/rollout_tokens_per_s", "throughput/train_tokens_per_s", "buffer/groups"),
    *("ledger/admitted", "ledger/failed/reason", "eval/digits/mean@4", "eval/digits/greedy"),
)


class Kept(Sink):
    rows: list = []  # noqa: RUF012 (the class is named by its path, and builds itself)

    def __init__(self, run_dir, config):
        Kept.rows.clear()

    def log(self, row):
        Kept.rows.append(row)


def opened(run_dir, **settings):
    spec = LoggingSpec(console="off", wandb="disabled", **settings)
    return open_logger(run_dir, spec, config={}, total_steps=4)


def test_a_row_is_kept_in_two_files_and_read_as_one(tmp_path):
    with opened(tmp_path) as logger:
        logger.log({"step": 1, **ROW, **DETAILS})
    (brief,) = read_rows(tmp_path / "metrics.jsonl")
    (details,) = read_rows(tmp_path / "details.jsonl")
    assert brief == {"step": 1, **ROW, "metrics/nonfinite": 0}
    assert details == {"step": 1, **DETAILS}
    assert run_rows(tmp_path) == [{**brief, **details}]


@pytest.mark.parametrize("detail", ["full", "brief"])
def test_trackers_get_what_the_setting_says(tmp_path, detail):
    with opened(tmp_path, detail=detail, sinks=(f"{__file__}:Kept",)) as logger:
        logger.log({"step": 1, **ROW, **DETAILS})
        told = dict(logger.sinks[-1].rows[0])
    assert (tmp_path / "details.jsonl").exists() == (detail == "full")
    assert set(told) - {"metrics/nonfinite"} == {
        "step",
        *ROW,
        *(DETAILS if detail == "full" else ()),
    }


def test_what_scripts_rely_on_stays_in_metrics_jsonl():
    assert split_row(dict.fromkeys(RELIED_ON, 1))[1] == {"step": 1}


def test_a_usual_row_has_about_sixty_columns():
    row = json.loads(RECORDED.read_text().splitlines()[-1])
    usual = {name: value for name, value in row.items() if not name.startswith("eval/")}
    brief, details = split_row(usual)
    assert 40 < len(brief) < 75 and len(brief) + len(details) == len(usual) + 1
    assert any(metric.detail for metric in METRICS)


MADE = [rows(40, **extra) for extra in (*WELL.values(), *(extra for _, extra in ILL.values()))]


@pytest.mark.parametrize("found", [*recorded().values(), *MADE])
def test_rules_judge_the_columns_of_metrics_jsonl_as_the_whole_row(found):
    def alarms(found):
        health = Health(WarningsSpec(), Course(staleness_bound=8))
        health.resume(found)
        return [(alarm.rule, alarm.step, alarm.text) for alarm in health.alarms]

    assert alarms([split_row(row)[0] for row in found]) == alarms(found)


def test_a_run_goes_on_where_a_crash_left_details_without_a_row(tmp_path):
    with opened(tmp_path) as logger:
        logger.log({"step": 1, **ROW, **DETAILS})
    RowFile(tmp_path / "details.jsonl").log({"step": 2, "time/fetch_s": 9.0})
    with opened(tmp_path) as logger:
        logger.resume_at(1)
        logger.log({"step": 2, **ROW, **DETAILS})
    assert [row["time/fetch_s"] for row in run_rows(tmp_path)] == [0.2, 0.2]


def test_a_row_that_found_no_space_is_written_once_when_there_is_some(tmp_path, monkeypatch):
    append, full = RowFile._append, [True]

    def refuse(self, line):
        if self.path.name == "metrics.jsonl" and full:
            full.clear()
            raise OSError(28, "No space left on device")
        append(self, line)

    monkeypatch.setattr(RowFile, "_append", refuse)
    with opened(tmp_path) as logger:
        with pytest.raises(NoSpace):
            logger.log({"step": 1, **ROW, **DETAILS})
        assert run_rows(tmp_path) == []
        logger.log({"step": 1, **ROW, **DETAILS})
        logger.log({"step": 2, **ROW, **DETAILS})
    assert [row["time/fetch_s"] for row in run_rows(tmp_path)] == [0.2, 0.2]
    assert len(read_rows(tmp_path / "details.jsonl")) == 2


def test_a_run_of_before_has_its_rows_in_one_file(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, **ROW, **DETAILS}) + "\n")
    with opened(tmp_path) as logger:
        logger.resume_at(1)
        logger.log({"step": 2, **ROW, **DETAILS})
    assert [set(DETAILS) <= set(row) for row in run_rows(tmp_path)] == [True, True]
