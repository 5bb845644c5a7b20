"""The sinks of a run directory together, W&B offline for real."""

import importlib.metadata
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from timing import deadline

from rlcore.errors import OwnershipLost, StageError, UserError
from rlcore.metrics.console import ConsoleSink
from rlcore.metrics.digest import change, duration, number
from rlcore.metrics.log import LogSink, read_log
from rlcore.metrics.logger import MetricsLogger, open_logger
from rlcore.metrics.rows import read_rows, sanitize
from rlcore.metrics.sinks import SamplesSink, Sink, wandb_mode
from rlcore.metrics.specs import LoggingSpec
from rlcore.metrics.trackers import TABLE_COLUMNS, table_rows

ROW = {
    "reward/mean": 0.25,
    "reward/std": 0.4,
    "staleness/mean": 0.5,
    "staleness/max": 2,
    "mismatch/kl_k3": 1e-4,
    "mismatch/ess": 0.99,
    "time/step_s": 2.0,
    "time/wait_data_s": 0.5,
    "throughput/rollout_tokens_per_s": 9000.0,
    "throughput/train_tokens_per_s": 7000.0,
}
SAMPLE = {
    "prompt_id": "digits/train/1",
    "prompt": "[b]32=",
    "response": "23 ж",
    "reward": 1.0,
    "score_status": "ok",
}


def row(step, **extra):
    return {"step": step, "policy_version": step, **ROW, **extra}


def open_plain(run_dir):
    quiet = LoggingSpec(console="off", wandb="disabled")
    return open_logger(run_dir, quiet, config={"seed": 1}, total_steps=4)


def test_a_run_and_its_continuation(tmp_path):
    with open_plain(tmp_path) as logger:
        logger.resume_at(0)
        for step in range(1, 4):
            logger.log(row(step))
            logger.samples(f"step_{step:06d}", [SAMPLE])
        logger.samples("eval_000000_digits_greedy", [SAMPLE])
    with open_plain(tmp_path) as logger:
        logger.resume_at(2)
        assert sorted(f.stem for f in (tmp_path / "samples").iterdir()) == [
            "eval_000000_digits_greedy",
            "step_000001",
            "step_000002",
        ]
        logger.log(row(3, grad_norm=float("nan")))
        logger.finish({"steps": 3})
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in rows] == [1, 2, 3]
    assert rows[2]["grad_norm"] is None and rows[2]["metrics/nonfinite"] == 1
    assert json.loads((tmp_path / "samples" / "step_000001.jsonl").read_text()) == SAMPLE


CALLS = {
    "log": lambda logger: logger.log({"step": 1}),
    "samples": lambda logger: logger.samples("step_000001", [SAMPLE]),
    "note": lambda logger: logger.note("a note"),
    "activity": lambda logger: logger.activity("rollout", "a batch", 1),
    "fleet": lambda logger: logger.fleet([]),
    "timeline": lambda logger: logger.timeline(1, []),
    "resume_at": lambda logger: logger.resume_at(0),
}


class Recorder(Sink):
    title = "the recorder"

    def __init__(self):
        self.notes, self.calls = [], []

    def note(self, text):
        self.notes.append(text)

    def __getattribute__(self, name):
        if name in CALLS:
            object.__getattribute__(self, "calls").append(name)
        return object.__getattribute__(self, name)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("lost")])
@pytest.mark.parametrize("call", CALLS)
def test_a_sink_that_fails_at_any_call_is_noted_once_and_tried_again(call, error):
    """The others go on, the run too, and what it is given meanwhile is left out."""
    clock, broken = [0.0], [True]

    def fail(self, *args):
        if broken[0]:
            raise error

    failing = type("Failing", (Sink,), {call: fail, "title": "the failing (some.key)"})()
    before, after = Recorder(), Recorder()
    logger = MetricsLogger([before, failing, after], clock=lambda: clock[0])
    for _ in range(3):
        CALLS[call](logger)
    for recorder in (before, after):
        assert recorder.calls.count(call) >= 3
        said = [note for note in recorder.notes if note != "a note"]
        assert len(said) == 1
        assert "the failing (some.key) could not be written" in said[0] and str(error) in said[0]
    clock[0], broken[0] = 61.0, False
    CALLS[call](logger)
    assert "the failing (some.key) is written again" in before.notes[-1] or call == "note"


