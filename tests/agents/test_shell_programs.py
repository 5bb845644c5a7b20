"""Shell commands that call the model as an endpoint, and the memory of what they start."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from pathlib import Path

import pytest
from agent_fakes import TEMPLATE
from environment_fakes import ScriptedSampler, ask
from timing import deadline

from rlcore.agents.shell_program import shell_program
from rlcore.environments import environment_maker
from rlcore.environments.play import Play
from rlcore.environments.specs import EnvironmentJob, EnvironmentSpec
from rlcore.errors import UserError
from rlcore.models.fresh import build_char_tokenizer
from rlcore.tasks import make_task
from rlcore.tasks.specs import EvalTaskSpec
from rlcore.testing.reward_server import HttpReply, RewardServer

PAGE = Path(__file__).parents[2] / "docs" / "agents.md"
AGENT = """
import json, os, sys, urllib.request
item = json.load(sys.stdin)
print("asked", item["question"], flush=True)
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"messages": [{"role": "user", "content": item["question"]}]}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
open("mark", "x").close()  # fails in a folder that another episode has
def result(value):
    open(os.environ["RLCORE_RESULT"], "w").write(json.dumps(value))
"""


def tokenizer():
    made = build_char_tokenizer("0123456789=+-")
    made.chat_template = TEMPLATE
    return made


@pytest.fixture
def play(tmp_path):
    plays = []

    def run(ends, *, count=1, command=None, said=None, **settings):
        script = tmp_path / "agent.py"
        script.write_text(AGENT + ends)
        args = {"command": command or f"{sys.executable} -S {script}", "keep": f"{tmp_path}/kept"}
        args |= settings.pop("args", {})
        settings = {"step_timeout_s": deadline(60), **settings}
        spec = EnvironmentSpec(name="endpoint", args=args, **settings)
        job = EnvironmentJob(spec, EvalTaskSpec(name="digits"), "digits", max_len=512, run_seed=3)
        plays.append(Play(job, tokenizer(), ("bf16-0", "bf16")))
        turn = [*tokenizer().encode(said or "12"), 1]
        plays[-1].add(ask(count))
        return ScriptedSampler(plays[-1], [turn]).run(120.0)

    yield run
    for made in plays:
        made.close()


ENDS = {
    "reward": ("result(0.5)", 0.5),
    "parts": ("result({'reward': 2, 'parts': {'said': len(said)}})", 2.0),
    "answer": ("result({'answer': item['answer']})", 1.0),
    "nothing": ("", 1.0),
}


@pytest.mark.processes
@pytest.mark.parametrize("kind", ENDS)
def test_a_command_s_result_is_what_it_writes(play, tmp_path, kind):
    ends, reward = ENDS[kind]
    answer = make_task("digits", {}).item("train", 0).answer
    two = play(ends, count=2 if kind == "reward" else 1, said=answer)
    for played in two:
        assert played.score.status == "ok", played.score.error
        assert played.score.reward == reward and len(played.parts) == 1
    assert two[0].score.parts.get("said", len(answer)) == len(answer)
    assert not (tmp_path / "kept").exists()


@pytest.mark.processes
def test_a_command_that_fails_shows_its_output_and_keeps_its_folder(play, tmp_path):
    (played,) = play("print('no such thing'); sys.exit(3)")
    assert (played.score.status, played.score.reward) == ("error", None)
    assert "status 3" in played.score.error and "no such thing" in played.score.error
    (kept,) = (tmp_path / "kept").iterdir()
    assert "no such thing" in (kept / "output.txt").read_text() and (kept / "mark").exists()


@pytest.mark.processes
def test_a_command_that_hangs_is_ended_and_keeps_its_folder(play, tmp_path):
    (played,) = play(
        "print('waits', flush=True)\nimport time\ntime.sleep(1000)", step_timeout_s=deadline(2)
    )
    assert played.score.status == "timeout"
    # the server puts the folder away as it ends
    ends = time.monotonic() + deadline(20)
    while not list(tmp_path.glob("kept/*/output.txt")) and time.monotonic() < ends:
        time.sleep(0.05)
    (kept,) = (tmp_path / "kept").iterdir()
    assert "waits" in (kept / "output.txt").read_text()


@pytest.mark.processes
def test_processes_that_hold_more_than_they_may_together_are_ended(play):
    hold = "import subprocess\nhold = [sys.executable, '-S', '-c', "
    hold += "'b = bytearray(b\"1\") * (250 << 20); import time; time.sleep(1000)']\n"
    hold += "for one in [subprocess.Popen(hold) for _ in range(3)]: one.wait()"
    (played,) = play(hold, memory_mib=600)
    assert played.score.status == "error"
    assert re.search(r"held \d+ MiB, more than environment.memory_mib=600", played.score.error)


@pytest.mark.processes
@pytest.mark.skipif(not shutil.which("node"), reason="Node is not installed")
def test_the_documented_agent_of_node_plays(play, tmp_path):
    (script,) = re.findall(r"```js\n(.*?)```", PAGE.read_text(), re.S)
    (tmp_path / "agent.mjs").write_text(script)
    answer = make_task("digits", {}).item("train", 0).answer
    (played,) = play("", command=f"node {tmp_path}/agent.mjs", said=answer, memory_mib=1024)
    assert played.score.reward == 1.0, played.score.error


def test_commands_that_cannot_be_run_are_refused():
    for args, words in (
        ({"command": ""}, "is not a command"),
        ({"command": "true", "program": "a.py:run"}, "two programs"),
    ):
        with pytest.raises(UserError, match=words):
            environment_maker(EnvironmentSpec(name="endpoint", args=args), make_task("digits", {}))
    with pytest.raises(UserError, match="is not a command"):
        shell_program(None)


# `docker run` as far as the page uses it: the image is a folder with a program, which is given the
# named variables, the mounted folder and the standard input, and nothing else.
DOCKER = """
import argparse, os, subprocess, sys
parser = argparse.ArgumentParser()
parser.add_argument("run")
for flag in ("--rm", "-i"):
    parser.add_argument(flag, action="store_true")
