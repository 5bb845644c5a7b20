"""Runs whose reward has several parts, one of them behind HTTP: the example of docs/rewards.md."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import rows
from timing import free_port, listens, wait_until

from rlcore.config.compose import load
from rlcore.testing.reward_server import HttpReply, RewardServer, judgement

DOC = Path(__file__).resolve().parents[2] / "docs" / "rewards.md"
KEY = "sk-run-3141592653"


def block(language, holding=""):
    """The one block of the page in this language that holds a word."""
    blocks = re.findall(rf"```{language}\b.*?\n(.*?)```", DOC.read_text(), re.DOTALL)
    (found,) = (block for block in blocks if holding in block)
    return found


def example(port):
    """Words of the documented run, at another port."""
    line = block("bash", "grader.py").replace("\\\n", " ").splitlines()[-1]
    words = shlex.split(line.replace("8900", str(port)))
    assert words[:2] == ["rlcore", "train"]
    return [w for w in words[2:] if not w.startswith(("run_dir=", "experiment="))]


@pytest.fixture
def grader(tmp_path):
    """The documented service; its port."""
    (tmp_path / "grader.py").write_text(block("python", "HTTPServer"))
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "grader.py"), str(port)], stderr=subprocess.DEVNULL
    )
    wait_until(lambda: listens(port), 60, "the documented grader to start")
    yield port
    process.kill()
    process.wait()


def test_the_documented_judge_is_accepted(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "judged.yaml").write_text(
        "# @package _global_\n# A judge.\n" + block("yaml")
    )
    config = load(["run_dir=x", "experiment=judged"], tmp_path)
    judge = config.task.rewards["style"].judge
    assert judge is not None and judge.api_key_env == "JUDGE_KEY"
    assert judge.rubric.startswith("Is the reasoning easy to follow?")


@pytest.mark.engine
@pytest.mark.ranks
def test_a_run_adds_rewards_up_and_keeps_the_key(command, small, tmp_path, grader, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    run_dir = tmp_path / "run"

    def judged(body, number):
        # After the first answers the judge is away for a while, and repeats the key as it fails.
        return HttpReply(500, {"error": KEY}) if 40 <= number < 80 else judgement("Score: 5")

    with RewardServer(judged) as judge:
        style = (
            f"{{weight: 0.25, judge: {{url: '{judge.url}/v1', model: m, rubric: Judge., "
            "api_key_env: JUDGE_KEY, retries: 0, breaker_failures: 2, breaker_rest_s: 0.2}}"
        )
        run = command(
            "train",
            *small,
            *example(grader),
            f"task.rewards.style={style}",
            f"run_dir={run_dir}",
            "schedule.steps=6",
            "cluster.heartbeat_s=1",
            "logging.wandb=offline",
        )
        assert run.wait() == 0, run.text[-3000:]
        assert {seen.authorization for seen in judge.seen} == {f"Bearer {KEY}"}
    found = rows(run_dir)
    assert [row["step"] for row in found] == [1, 2, 3, 4, 5, 6]
    for row in found:
        parts = {name: row[f"reward_parts/{name}"] for name in ("task", "length", "style")}
        assert parts["style"] == 0.5 and 0 <= parts["length"] <= 1
        whole = parts["task"] + 0.5 * parts["length"] + 0.25 * parts["style"]
        assert row["reward/mean"] == pytest.approx(whole, abs=1e-5)
    assert any(row["reward_parts/length"] > 0 for row in found)
    assert found[-1]["ledger/score_errors"] > 0
    assert "the circuit breaker of task.rewards.style.judge is open: 2 requests" in run.text
    assert "task.rewards.style.judge answers again" in run.text
    # Accuracy is the task's own verdict, and no answer has a sum below what the judge gives.
    last = found[-1]
    assert last["eval/digits/greedy"] <= 1.0
    assert last["eval/digits/greedy_reward"] >= last["eval/digits/greedy"] + 0.125 - 1e-6
    saved = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert saved["task"]["rewards"]["style"]["judge"]["api_key_env"] == "JUDGE_KEY"
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    assert {"config.yaml", "report.html", "metrics.jsonl"} <= {path.name for path in files}
    assert any(path.suffix == ".wandb" for path in files)
    assert [str(path) for path in files if KEY.encode() in path.read_bytes()] == []
    assert KEY not in run.text

    # The checkpoint is evaluated by the same rewards.
    with RewardServer(lambda body, number: judgement("Score: 10")) as judge:
        words = f"task.rewards.style.judge.url={judge.url}/v1"
        evaluation = command("eval", f"run_dir={run_dir}", "resume=auto", words)
        assert evaluation.wait() == 0, evaluation.text[-3000:]
        assert judge.seen
    assert KEY not in evaluation.text


@pytest.mark.processes
def test_a_key_that_is_not_set_ends_the_command_at_once(installed, tmp_path, monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    run = installed(
        "train",
        f"run_dir={tmp_path / 'run'}",
        "task.rewards.r={http: {url: 'http://127.0.0.1:9/', api_key_env: JUDGE_KEY}}",
    )
    assert run.wait() == 2
    assert "task.rewards.r.http.api_key_env=JUDGE_KEY names a variable that the graders" in run.text
    assert not (tmp_path / "run").exists()


@pytest.mark.processes
def test_a_dry_run_says_what_the_reward_is(installed, tmp_path):
    run = installed(
        "train",
        f"run_dir={tmp_path / 'run'}",
        "dry_run=true",
        "task.rewards.r={weight: 0.5, http: {url: 'http://127.0.0.1:9/'}}",
    )
    assert run.wait() == 0, run.text[-2000:]
    assert "task: the reward is 1 x its own grader + 0.5 x r (http)" in run.text