def test_every_sink_is_closed_even_when_one_fails():
    closed = []

    class Broken(Sink):
        def close(self):
            raise RuntimeError("broken")

    class Good(Sink):
        def close(self):
            closed.append(True)

    with MetricsLogger([Good(), Broken(), Good()]):
        pass
    assert closed == [True, True]


def test_once_the_folder_is_another_command_s_nothing_more_is_written_to_it(tmp_path):
    quiet = LoggingSpec(console="off", wandb="disabled")
    owned = [True]

    def guard():
        if not owned[0]:
            raise OwnershipLost("run_dir was taken over")

    def written():
        return {p.name: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}

    with (
        pytest.raises(OwnershipLost),
        open_logger(tmp_path, quiet, config={}, total_steps=3, guard=guard) as logger,
    ):
        logger.log({"step": 1})
        logger.activity("rollout", "a batch", 1)
        owned[0], before = False, written()
        try:
            logger.log({"step": 2})
        finally:
            logger.note("goodbye")
    assert written() == before and len(before) == 4


def test_the_log_has_what_was_said_with_date_and_role_and_is_begun_anew_when_it_is_long(tmp_path):
    quiet = LoggingSpec(console="off", wandb="disabled")
    with (
        pytest.raises(StageError),
        open_logger(tmp_path, quiet, config={}, total_steps=3) as logger,
    ):
        logger.note("continuing from step_000005")
        logger.note("warning: entropy is low")
        logger.activity("rollout", "a training batch", 0)
        logger.log({"step": 1, "reward/mean": 0.5})
        logger.stderr("LearnerActor 42", "CUDA error\nat \u2028 somewhere")
        raise StageError("the loss is nan")
    entries, end = read_log(tmp_path)
    said = [(e["role"], e["level"], e["event"]) for e in entries]
    assert said == [
        ("driver", "info", "note"),
        ("driver", "warning", "note"),
        ("driver", "info", "activity"),
        ("driver", "info", "step"),
        ("LearnerActor 42", "info", "stderr"),
        ("driver", "error", "failed"),
    ]
    assert "step 1/3" in entries[3]["text"] and "reward" in entries[3]["text"]
    assert "\u2028 somewhere" in entries[4]["text"]
    assert "Traceback" in entries[5]["text"] and "the loss is nan" in entries[5]["text"]
    for entry in entries:
        assert datetime.fromisoformat(entry["time"]).tzinfo is not None
    assert read_log(tmp_path, end) == ([], end)

    sink = LogSink(tmp_path, 3, most=end + 10)
    sink.note("x" * 100)
    assert [e["text"] for e in read_log(tmp_path, end)[0]] == ["x" * 100]
    assert (tmp_path / "log.1.jsonl").stat().st_size == end


WANDB_RUN = """
import sys, pathlib, psutil, time
from rlcore.metrics.logger import open_logger
from rlcore.metrics.specs import LoggingSpec
folder, fail = pathlib.Path(sys.argv[1]), sys.argv[2] == "fail"
spec = LoggingSpec(console="off", wandb="offline")
logger = open_logger(folder, spec, config={"seed": 1}, total_steps=2)
import wandb
while wandb.run is None:  # it starts beside
    time.sleep(0.05)
assert psutil.Process().children(recursive=True), "W&B has a service process while the run goes on"
for step in (1, 2):
    sample = {"prompt": "1+1=", "response": "2" * 9000, "reward": 1.0, "actor": None}
    logger.samples(f"step_{step:06d}", [sample])
    logger.samples("eval_000000_digits", [sample | {"reward": None}] * 100)
    logger.log({"step": step, "reward/mean": 0.5, "grad_norm": float("nan")})
try:
    with logger:
        if fail:
            raise RuntimeError("the run failed")
        logger.finish({"seconds": 1.0})
except RuntimeError:
    pass
left = psutil.Process().children(recursive=True)
sys.exit(f"left running: {left}" if left else 0)
"""