for option in ("-e", "-v", "--add-host"):
    parser.add_argument(option, action="append", default=[])
parser.add_argument("-w")
parser.add_argument("image")
given = parser.parse_args()
assert given.run == "run" and f"{given.w}:{given.w}" in given.v and given.add_host
names = {name: os.environ[name] for name in given.e}
program = [sys.executable, "-S", given.image + "/agent.py"]
sys.exit(subprocess.run(program, env=names, cwd=given.w).returncode)
"""


@pytest.fixture
def container(tmp_path, monkeypatch):
    """The documented command, whose image is the folder of the test."""
    docker = tmp_path / "bin" / "docker"
    docker.parent.mkdir()
    docker.write_text(f"#!{sys.executable} -S\n{DOCKER}")
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{docker.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SECRET", "of the host")
    command = re.search(r"^docker run .*$", PAGE.read_text(), re.M)[0]
    return command.replace("my-agent", str(tmp_path))


@pytest.mark.processes
def test_the_documented_container_plays_with_a_stand_in_for_docker(play, container):
    ends = "result({'reward': len(said), 'parts': {'names': len(os.environ)}})"
    command = container
    where = {"bind": "0.0.0.0", "advertise": "localhost"}
    (played,) = play(ends, command=command, args=where)
    assert played.score.status == "ok", played.score.error
    assert played.score.reward == 2.0 and played.score.parts["names"] <= 5


REPAIRED = "def double(x):\n    return 2 * x\n"
WRONG = ["no file at all", "while True:\n    break\n", "def double(x):\n    return 9\n"]


@pytest.mark.processes
@pytest.mark.parametrize("answers, reward, calls", [
    ([f"Here:\n```python\n{REPAIRED}```"], 1.0, 1),
    (["def double(x): return x", REPAIRED], 1.0, 2),
    (WRONG, 0.0, 3),
])  # fmt: skip
def test_the_documented_repository_is_repaired_in_a_container(
    container, tmp_path, answers, reward, calls
):
    section = PAGE.read_text().partition("### A repository to repair")[2].partition("\n##")[0]
    agent, grader = re.findall(r"```python\n(import.*?|def grade.*?)\n```\n", section, re.S)
    (tmp_path / "agent.py").write_text(agent)
    (tmp_path / "grade.py").write_text(grader)
    rows = tmp_path / "repositories.jsonl"
    rows.write_text(re.search(r"```json\n(.*?)```", section, re.S)[1])
    words = re.search(r"```text\n(.*?)```", section, re.S)[1].split()
    named = dict(w.removeprefix("task.args.").split("=", 1) for w in words if "task.args." in w)
    args = {k: str(tmp_path / v) for k, v in named.items() if k.endswith(("path", "grader"))}
    fields = named["meta_fields"].strip("[]").split(",")
    task = make_task("file", {**args, "answer_field": None, "meta_fields": fields})
    item = task.item("train", 0)

    def answer(body, number):
        message = {"role": "assistant", "content": answers[number]}
        return HttpReply(body={"choices": [{"message": message}]})

    with RewardServer(answer) as server:
        got, parts = shell_program(container)(item, f"{server.url}/v1", "key", "policy", 7)
        asked = server.seen
    assert (got, parts["calls"]) == (reward, calls) == (got, len(asked))
    assert "def double" in asked[0].body["messages"][0]["content"]
    assert "assert" not in asked[0].body["messages"][0]["content"]  # the tests are not shown
    if calls == 3:
        assert "Error" in asked[1].body["messages"][-1]["content"]
    with pytest.raises(ValueError, match="tests of a repository"):
        task.grade(item, answers[0])


@pytest.mark.processes
@pytest.mark.skipif("RLCORE_VERIFIERS_PYTHON" not in os.environ, reason="no Python is named")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("said, reward", [("1", 1.0), ("2", 0.0)])
def test_a_taskset_of_verifiers_plays(play, tmp_path, said, reward):
    """Its first task asks what comes after 0."""
    section = PAGE.read_text().partition("### Environments of verifiers")[2]
    (tmp_path / "play.py").write_text(re.search(r"```python\n(.*?)```", section, re.S)[1])
    python = os.environ["RLCORE_VERIFIERS_PYTHON"]
    command = f"PYTHONPATH={Path(__file__).parent} {python} {tmp_path}/play.py verifiers_real"
    (played,) = play("", command=command, said=said, step_timeout_s=deadline(120))
    assert played.score.reward == reward, played.score.error
    assert played.score.parts["turns"] == 1.0 and int(played.parts[0].sampled.sum()) == 2
