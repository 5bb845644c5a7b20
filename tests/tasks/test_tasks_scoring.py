"""The scorer with real grading processes: whatever a grader does, its sample alone has a failed
score."""

import contextlib
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
from dataclasses import replace

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from timing import deadline, wait_for_end, wait_until

from rlcore.errors import DeadlineExceeded, StageError, UserError
from rlcore.tasks import make_task, scoring, tasks_with_tokens
from rlcore.tasks.grading_process import WorkerDied, WorkerProcess
from rlcore.tasks.scoring import Scorer
from rlcore.tasks.specs import EvalTaskSpec, GradingSpec
from rlcore.testing.records import make_answer

pytestmark = pytest.mark.processes

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
    if what == "daemon":  # in a session of its own, and without a parent
        subprocess.run(["sh", "-c", f"setsid sleep 600 & echo $! > {rest}"], check=True)
    if what == "helper":
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        with open(rest, "w") as out:
            out.write(str(child.pid))
    if what == "temporary":
        with open(rest, "w") as out:
            out.write(tempfile.mkdtemp())
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
        hold()
    if what == "fork":
        os.fork()
        return float(len(response))
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
    while what == "shout-on":
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


def answer(text, number, prompt_id="t/train/0"):
    return make_answer(number, 0, text, prompt_id=prompt_id)


def file_task(args):
    return {"t": EvalTaskSpec(name="file", args=args)}


def graders(**settings):
    """Short deadlines and little memory, unless a test says otherwise."""
    return GradingSpec(**{"grade_timeout_s": deadline(1.0), **settings})


def workers(process=None):
    """Grading processes of a process, of this one by default, without those that watch them."""
    children = (process or psutil.Process()).children(recursive=True)
    found = {p.pid: p for p in children if "grading_worker" in " ".join(p.cmdline())}
    return [p for p in found.values() if p.ppid() in found]


def run(tasks, texts, *, prompt_ids=None, **settings):
    """Score `texts`; their scores in the order they were submitted, after closing the scorer."""
    scored = []
    scorer = Scorer(tasks, graders(**settings), on_scored=scored.extend)
    try:
        ids = prompt_ids or ["t/train/0"] * len(texts)
        scorer.submit([answer(text, i, ids[i]) for i, text in enumerate(texts)])
        scorer.drain(deadline(90))
    finally:
        scorer.close()
    assert scorer.unfinished == 0
    assert sorted(a.text for a, _ in scored) == sorted(texts)
    assert all((a.group_id, a.draw_id) == (s.group_id, s.draw_id) for a, s in scored)
    scores = sorted((s for _, s in scored), key=lambda s: s.group_id)
    counts = [sum(s.status == status for s in scores) for status in ("ok", "error", "timeout")]
    assert [scorer.scored, scorer.errors, scorer.timeouts] == counts
    assert workers() == []
    return scores


def check_one_bad_among_good(args, bad, status, said, **options):
    results = run(file_task(args), ["fine"] * 5 + [bad] + ["fine"] * 5, **options)
    assert [s.status for s in results] == ["ok"] * 5 + [status] + ["ok"] * 5
    assert [s.reward for s in results] == [1.0] * 5 + [None] + [1.0] * 5
    assert said in results[5].error and "\n" not in results[5].error
    assert results[5].parts == {}
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
    check_one_bad_among_good(args, bad, "error", said, grader_memory_mib=2048)


@pytest.mark.parametrize("bad", ["sleep", "deaf", "shout-on"])
def test_a_grader_past_its_deadline_gives_a_timeout(args, bad):
    limit_s = deadline(0.5)
    late = check_one_bad_among_good(args, bad, "timeout", "deadline of", grade_timeout_s=limit_s)
    assert late.seconds >= limit_s


def test_output_does_not_block_a_grader(args):
    assert [
        s.reward for s in run(file_task(args), ["shout", "fine"], grade_timeout_s=deadline(30))
    ] == [
        1.0,
        1.0,
    ]


def test_rewards_and_parts_are_passed_on(args):
    results = run(file_task(args), ["return parts", "return true"])
    assert [(s.reward, s.parts) for s in results] == [(0.5, {"style": 0.25}), (1.0, {})]