# of other programs: the run's own settings are in force
OTHERS = {
    "WANDB_MODE": "online",
    "WANDB_RUN_ID": "theirs",
    "WANDB_PROJECT": "theirs",
    "WANDB_RESUME": "must",
    "WANDB_DIR": "/nowhere",
    "WANDB_NAME": "theirs",
    "WANDB_SILENT": "false",
    "https_proxy": "http://127.0.0.1:1",
}


def test_without_wandb_installed_it_is_off_with_a_sentence_or_refused(tmp_path, monkeypatch):
    def none(name):
        raise importlib.metadata.PackageNotFoundError(name)

    assert wandb_mode(LoggingSpec()) == "offline"
    monkeypatch.setattr(importlib.metadata, "version", none)
    assert wandb_mode(LoggingSpec(wandb="disabled")) == "disabled"
    with open_logger(tmp_path, LoggingSpec(console="off"), config={}, total_steps=1) as logger:
        logger.finish({})
    assert "W&B is off: the package wandb is not installed" in (tmp_path / "log.jsonl").read_text()
    assert not (tmp_path / "wandb").exists()
    with pytest.raises(UserError, match=r"logging\.wandb=online needs .*rlcore\[wandb\]"):
        open_logger(tmp_path, LoggingSpec(console="off", wandb="online"), config={}, total_steps=1)


