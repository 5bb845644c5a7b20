"""Whole runs by task: mixtures, rewards of several parts, environments, an agent's own process."""

import contextlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml
from conftest import rows, without_times
from run_documented import blocks
from timing import deadline, free_port, listens, wait_until

from rlcore.config.compose import load
from rlcore.models.fresh import build_fresh_model
from rlcore.models.specs import FreshModelSpec
from rlcore.models.text import load_tokenizer
from rlcore.testing.reward_server import HttpReply, RewardServer, judgement


def documented():
    """The words of the page's first command, but its run_dir."""
    words = shlex.split(blocks("docs/mixtures.md")[0].lines()[0])
    assert words[:2] == ["rlcore", "train"]
    return [w for w in words[1:] if not w.startswith("run_dir=")]


@pytest.mark.engine
@pytest.mark.ranks
def test_a_mixture_trains_and_resumes_exactly(command, small, tmp_path):
    # of `small`, what is about a single task is not this run's
    settings = [w for w in small if not w.startswith(("task.", "experiment="))]
    words = [*documented(), *settings, "schedule=on_policy", "task.arithmetic.args.max_digits=1"]
    words += ["task.digits.samples_per_prompt=6", "task.arithmetic.advantage=reinforce"]
    # partial credit and short numbers, so that rewards are mixed
    words += ["task.digits.args={min_digits: 2, max_digits: 3, credit: digits}"]
    words += ["task.digits.difficulty={problems: 6, resample_rate: 0.5}"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    first = command(*words, f"run_dir={whole}", "schedule.steps=4")
    assert first.wait() == 0, first.text[-3000:]
    second = command(*words, f"run_dir={parts}", "schedule.steps=2")
    assert second.wait() == 0, second.text[-3000:]
    third = command("train", f"run_dir={parts}", "resume=auto", "schedule.steps=4")
    assert third.wait() == 0, third.text[-3000:]
    assert [without_times(r) for r in rows(parts)] == [without_times(r) for r in rows(whole)]
    for row in rows(whole):
        assert row["task/digits/groups"] + row["task/arithmetic/groups"] == 8
        assert (
            row["train/sequences"]
            == 6 * row["task/digits/groups"] + 4 * (row["task/arithmetic/groups"])
        )
        assert row["task/arithmetic/response_length_max"] <= 8
    assert any(row["grad_norm"] > 0 for row in rows(whole))
    last = rows(whole)[-1]
    assert last["task/digits/consumed"] > last["task/arithmetic/consumed"] > 0
    assert last["task/digits/seen"] == 6
    assert {"eval/digits/greedy", "eval/arithmetic/greedy"} <= last.keys()
    shown = (whole / "samples" / "step_000001.jsonl").read_text().splitlines()
    assert {json.loads(line)["prompt_id"].split("/")[0] for line in shown} == {
        "digits",
        "arithmetic",
    }
    report = (whole / "report.html").read_text()
    assert "<h3>Tasks</h3>" in report and "Reward by task" in report


@pytest.mark.engine
@pytest.mark.ranks
@pytest.mark.slow
def test_tasks_of_one_run_are_played_in_their_own_environments(command, small, tmp_path):
    own = [w for w in small if not w.startswith(("experiment=", "task."))]
    run = command(
        *("train", "experiment=agent_quickstart", *own, f"run_dir={tmp_path}/run"),
        *("task=[higher_lower,digits,arithmetic]", "environment=none", "schedule.steps=4"),
        "task.higher_lower.environment=higher_lower",
        *("task.arithmetic.environment=attempts", "task.arithmetic.args.max_digits=1"),
        *("task.arithmetic.temperature=0.8", "task.arithmetic.max_new_tokens=5"),
        *("task.digits.args={min_digits: 2, max_digits: 2}", "rollout.max_new_tokens=4"),
        "algorithm.turn_share=0.5",
    )
    assert run.wait() == 0, run.text[-3000:]
    found = rows(tmp_path / "run")
    assert [r["step"] for r in found] == [1, 2, 3, 4]
    turns = {
        label: max(r.get(f"task/{label}/reward_parts/turns", 0.0) for r in found)
        for label in ("higher_lower", "digits", "arithmetic")
    }
    assert turns["digits"] == 0 and 1 < turns["higher_lower"] <= 3 and 1 < turns["arithmetic"] <= 3
    for row in found:
        # the learner scores every task's tokens at the temperature that sampled them
        assert row["mismatch/abs_dlogp_mean"] < 0.05
    assert found[0]["mismatch/abs_dlogp_mean"] < 1e-4
    assert {f"eval/{label}/greedy" for label in turns} <= found[-1].keys()
    assert found[-1]["ledger/score_errors"] == 0


# Runs whose reward has several parts, one of them behind HTTP: the example of docs/rewards.md.


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


# A whole run whose episodes have several turns, with an environment that fails now and then and an
# actor that is killed.


GAME = """
import time
from rlcore.environments.games import HigherLower

class Moody(HigherLower):
    def reset(self, item, seed):
        self.index = int(item.prompt_id.split("/")[-1])
        self.tame = "/heldout/" in item.prompt_id
        return super().reset(item, seed)

    def step(self, action):
        if not self.tame:
            if self.index % 10 == 3 and self._random.random() < 0.3:
                raise RuntimeError("it is in no mood")
            if self.index == 5:
                time.sleep(1000)
            time.sleep(0.02)
        return super().step(action)

    def worked(self):
        self.tame = True  # for the warm-up
        return super().worked()
"""


def processes(run, name):
    """Those of a run whose command line has the name; environments come and go meanwhile."""
    found = []
    for process in run.descendants():
        with contextlib.suppress(psutil.NoSuchProcess):  # ended, or a zombie
            found += [process] if name in " ".join(process.cmdline()) else []
    return found


@pytest.mark.engine
@pytest.mark.ranks
def test_a_run_goes_on_past_failing_environments_and_a_killed_actor(command, small, tmp_path):
    (tmp_path / "game.py").write_text(GAME)
    run_dir = tmp_path / "run"
    own = [w for w in small if not w.startswith(("experiment=", "task.args"))]
    run = command(
        "train",
        "experiment=agent_quickstart",
        *own,
        f"environment={tmp_path}/game.py:Moody",
        "environment.args={guesses: 3}",
        f"environment.step_timeout_s={deadline(2):g}",
        f"run_dir={run_dir}",
        "schedule.steps=12",
        "cluster.heartbeat_s=1",
    )
    run.wait_for(lambda: len(rows(run_dir)) >= 3, what="three steps")
    victims = processes(run, "RolloutActor")
    assert len(victims) == 1
    servers = processes(run, "environments.server")
    assert servers
    victims[0].kill()
    assert run.wait() == 0, run.text[-3000:]
    found = rows(run_dir)
    assert [r["step"] for r in found] == list(range(1, 13))
    last = found[-1]
    assert last["rollout/replacements"] == 1
    # of a group whose every episode hangs nothing is left to train on, of some others too little
    assert last["ledger/consumed"] == 12 * 8
    assert 1 <= last["ledger/failed"] == last["ledger/failed/too_few_samples"] <= 12
    assert last["ledger/admitted"] == last["ledger/consumed"] + last["ledger/failed"]
    assert last["ledger/score_timeouts"] == 4 and last["ledger/score_errors"] > 0
    assert (
        "eval/higher_lower/greedy" in last and last["eval/higher_lower/greedy_failed_scores"] == 0
    )
    assert 1 <= last["reward_parts/turns"] <= 3 and last["staleness/max"] <= 1
    # sampled by engine and learner alike, over all turns
    assert found[0]["mismatch/abs_dlogp_mean"] < 1e-4
    assert not [p for p in servers if p.is_running() and p.status() != "zombie"]
    shown = [json.loads(line) for f in (run_dir / "samples").iterdir() for line in f.open()]
    assert any(set(s["response"]) & set("<>") for s in shown if "response" in s)


# Waits in the second turn until the file says go, and leaves a mark of every episode that does.
WAITING = """
import os
import pathlib
import time
from rlcore.environments.games import HigherLower

HERE = pathlib.Path(__file__).parent

class Waiting(HigherLower):
    def reset(self, item, seed):
        self.trains = "/heldout/" not in item.prompt_id
        return super().reset(item, seed)

    def step(self, action):
        if self.trains and self._count == 1 and (HERE / "wait").exists():
            (HERE / f"mark-{os.getpid()}").touch()
            while (HERE / "wait").exists():
                time.sleep(0.05)
        return super().step(action)
"""


def stopped_in_turn_two(command, small, folder, *words):
    """A run of which every open training episode waits in its second turn, after two steps."""
    (folder / "game.py").write_text(WAITING)
    own = [w for w in small if not w.startswith(("experiment=", "task.args"))]
    run = command(
        *("train", "experiment=agent_quickstart", *own, f"run_dir={folder}/run"),
        f"environment={folder}/game.py:Waiting",
        *("environment.step_timeout_s=400", "cluster.heartbeat_s=1", "evaluation.every=1000"),
        *("evaluation.at_start=false", "checkpoint.every=1", *words),
    )
    run.wait_for(lambda: len(rows(folder / "run")) >= 2, what="two steps")
    (folder / "wait").touch()
    run.wait_for(lambda: len(list(folder.glob("mark-*"))) >= 4, what="episodes in turn two")
    return run


def trained_on(run_dir):
    """(step, prompt) of every sample that was shown of a batch; each prompt is one group's."""
    return [
        (
            int(file.stem.removeprefix("step_")),
            int(json.loads(line)["prompt_id"].rpartition("/")[2]),
        )
        for file in sorted((run_dir / "samples").glob("step_*.jsonl"))
        for line in file.open()
    ]


@pytest.mark.engine
@pytest.mark.ranks
@pytest.mark.slow
def test_an_actor_killed_in_turn_two_of_three_costs_no_group(command, small, tmp_path):
    run = stopped_in_turn_two(command, small, tmp_path, "schedule.steps=8")
    (victim,) = processes(run, "RolloutActor")
    victim.kill()
    run.wait_for(lambda: not victim.is_running() or victim.status() == "zombie", what="its end")
    (tmp_path / "wait").unlink()
    assert run.wait() == 0, run.text[-3000:]
    last = rows(tmp_path / "run")[-1]
    assert last["step"] == 8 and last["rollout/replacements"] == 1
    assert last["ledger/consumed"] == 8 * 8 == last["ledger/admitted"]
    assert last["ledger/failed"] == last.get("ledger/evicted", 0) == 0
    assert last["ledger/score_errors"] == last["ledger/score_timeouts"] == 0


@pytest.mark.engine
@pytest.mark.ranks
@pytest.mark.slow
def test_everything_killed_in_the_middle_of_episodes_loses_and_repeats_none(
    command, small, tmp_path
):
    words = ("schedule.steps=8", "logging.samples_per_step=100", "schedule.max_staleness=1")
    run = stopped_in_turn_two(command, small, tmp_path, *words)
    run.kill()
    run.wait()
    (tmp_path / "wait").unlink()
    again = command("train", f"run_dir={tmp_path}/run", "resume=auto")
    assert again.wait() == 0, again.text[-3000:]
    found = rows(tmp_path / "run")
    assert [r["step"] for r in found] == list(range(1, 9))
    last = found[-1]
    assert last["ledger/consumed"] == 8 * 8 and last["staleness/max"] <= 1
    assert last["ledger/failed"] == last.get("ledger/evicted", 0) == 0
    steps_of = {}
    for step, prompt in trained_on(tmp_path / "run"):
        steps_of.setdefault(prompt, set()).add(step)
    assert sorted(steps_of) == list(range(8 * 8))
    assert all(len(steps) == 1 for steps in steps_of.values())


@pytest.mark.engine
@pytest.mark.ranks
@pytest.mark.slow
def test_a_sparse_actor_plays_what_a_learner_of_its_rule_scores(command, small, tmp_path):
    own = [w for w in small if not w.startswith(("experiment=", "task.args"))]
    run = command(
        *("train", "experiment=agent_quickstart", *own, f"run_dir={tmp_path}/run"),
        *("actor=sparse", "actor.sparse.sparse={block_size: 16, blocks: 2, share: null}"),
        *("actor.sparse.kv_cache_gib=0.25", "learner.train_sparse=true", "schedule=on_policy"),
        # episodes of more pages than two
        *("task.args.digits=6", "environment.args.guesses=8", "rollout.max_new_tokens=8"),
        # a model of 60 warm-up steps writes few numbers of six digits
        "environment.args.forgiving=true",
        *("schedule.steps=2", "schedule.groups_per_step=8"),
    )
    assert run.wait() == 0, run.text[-3000:]
    for row in rows(tmp_path / "run"):
        assert row["reward_parts/turns"] > 6 and row["response_length/mean"] > 36
        assert row["mismatch/abs_dlogp_mean"] < 1e-4


# A whole run whose samples are made by a program in a process of its own, that calls the model
# through the endpoint.


ALPHABET = "0123456789=+- "
TEMPLATE = (
    "{% for m in messages %}{{ '-' if m.role == 'assistant' else '+' }}{{ m.content }}"
    "{{ eos_token if m.role == 'assistant' else '' }}{% endfor %}"
    "{% if add_generation_prompt %}-{% endif %}"
)
# `run` is what the run calls; `client` is another program, which knows the address alone.
AGENT = """
import pathlib
import subprocess
import sys

def run(item):
    client = pathlib.Path(__file__).with_name("client.py")
    done = subprocess.run(
        [sys.executable, str(client), item.question],
        capture_output=True, text=True, timeout=60, check=True,
    )
    said = done.stdout
    return said.count("1") / max(1, len(said)), {"letters": len(said)}
"""
CLIENT = """
import json
import os
import sys
from urllib.request import Request, urlopen

messages = [{"role": "user", "content": sys.argv[1]}]
for turn in range(2):
    asked = Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "policy", "messages": messages}).encode(),
        {
            "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
            "Content-Type": "application/json",
        },
    )
    with urlopen(asked, timeout=60) as answer:
        said = json.load(answer)["choices"][0]["message"]
    messages += [said, {"role": "user", "content": "+1"}]
print("".join(m["content"] for m in messages if m["role"] == "assistant"), end="")
"""


@pytest.fixture
def model(tmp_path):
    shape = FreshModelSpec(
        hidden_size=64, layers=2, heads=4, kv_heads=2, head_dim=32, intermediate_size=128
    )
    folder = build_fresh_model(tmp_path / "model", ALPHABET, shape, seed=0, max_len=128)
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.engine
@pytest.mark.ranks
@pytest.mark.slow
def test_requests_of_a_program_outside_train_the_model(command, model, tmp_path):
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "client.py").write_text(CLIENT)
    run_dir = tmp_path / "run"
    run = command(
        *("train", "model=path", f"model.path={model}", "model.max_len=128", "task=digits"),
        *("environment=endpoint", f"environment.args.program={tmp_path}/agent.py:run"),
        *("environment.concurrency=4", "rollout.max_new_tokens=16", "rollout.samples_per_prompt=4"),
        *("actor.bf16.kv_cache_gib=0.25", "schedule=on_policy", "schedule.steps=2"),
        *("schedule.groups_per_step=4", "learner.lr=1e-3", "learner.lr_warmup_steps=0"),
        *("evaluation.prompts=4", "evaluation.every=0", "evaluation.at_start=false"),
        *("correction=tis", "logging.wandb=disabled", "cluster.object_store_mib=128"),
        # figures of environments come with heartbeats, and a step takes a second
        *("cluster.heartbeat_s=0.2", f"run_dir={run_dir}"),
    )
    assert run.wait() == 0, run.text[-3000:]
    found = rows(run_dir)
    assert [row["step"] for row in found] == [1, 2]
    for row in found:
        # two calls an episode, all of them answered by the policy as it was
        assert row["reward_parts/turns"] == 2 and row["reward_parts/conversations"] == 1
        assert row["reward_parts/refused_calls"] == 0 and row["ledger/score_errors"] == 0
        assert row["mismatch/abs_dlogp_mean"] < 1e-4
        assert row["grad_norm"] > 0 and row["reward/mean"] > 0
        assert 0 < row["environment/call_s"] < 60 and row["environment/open"] <= 4
        faults = ("errors", "timeouts", "unreadable_turns")
        assert {row[f"environment/{name}"] for name in faults} == {0.0}
        assert row["environment/waiting"] <= 16
    assert found[-1]["ledger/consumed"] == 2 * 4 and found[-1]["policy_version"] == 2