def test_the_answers_of_an_evaluation_are_passed_on_as_votes():
    scored = []
    scorer = Scorer({"d": EvalTaskSpec(name="digits")}, graders(), on_scored=scored.extend)
    try:
        purposes = ("eval/0/d/sampled", "train")
        scorer.submit(
            [
                make_answer(i, 0, " 17", prompt_id="d/train/0", purpose=p)
                for i, p in enumerate(purposes)
            ]
        )
        scorer.drain(deadline(90))
    finally:
        scorer.close()
    assert {a.purpose: s.answer for a, s in scored} == {"eval/0/d/sampled": "17", "train": ""}


BY_TOKEN = """
def score(item, response, tokens):
    rewards = [float(token.isdigit()) for token in tokens]
    return (rewards[1:] if response == "short" else rewards), {"digits": sum(rewards)}
"""


def test_a_grader_may_see_and_reward_every_token(args, tmp_path):
    (tmp_path / "tokens.py").write_text(BY_TOKEN)
    task = file_task({**args, "grader": f"{tmp_path}/tokens.py:score"})
    assert tasks_with_tokens(task) == {"t"} and not tasks_with_tokens(file_task(args))
    scored = []
    scorer = Scorer(task, graders(), on_scored=scored.extend)
    pieces = ("a", "7", "")  # the last token ends the response
    try:
        scorer.submit(
            [
                replace(answer(text, i), tokens=3, pieces=pieces)
                for i, text in enumerate(["a7", "short", "a7"])
            ]
        )
        scorer.drain(deadline(90))
    finally:
        scorer.close()
    scores = sorted((s for _, s in scored), key=lambda s: s.group_id)
    assert [s.status for s in scores] == ["ok", "error", "ok"]
    assert scores[1].error == "ValueError: the grader rewards 2 tokens, and the response has 3"
    assert scores[0].token_rewards == (0.0, 1.0, 0.0) and scores[0].reward == 1.0
    assert scores[0].parts == {"digits": 1.0}
    assert (scorer.scored, scorer.errors) == (2, 1)


def test_an_item_whose_process_died_once_is_tried_again(args, tmp_path):
    results = run(file_task(args), ["fine", f"die-once {tmp_path}/mark", "fine"])
    assert [s.status for s in results] == ["ok"] * 3


def test_many_bad_ones_in_two_processes(args):
    texts = ["fine", "die", "deaf", "raise", "sleep"] * 3 + ["fine"] * 60
    results = run(file_task(args), texts, grader_processes=2, grade_timeout_s=deadline(0.3))
    assert [s.status for s in results] == [
        "ok",
        "error",
        "timeout",
        "error",
        "timeout",
    ] * 3 + ["ok"] * 60