@pytest.mark.processes
@pytest.mark.parametrize("how", ["finish", "fail"])
def test_wandb_offline_is_silent_and_leaves_nothing_running(tmp_path, how):
    done = subprocess.run(
        [sys.executable, "-c", WANDB_RUN, str(tmp_path), how],
        env=os.environ | OTHERS,
        capture_output=True,
        text=True,
        timeout=deadline(120),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "" and done.stderr == ""
    files = list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 1 and files[0].stat().st_size > 0
    assert (tmp_path / "wandb" / "run_id").read_text() in files[0].name
    tables = files[0].parent / "files/media/table/samples"
    for name, rows, reward in (("training", 1, 1.0), ("digits", 64, None)):
        found = [json.loads(file.read_text()) for file in sorted(tables.glob(f"{name}_*"))]
        assert len(found) == 2 and all(len(table["data"]) == rows for table in found)
        row = dict(zip(found[0]["columns"], found[0]["data"][0]))
        assert (row["prompt"], row["reward"], row["actor"]) == ("1+1=", reward, None)
        assert len(row["response"]) == 4000


class FakeWandb:
    """The package, whose start takes until it is `allowed`, or fails."""

    Error, Settings, Table = ValueError, dict, dict

    def __init__(self, failing=""):
        self.allowed = threading.Event()
        self.failing = failing
        self.steps, self.summary = [], {}

    def init(self, **settings):
        assert self.allowed.wait(deadline(60))
        if self.failing:
            raise OSError(self.failing)
        return self

    def log(self, values, step):
        self.steps.append(step)

    def finish(self, exit_code):
        assert exit_code == 0

    def teardown(self):
        pass


class RisingWandb:
    """The package as far as steps go: a row of a step that is not above the last one of its run is
    dropped, as W&B does."""

    Error, Settings, Table = ValueError, dict, dict

    def __init__(self):
        self.runs = {}

    def init(self, *, id, **settings):
        self.shown = self.runs.setdefault(id, [])
        return self

    def log(self, values, step):
        if not self.shown or step > self.shown[-1][0]:
            self.shown.append((step, values["reward/mean"]))

    def finish(self, exit_code):
        pass

    def teardown(self):
        pass


def logged_parts(folder, *parts):
    """Rows of processes, one after the other, each (resume step, last step, reward)."""
    spec = LoggingSpec(console="off", wandb="offline")
    for resumed, last, reward in parts:
        with open_logger(folder, spec, config={}, total_steps=9) as logger:
            logger.resume_at(resumed)
            for step in range(resumed + 1, last + 1):
                logger.log({"step": step, "reward/mean": reward})


def test_wandb_goes_on_where_the_rows_were_cut(tmp_path, monkeypatch):
    fake = RisingWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    logged_parts(tmp_path, (0, 6, 1.0), (4, 8, 2.0))
    ids = list(fake.runs)
    assert len(ids) == 2 and (tmp_path / "wandb" / "run_id").read_text() == ids[1]
    assert fake.runs[ids[0]] == [(n, 1.0) for n in range(1, 7)]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert fake.runs[ids[1]] == [(row["step"], row["reward/mean"]) for row in rows]
    assert [reward for _, reward in fake.runs[ids[1]]] == [1.0] * 4 + [2.0] * 4
    logged_parts(tmp_path, (8, 9, 3.0))  # nothing was cut: the same run goes on
    assert list(fake.runs) == ids and fake.runs[ids[1]][-1] == (9, 3.0)


def test_wandb_goes_on_after_a_recovery_within_the_process(tmp_path, monkeypatch):
    fake = RisingWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    spec = LoggingSpec(console="off", wandb="offline")
    with open_logger(tmp_path, spec, config={}, total_steps=9) as logger:
        for resumed, last in ((0, 3), (2, 4), (0, 2)):
            logger.resume_at(resumed)
            for step in range(resumed + 1, last + 1):
                logger.log({"step": step, "reward/mean": last})
    assert list(fake.runs.values()) == [
        [(1, 3), (2, 3), (3, 3)],
        [(1, 3), (2, 3), (3, 4), (4, 4)],
        [(1, 2), (2, 2)],
    ]


def test_wandb_offline_starts_while_the_caller_goes_on(tmp_path, monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    spec = LoggingSpec(console="off", wandb="offline")
    with open_logger(tmp_path, spec, config={}, total_steps=2) as logger:
        logger.log({"step": 1})
        assert fake.steps == []
        fake.allowed.set()
        logger.log({"step": 2})
        logger.finish({"steps": 2})
    assert fake.steps == [1, 2] and fake.summary == {"summary/steps": 2}


def test_wandb_that_cannot_start_offline_costs_its_curves_and_nothing_else(tmp_path, monkeypatch):
    fake = FakeWandb("no space left")
    fake.allowed.set()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    spec = LoggingSpec(console="off", wandb="offline")
    with open_logger(tmp_path, spec, config={}, total_steps=1) as logger:
        logger.log({"step": 1})
        logger.finish({"steps": 1})
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1]
    said = [e["text"] for e in read_log(tmp_path)[0] if "W&B" in e["text"]]
    assert len(said) == 1 and "no space left" in said[0]


WANDB_LOST = """
import os, pathlib, signal, sys, threading, psutil
from rlcore.metrics import logger as loggers, sinks
from rlcore.metrics.specs import LoggingSpec
folder, number = pathlib.Path(sys.argv[1]), int(sys.argv[2])
spec = LoggingSpec(console="off", wandb="offline")
with loggers.open_logger(folder, spec, config={"seed": 1}, total_steps=2) as logger:
    logger.log({"step": 1})
    import wandb
    noted = threading.Event()
    while wandb.run is None:  # it starts beside
        noted.wait(0.02)
    if number == signal.SIGSTOP:
        sinks.ANSWER_S = 1.0
    (service,) = psutil.Process().children()
    os.kill(service.pid, number)
    for step in range(2, 5000 if number == signal.SIGKILL else 50):
        logger.log({"step": step})
        if "W&B" in (folder / "log.jsonl").read_text():
            break
        noted.wait(0.02)
    logger.log({"step": step + 1})
    logger.finish({"steps": step + 1})
left = [p for p in psutil.Process().children() if p.status() != "zombie"]
sys.exit(f"left running: {left}" if left else 0)
"""


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_service_of_wandb_costs_its_curves_and_nothing_else(tmp_path, number):
    done = subprocess.run(
        [sys.executable, "-c", WANDB_LOST, str(tmp_path), str(int(number))],
        capture_output=True,
        text=True,
        timeout=deadline(120),
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert done.stderr in ("", "wandb: ERROR Problem finishing run\n")
    said = [e["text"] for e in read_log(tmp_path)[0] if "W&B" in e["text"]]
    assert len(said) == 1 and said[0].endswith("the run continues without")
    assert ("Connection" if number == signal.SIGKILL else "has not answered") in said[0]
    steps = [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.processes
def test_disabled_loads_neither_wandb_nor_torch(tmp_path):
    code = (
        "import sys; from rlcore.metrics.logger import open_logger\n"
        "from rlcore.metrics.specs import LoggingSpec\n"
        "spec = LoggingSpec(console='plain', wandb='disabled')\n"
        "with open_logger(sys.argv[1], spec, config={}, total_steps=1) as log:\n"
        "    log.log({'step': 1}); log.finish({})\n"
        "sys.exit(str({'wandb', 'torch', 'ray'} & set(sys.modules) or ''))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=deadline(60),
    )
    assert done.stderr.strip() == ""
    assert "step 1/1" in done.stdout
    assert not (tmp_path / "wandb").exists()


def console_sink(tmp_path, *, terminal):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=160, height=50)
    return ConsoleSink(run_dir=tmp_path, total_steps=4, live=True, console=console), out


def test_without_a_terminal_a_step_is_a_line(tmp_path):
    sink, out = console_sink(tmp_path, terminal=False)
    sink.note("two [actors] are up")
    for step in (1, 2):
        sink.log(
            sanitize(row(step, **{"eval/digits/greedy": 0.5, "eval/policy_version": step - 1}))
        )
    lines = out.getvalue().splitlines()
    assert len(lines) == 3 and "two [actors] are up" in lines[0]
    for part in (
        "step 2/4",
        "reward 0.25",
        "KL 0.0001",
        "waits 25% of 2 s",
        "left 0:04",
        "digits/greedy 0.5",
    ):
        assert part in lines[2]


METRICS = sorted({*ROW, "ledger/score_errors"} - {"time/step_s"})


@given(
    st.dictionaries(st.sampled_from(METRICS), st.floats(), min_size=1),
    st.dictionaries(
        st.from_regex(r"eval/[a-z_]{1,30}/greedy", fullmatch=True), st.floats(0, 1), max_size=9
    ),
    st.integers(1, 10**9),
    st.floats(0, 1e5),
)
def test_a_line_has_at_most_120_characters(values, evaluated, step, step_s):
    sink, _ = console_sink(Path("run"), terminal=False)
    sink.total_steps = 10**9
    found = sanitize({**values, **evaluated, "step": step, "time/step_s": step_s})
    sink.digest.add(found)
    line = sink.line(found)
    assert len(line) <= 120 and line.startswith(f"step {step}/") and "left " in line
    if "reward/mean" in values:
        assert f"reward {number(found['reward/mean'])}" in line


def test_the_live_table_shows_the_run_and_the_end_a_summary_with_completions(tmp_path):
    sink, out = console_sink(tmp_path, terminal=True)
    sink.log(sanitize(row(1, **{"eval/digits/greedy": 0.25, "eval/policy_version": 0})))
    sink.log(sanitize(row(2)))
    sink.samples("step_000002", [SAMPLE, {**SAMPLE, "reward": None, "score_status": "timeout"}])
    table = Console(file=io.StringIO(), width=160)
    table.print(sink.table())
    shown = table.file.getvalue()
    for part in (
        "step 2/4",
        "0.25 ± 0.4",
        "KL 0.0001 nats",
        "eval digits/greedy",
        "0:04 remaining",
    ):
        assert part in shown
    sink.finish({"seconds": 4.0})
    end = out.getvalue()
    for part in ("eval digits/greedy", "23 ж", "32=", "not scored: timeout", "reward/mean"):
        assert part in end
    assert (
        out.getvalue().count("\x1b[?25l") == out.getvalue().count("\x1b[?25h") > 0
    )  # the cursor is back


def test_kinds_of_actors_are_compared_in_a_table(tmp_path):
    sink, out = console_sink(tmp_path, terminal=True)
    sink.log(sanitize(row(1)))
    assert "actors" not in out.getvalue()
    sink.log(sanitize(row(2, **{"mismatch/ess@bf16": 0.99, "mismatch/ess@int3": 0.41})))
    sink.finish({})
    line = next(x for x in out.getvalue().splitlines() if "mismatch/ess" in x and "0.41" in x)
    assert "0.99" in line


def test_the_end_shows_greedy_answers_before_and_after(tmp_path):
    sink, out = console_sink(tmp_path, terminal=True)
    for version, answer, reward in (
        (0, "[wrong]", 0.0),
        (4, "[between]", 0.5),
        (8, "[right]", 1.0),
    ):
        for mode in ("sampled", "greedy"):
            verdict = {**SAMPLE, "response": f"{answer} {mode}", "reward": reward}
            sink.samples(f"eval_{version:06d}_digits_{mode}", [verdict])
    sink.finish({})
    end = out.getvalue()
    assert "before" in end and "[wrong] greedy" in end and "reward 0" in end
    assert "after" in end and "[right] greedy" in end and "reward 1" in end
    assert "between" not in end and "sampled" not in end


def test_the_end_names_the_status_of_held_out_answers_without_a_score(tmp_path):
    sink, out = console_sink(tmp_path, terminal=True)
    for version, status in (
        (0, "error"),
        (4, "timeout"),
    ):  # as `cluster.sample_text.verdict` has it
        verdict = {"prompt_id": "d/heldout/0", "reward": None, "status": status, "response": "7"}
        sink.samples(f"eval_{version:06d}_digits_greedy", [verdict])
    sink.finish({})
    assert "not scored: error" in out.getvalue() and "not scored: timeout" in out.getvalue()


def test_four_boxes_of_answers_show_the_changed_ones(tmp_path):
    sink, out = console_sink(tmp_path, terminal=True)
    for version, changed in ((0, ()), (8, (2, 4, 6, 7))):
        answers = [(f"digits/heldout/{i}", str(i in changed)) for i in range(8)]
        verdicts = [{**SAMPLE, "prompt_id": name, "response": said} for name, said in answers]
        sink.samples(f"eval_{version:06d}_digits_greedy", verdicts)
    sink.finish({})
    shown = re.findall(r"heldout/(\d)  ([a-z ]+[a-z])", out.getvalue())
    assert shown == [(str(i), "other answer") for i in (2, 4, 6, 7)]


def test_the_reference_stands_with_an_answer_in_files_boxes_and_tables(tmp_path):
    asked = {"digits/heldout/1": "worked out\n#### 23", "digits/heldout/2": ""}
    sink, out = console_sink(tmp_path, terminal=True)
    logger = MetricsLogger([SamplesSink(tmp_path), sink])
    logger.reference = asked.__getitem__
    for version in (0, 8):
        verdicts = [{**SAMPLE, "prompt_id": name, "response": str(version)} for name in asked]
        logger.samples(f"eval_{version:06d}_digits_greedy", verdicts)
    lines = (tmp_path / "samples" / "eval_000008_digits_greedy.jsonl").read_text().splitlines()
    assert [json.loads(line).get("reference") for line in lines] == ["worked out\n#### 23", None]
    sink.finish({})
    assert out.getvalue().count("mreference") == 1 and "#### 23" in out.getvalue()
    (first, second) = table_rows("x", [{"reference": "23"}, {}])
    at = TABLE_COLUMNS.index("reference")
    assert (first[at], second[at]) == ("23", None)


def test_after_a_resume_first_and_before_are_the_run_s(tmp_path):
    with open_plain(tmp_path) as logger:
        logger.resume_at(0)
        for step, reward in ((1, 0.125), (2, 0.25), (3, 0.375)):
            logger.log(row(step, **{"reward/mean": reward, "eval/a/greedy": reward}))
        logger.samples("eval_000000_a_greedy", [{**SAMPLE, "response": "begun"}])
    sink, out = console_sink(tmp_path, terminal=False)
    sink.resume_at(2)
    sink.log(sanitize(row(3, **{"reward/mean": 0.5, "eval/a/greedy": 0.5})))
    sink.samples("eval_000003_a_greedy", [{**SAMPLE, "response": "ended"}])
    sink.finish({"steps": 3, "stopped": "Stopped after step 3 of 4: rlcore train resume=auto"})
    lines = [[cell.strip() for cell in line.split("│")] for line in out.getvalue().splitlines()]
    assert ["eval a/greedy", "0.125", "0.5"] in lines
    assert "begun" in out.getvalue() and "ended" in out.getvalue()
    assert "Stopped after step 3 of 4: rlcore train resume=auto" in out.getvalue()


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        ({"reward": 0.0}, {"reward": 1.0}, "turned right"),
        ({"reward": 0.1}, {"reward": 0.4}, "other answer"),
        ({"reward": 1.0}, {"reward": 0.4}, "turned wrong"),
        ({"reward": 0.1, "correct": 0.0}, {"reward": 0.5, "correct": 1.0}, "turned right"),
        ({"reward": 2.0, "correct": 0.0}, {"reward": 3.0, "correct": 0.0}, "other answer"),
        ({"reward": None, "correct": None}, {"reward": 1.0}, "other answer"),
    ],
)
def test_only_a_right_answer_turns_right(before, after, kind):
    assert change({**before, "response": "a"}, {**after, "response": "b"}) == kind


