"""The scorer with real grading processes: whatever a grader does, its sample alone has a failed score."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import pytest

from rlcore.errors import DeadlineExceeded, StageError, UserError
from rlcore.tasks import make_task
from rlcore.tasks.scoring import Scorer
from rlcore.types import Trajectory

GRADER = """
import os, signal, subprocess, sys, tempfile, time

def hold():
    while True:
        time.sleep(0.05)

def score(item, response):
    what, _, rest = response.partition(" ")
    if what == "raise":
        raise ValueError("cannot say\\nsecond line")
    if what == "sleep":
        try:
            hold()
        except Exception:
            return 1.0
    if what == "deaf":
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
        hold()
    if what == "children":
        child = subprocess.Popen(["sleep", "600"])
        with open(rest, "w") as out:
            out.write(str(child.pid))
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
        hold()
    if what == "temporary":
        with open(rest, "w") as out:
            out.write(tempfile.mkdtemp())
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
        hold()
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "die-once" and not os.path.exists(rest):
        open(rest, "w").close()
        os._exit(3)
    if what == "memory":
        return len(bytearray(1 << 40))
    if what == "exit":
        sys.exit(1)
    if what == "shout":
        for _ in range(2000):
            print("x" * 10000)
            print("x" * 10000, file=sys.stderr)
    while what == "shout-for-ever":
        print("x" * 10000, flush=True)
    if what == "return":
        return {"nan": float("nan"), "inf": float("inf"), "text": "1", "none": None, "true": True,
                "parts": (0.5, {"style": 0.25}), "bad part": (0.5, {"style": float("nan")})}[rest]
    return 1.0