def test_what_a_hanging_grader_started_is_killed_with_it(args, tmp_path):
    results = run(file_task(args), [f"children {tmp_path}/pid"], grade_timeout_s=deadline(0.5))
    assert results[0].status == "timeout"
    pid = int((tmp_path / "pid").read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("what", ["daemon", "helper"])
def test_what_a_grader_started_in_another_session_ends(args, tmp_path, what):
    """Without a parent as soon as it is seen, else with the grading process."""
    at = tmp_path / "pid"
    scorer = Scorer(file_task(args), graders(), on_scored=lambda scored: None)
    with contextlib.closing(scorer):
        scorer.submit([answer(f"{what} {at}", 0)])
        wait_until(lambda: at.is_file() and at.read_text().strip(), deadline(60), "the child")
        pid = int(at.read_text())
        if what == "daemon":
            wait_until(lambda: not psutil.pid_exists(pid), deadline(20), "the daemon's end")
        else:
            assert psutil.pid_exists(pid)
    assert not psutil.pid_exists(pid)


def test_temporary_files_go_with_the_process(args, tmp_path):
    results = run(file_task(args), [f"temporary {tmp_path}/where"], grade_timeout_s=deadline(0.5))
    assert results[0].status == "timeout"
    assert not os.path.exists((tmp_path / "where").read_text())


def test_the_label_of_the_prompt_id_picks_the_task():
    tasks = {
        "train": EvalTaskSpec(name="digits"),
        "long": EvalTaskSpec(name="digits", args={"op": "copy", "min_digits": 9, "max_digits": 9}),
    }
    expected = [
        make_task(t.name, t.args, label=label).item("heldout", 3).answer
        for label, t in tasks.items()
    ]
    results = run(
        tasks,
        [*expected, expected[0]],
        prompt_ids=["train/heldout/3", "long/heldout/3", "long/heldout/3"],
    )
    assert [s.reward for s in results] == [1.0, 1.0, 0.0]


def test_a_grader_that_forks_answers_once_and_shifts_no_later_reward(args):
    lengths = range(4, 12)
    texts = [
        f"return {'true' if n % 2 else 'parts'}" if n % 3 else "fork" + " " * n for n in lengths
    ]
    expected = [1.0 if n % 2 else 0.5 for n in lengths]
    expected = [e if n % 3 else 4.0 + n for n, e in zip(lengths, expected)]
    assert [s.reward for s in run(file_task(args), texts)] == expected


# A process that answers every item with the bytes that it is asked with.
ODD_WORKER = """
import json, socket, sys
link = socket.socket(fileno=int(sys.argv[1]))
lines = link.makefile("rb")
next(lines)
link.sendall(b'{"ready": true}\\n')
for line in lines:
    for number, answer in json.loads(line):
        link.sendall(answer.replace("ID", str(number)).encode() + b"\\n")
"""
ODD_ANSWERS = st.sampled_from(
    [
        '{"id": ID}',
        '{"id": ID}\n{"id": ID}',
        '{"id": 99}',
        '{"id": null}',
        "[" * 100_000,
        "[ID]",
        "nothing",
        "",
    ]
) | st.text(max_size=20)


def test_a_process_that_answers_anything_but_what_it_was_asked_is_killed(tmp_path, monkeypatch):
    (tmp_path / "odd_worker.py").write_text(ODD_WORKER)
    monkeypatch.syspath_prepend(str(tmp_path))

    @settings(max_examples=30, deadline=None)
    @given(st.lists(ODD_ANSWERS, min_size=1, max_size=4))
    def check(said):
        worker = WorkerProcess("odd_worker", {}, who="it", start_timeout_s=deadline(60))
        answered = []
        try:
            worker.ask([[text] for text in said], deadline(60))
            for number in range(len(said)):
                answered.append((number, worker.receive(deadline(60))["id"]))
        except WorkerDied:
            assert not worker.alive
        finally:
            worker.close()
        assert all(asked == given for asked, given in answered)
        honest = list(itertools.takewhile(lambda text: text == '{"id": ID}', said))
        assert len(answered) >= len(honest)

    check()


def test_descriptors_above_1023_do_not_end_scoring(args):
    low, high = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(high, 4096), high))
        while not taken or taken[-1] < 1024:
            taken.append(os.dup(0))
        assert [s.reward for s in run(file_task(args), ["fine"] * 3)] == [1.0] * 3
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (low, high))


def test_finished_scores_do_not_wait_for_a_slow_one(args):
    arrived = []

    def on_scored(done):
        arrived.extend(score.status for _, score in done)

    scorer = Scorer(file_task(args), graders(grade_timeout_s=deadline(3600)), on_scored=on_scored)
    try:
        scorer.submit([answer(text, i) for i, text in enumerate(["fine", "fine", "deaf"])])
        # They arrive together, or one after the other if the first was handed over early.
        wait_until(lambda: len(arrived) == 2, 60, "the two scores")
        assert arrived == ["ok", "ok"]
        wait_until(lambda: scorer.unfinished == 1, 60, "their count, which follows")
        with pytest.raises(DeadlineExceeded, match="1 answers were not graded within"):
            scorer.drain(0.1)
    finally:
        scorer.close()  # does not wait for the hanging grader
    with pytest.raises(StageError, match="closed"):
        scorer.submit([])


def test_scores_of_cheap_graders_are_handed_over_together(args, monkeypatch):
    monkeypatch.setattr(scoring, "HAND_OVER_S", 3600.0)
    handed_over = []

    def on_scored(done):
        handed_over.append(len(done))

    scorer = Scorer(file_task(args), graders(), on_scored=on_scored)
    try:
        for count in (5 * scoring.MAX_CHUNK + 1, 1):
            scorer.submit([answer("fine", i) for i in range(count)])
            scorer.drain(deadline(60))  # the last ones wait for no others
        assert handed_over == [5 * scoring.MAX_CHUNK + 1, 1]
    finally:
        scorer.close()