@pytest.mark.parametrize("reward, shown", [(0.5, True), (0.25, False)])
def test_a_mean_reward_stands_beside_an_accuracy_that_it_differs_from(tmp_path, reward, shown):
    sink, out = console_sink(tmp_path, terminal=False)
    names = ("eval/a/greedy", "eval/a/greedy_reward", "eval/a/mean@2", "eval/a/sampled_reward")
    # nothing was right or rewarded at the beginning
    for step, values in ((1, (0.0, 0.0, 0.0, 0.0)), (2, (0.25, reward, 0.25, 0.25))):
        sink.log(sanitize(row(step, **dict(zip(names, values)))))
    assert ("a/greedy_reward 0.5" in out.getvalue()) == shown
    assert "sampled_reward" not in out.getvalue()
    sink.finish({})
    lines = [[cell.strip() for cell in line.split("│")] for line in out.getvalue().splitlines()]
    assert (["eval a/greedy_reward", "0", "0.5"] in lines) == shown
    assert ["eval a/greedy", "0", "0.25"] in lines


def test_a_run_that_ends_before_its_first_step_still_has_an_end(tmp_path):
    sink, out = console_sink(tmp_path, terminal=True)
    sink.finish({"steps": 0})
    assert "run" in out.getvalue()


def test_numbers_are_short():
    assert [number(v) for v in (None, 3, 12345, 12345.6, 0.123456, 1e-7)] == [
        "n/a",
        "3",
        "12,345",
        "12,346",
        "0.123",
        "1e-07",
    ]
    assert [duration(s) for s in (4, 64, 3723)] == ["0:04", "1:04", "1:02:03"]