"""


@pytest.fixture
def args(tmp_path):
    (tmp_path / "grader.py").write_text(GRADER)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "q", "answer": "a"}) + "\n")
    return {"train_path": str(tmp_path / "rows.jsonl"), "grader": f"{tmp_path}/grader.py:score"}


def decode(ids):
    return "".join(map(chr, ids))


def trajectory(text, number, prompt_id="t/train/0"):
    ids = np.array([ord(c) for c in text], dtype=np.int32)
    n = len(ids)
    return Trajectory(
        prompt_ids=np.zeros(1, np.int32),
        response_ids=ids,
        logp_inf=np.zeros(n, np.float32),
        topk_ids=np.zeros((n, 0), np.int32),
        topk_logp=np.zeros((n, 0), np.float32),
        token_version=np.zeros(n, np.int32),
        actor_id="a",
        actor_kind="bf16",
        group_id=number,
        prompt_id=prompt_id,
        sample_index=0,
        finish_reason="stop",
    )


def run(tasks, texts, *, processes=1, timeout_s=1.0, prompt_ids=None, **options):
    """Score `texts`; the trajectories in the order they were submitted, and the closed scorer."""
    scored = []
    scorer = Scorer(
        tasks, decode, processes=processes, timeout_s=timeout_s, on_scored=scored.extend, start_timeout_s=60, **options
    )
    try:
        ids = prompt_ids or ["t/train/0"] * len(texts)
        scorer.submit([trajectory(text, i, ids[i]) for i, text in enumerate(texts)])
        scorer.drain(90)
    finally:
        scorer.close()
    assert scorer.unfinished == 0
    assert len(scored) == len(texts)
    counts = [sum(t.score_status == s for t in scored) for s in ("ok", "error", "timeout")]
    assert [scorer.scored, scorer.errors, scorer.timeouts] == counts
    assert [p for p in psutil.Process().children(recursive=True) if "grading_worker" in " ".join(p.cmdline())] == []
    return sorted(scored, key=lambda t: t.group_id)


def check_one_bad_among_good(args, bad, status, said, **options):
    results = run({"t": ("file", args)}, ["fine"] * 5 + [bad] + ["fine"] * 5, **options)
    assert [t.score_status for t in results] == ["ok"] * 5 + [status] + ["ok"] * 5
    assert [t.reward for t in results] == [1.0] * 5 + [None] + [1.0] * 5
    assert said in results[5].score_error and "\n" not in results[5].score_error
    assert results[5].reward_parts == {}
    return results[5]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("raise", "ValueError: cannot say second line"),
        ("exit", "SystemExit: 1"),
        ("return nan", "reward is nan, not a finite number"),
        ("return inf", "reward is inf, not a finite number"),
        ("return text", "reward is '1', not a finite number"),
        ("return none", "reward is None, not a finite number"),
        ("return bad part", "part style is nan, not a finite number"),
        ("die", "killed by SIGKILL"),
        ("memory", "more than 2048 MiB of memory"),
    ],
)
def test_a_grader_that_fails_gives_an_error(args, bad, said):
    check_one_bad_among_good(args, bad, "error", said, memory_mib=2048)


@pytest.mark.parametrize("bad", ["sleep", "deaf", "shout-for-ever"])
def test_a_grader_past_its_deadline_gives_a_timeout(args, bad):
    late = check_one_bad_among_good(args, bad, "timeout", "deadline of 0.5 s", timeout_s=0.5)
    assert late.timings["score_s"] >= 0.5


def test_output_does_not_block_a_grader(args):
    assert [t.reward for t in run({"t": ("file", args)}, ["shout", "fine"], timeout_s=30)] == [1.0, 1.0]


def test_rewards_and_parts_are_passed_on(args):
    results = run({"t": ("file", args)}, ["return parts", "return true"])
    assert [(t.reward, t.reward_parts) for t in results] == [(0.5, {"style": 0.25}), (1.0, {})]


def test_an_item_whose_process_died_once_is_tried_again(args, tmp_path):
    results = run({"t": ("file", args)}, ["fine", f"die-once {tmp_path}/mark", "fine"])
    assert [t.score_status for t in results] == ["ok"] * 3


def test_many_bad_ones_in_two_processes(args):
    texts = ["fine", "die", "deaf", "raise", "sleep"] * 3 + ["fine"] * 60
    results = run({"t": ("file", args)}, texts, processes=2, timeout_s=0.3)
    assert [t.score_status for t in results] == ["ok", "error", "timeout", "error", "timeout"] * 3 + ["ok"] * 60


def test_what_a_hanging_grader_started_is_killed_with_it(args, tmp_path):
    results = run({"t": ("file", args)}, [f"children {tmp_path}/pid"], timeout_s=0.5)
    assert results[0].score_status == "timeout"
    pid = int((tmp_path / "pid").read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_temporary_files_go_with_the_process(args, tmp_path):
    results = run({"t": ("file", args)}, [f"temporary {tmp_path}/where"], timeout_s=0.5)
    assert results[0].score_status == "timeout"
    assert not os.path.exists((tmp_path / "where").read_text())


def test_the_label_of_the_prompt_id_picks_the_task():
    tasks = {"train": ("digits", {}), "long": ("digits", {"op": "copy", "min_digits": 9, "max_digits": 9})}
    expected = [make_task(n, a, label=label).item("heldout", 3).answer for label, (n, a) in tasks.items()]
    results = run(tasks, [*expected, expected[0]], prompt_ids=["train/heldout/3", "long/heldout/3", "long/heldout/3"])
    assert [t.reward for t in results] == [1.0, 1.0, 0.0]


def test_text_is_cut_before_the_first_stop_string():
    answer = make_task("digits", {}, label="t").item("train", 0).answer
    texts = [answer, f"{answer}\n7", f"{answer}ENDx\n", f"{answer}7"]
    assert [t.reward for t in run({"t": ("digits", {})}, texts, stop=("\n", "END"))] == [1.0, 1.0, 1.0, 0.0]


def test_finished_scores_do_not_wait_for_a_slow_one(args):
    arrived = []
    first = threading.Event()

    def on_scored(done):
        arrived.append([t.score_status for t in done])
        first.set()

    scorer = Scorer({"t": ("file", args)}, decode, processes=1, timeout_s=20, on_scored=on_scored, start_timeout_s=60)
    scorer.submit([trajectory(text, i) for i, text in enumerate(["fine", "fine", "deaf"])])
    assert first.wait(15)
    assert arrived == [["ok", "ok"]]
    assert scorer.unfinished == 1
    with pytest.raises(DeadlineExceeded, match="1 trajectories were not graded within"):
        scorer.drain(0.1)
    scorer.close()  # does not wait for the hanging grader
    with pytest.raises(StageError, match="closed"):
        scorer.submit([])


def test_a_process_killed_between_two_batches_is_replaced(args):
    scored = []
    scorer = Scorer({"t": ("file", args)}, decode, processes=1, timeout_s=5, on_scored=scored.extend)
    try:
        for _ in range(3):
            scorer.submit([trajectory("fine", 0)])
            scorer.drain(60)
            workers = [p for p in psutil.Process().children() if "grading_worker" in " ".join(p.cmdline())]
            assert len(workers) == 1
            os.kill(workers[0].pid, signal.SIGKILL)
        assert [t.reward for t in scored] == [1.0] * 3
    finally:
        scorer.close()


def test_grading_processes_die_with_a_killed_parent(args, tmp_path):
    code = (
        "import time\nfrom rlcore.tasks.scoring import Scorer\n"
        f"s = Scorer({{'t': ('file', {args!r})}}, str, processes=2, timeout_s=600, on_scored=print)\n"
        "while len(s._workers) < 2:\n    time.sleep(0.01)\n"
        "print(*[w._process.pid for w in s._workers.values()], flush=True)\ntime.sleep(600)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env)
    pids = [int(p) for p in parent.stdout.readline().split()]
    assert len(pids) == 2 and all(psutil.pid_exists(p) for p in pids)
    parent.kill()
    parent.communicate(timeout=30)
    deadline = time.monotonic() + 20
    while any(psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE for p in pids):
        assert time.monotonic() < deadline, "grading processes outlived their parent"
        time.sleep(0.05)


def test_workers_hold_no_models(args):
    args["grader"] = args["grader"].replace("score", "loaded")
    path = args["grader"].rpartition(":")[0]
    with open(path, "a") as source:
        source.write(
            "\ndef loaded(item, response):\n"
            "    return sum(m in sys.modules for m in ('torch', 'vllm', 'ray', 'transformers')), {}\n"
        )
    assert [t.reward for t in run({"t": ("file", args)}, ["x"])] == [0.0]


def test_failures_of_the_caller_end_the_scorer_with_a_reason(args):
    def broken(done):
        raise RuntimeError("nowhere to put it")

    scorer = Scorer({"t": ("file", args)}, decode, processes=1, timeout_s=5, on_scored=broken, start_timeout_s=60)
    scorer.submit([trajectory("fine", 0)])
    with pytest.raises(StageError, match="nowhere to put it"):
        scorer.drain(60)
    with pytest.raises(StageError, match="nowhere to put it"):
        scorer.close()


def test_wrong_arguments_and_unknown_labels_are_refused_at_the_door(args):
    with pytest.raises(UserError, match="choose one of: sort, reverse, copy"):
        Scorer({"t": ("digits", {"op": "x"})}, decode, processes=1, timeout_s=5, on_scored=print)
    scorer = Scorer({"t": ("file", args)}, decode, processes=1, timeout_s=5, on_scored=print, start_timeout_s=60)
    try:
        with pytest.raises(ValueError, match="no task is labelled 'other'"):
            scorer.submit([trajectory("x", 0, "other/train/0")])
    finally:
        scorer.close()