COUNTED = """
from pathlib import Path

from rlcore.tasks.digits import Digits
from rlcore.types import Grade, Item


class Counted(Digits):
    def __init__(self, *, made, meta):
        super().__init__()
        self.made, self.meta = Path(made), meta

    def item(self, split, index):
        with self.made.open("a") as file:
            file.write(f"{index} ")
        return Item(f"counted/{split}/{index}", str(index), str(index), dict(self.meta))

    def grade(self, item, response):
        seen = item.meta.get("seen", False)
        item.meta["seen"] = True
        return Grade(float(item.question == response and not seen))
"""


@pytest.mark.parametrize(("meta", "times"), [({}, 1), ({"tests": "long"}, 4)])
def test_a_small_problem_is_made_once_for_its_answers_and_new_to_each(tmp_path, meta, times):
    """One with further contents is made for each: it may be large, or shared."""
    (tmp_path / "task.py").write_text(COUNTED)
    made = tmp_path / "made"
    args = {"made": str(made), "meta": meta}
    tasks = {"t": EvalTaskSpec(name=f"{tmp_path}/task.py:Counted", args=args)}
    indices = [*range(3), *range(3)] * 2
    ids = [f"t/train/{index}" for index in indices]
    scores = run(tasks, [str(index) for index in indices], prompt_ids=ids)
    assert [score.reward for score in scores] == [1.0] * 12
    assert sorted(made.read_text().split()) == sorted("012" * times)


def test_a_process_killed_between_two_batches_is_replaced(args):
    scored = []
    scorer = Scorer(file_task(args), graders(grade_timeout_s=deadline(5)), on_scored=scored.extend)
    try:
        for _ in range(3):
            scorer.submit([answer("fine", 0)])
            scorer.drain(deadline(60))
            (worker,) = workers()
            os.kill(worker.pid, signal.SIGKILL)
        assert [s.reward for _, s in scored] == [1.0] * 3
    finally:
        scorer.close()


def test_grading_processes_die_with_a_killed_parent(args, tmp_path):
    code = (
        "import time\nfrom rlcore.tasks.scoring import Scorer\n"
        "from rlcore.tasks.specs import EvalTaskSpec, GradingSpec\n"
        f"tasks = {{'t': EvalTaskSpec(name='file', args={args!r})}}\n"
        "s = Scorer(tasks, GradingSpec(grader_processes=2), on_scored=print)\ntime.sleep(600)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", code], env=env)
    family = psutil.Process(parent.pid)
    wait_until(lambda: len(workers(family)) == 2, 60, "the grading processes")
    found = workers(family)
    parent.kill()
    parent.wait(deadline(30))
    wait_for_end(found, 20, "grading processes")


def test_workers_hold_no_models(args):
    args["grader"] = args["grader"].replace("score", "loaded")
    path = args["grader"].rpartition(":")[0]
    with open(path, "a") as source:
        source.write(
            "\ndef loaded(item, response):\n"
            "    models = ('torch', 'vllm', 'ray', 'transformers')\n"
            "    return sum(m in sys.modules for m in models), {}\n"
        )
    assert [s.reward for s in run(file_task(args), ["x"])] == [0.0]


def test_failures_of_the_caller_end_the_scorer_with_a_reason(args):
    def broken(done):
        raise RuntimeError("nowhere to put it")

    scorer = Scorer(file_task(args), graders(grade_timeout_s=deadline(5)), on_scored=broken)
    scorer.submit([answer("fine", 0)])
    with pytest.raises(StageError, match="nowhere to put it"):
        scorer.drain(deadline(60))
    with pytest.raises(StageError, match="nowhere to put it"):
        scorer.close()


def test_wrong_arguments_and_unknown_labels_are_refused_at_the_door(args):
    wrong = {"t": EvalTaskSpec(name="digits", args={"op": "x"})}
    with pytest.raises(UserError, match="choose one of: sort, reverse, copy"):
        Scorer(wrong, graders(), on_scored=print)
    scorer = Scorer(file_task(args), graders(), on_scored=print)
    try:
        with pytest.raises(ValueError, match="no task is labelled 'other'"):
            scorer.submit([answer("x", 0, "other/train/0")])
    finally:
        scorer.close()
