"""`rlcore try` of environments: episodes of a scripted model, with tokens, masks and parts."""

import contextlib
import os
import signal
import subprocess
import sys
import urllib.request
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from timing import wait_until

from rlcore.cli import main
from rlcore.cluster.placement import free_port
from rlcore.commands.try_environment import runs
from rlcore.models.fresh import build_fresh_model
from rlcore.models.specs import FreshModelSpec
from rlcore.tasks import make_task
from rlcore.testing.reward_server import HttpReply, RewardServer

pytestmark = pytest.mark.processes

BROKEN = """
class Broken:
    def reset(self, item, seed):
        raise ValueError("no game today")
    def step(self, action): ...
    def grade(self): ...
"""


def tried(capsys, *words):
    code = main(["try", "model=tiny", *words])
    out, err = capsys.readouterr()
    return code, out + err


def test_worked_turns_are_played_and_shown_with_their_masks(capsys):
    code, shown = tried(capsys, "experiment=tools_quickstart", "environment.args.taught=1", "n=2")
    assert code == 0, shown
    assert shown.count("part 1 of 1:") == 2 and "sampled in 2 turns" in shown
    lines = [line.strip() for line in shown.split("\n") if line.startswith("    ")]
    assert [line.split()[0] for line in lines[:4]] == ["given", "model", "given", "model"]
    question = lines[0].partition(": ")[2].strip('"')
    assert lines[1].endswith(f'"={question[:-1]}<eos>"')
    assert shown.count("reward 1 (correct 1, calls 1") == 2


def test_a_scripted_model_says_what_it_is_told_until_a_limit_ends_it(capsys):
    words = ["task=higher_lower", "environment=higher_lower", "environment.args.guesses=2"]
    code, shown = tried(capsys, *words, "say=x", "n=1")
    assert code == 0, shown
    assert "reward 0 (correct 0, guesses 2" in shown and shown.count("model ") == 2


def test_a_failing_environment_is_shown_and_counted(capsys, tmp_path):
    (tmp_path / "mine.py").write_text(BROKEN)
    code, shown = tried(capsys, "task=digits", f"environment={tmp_path}/mine.py:Broken", "n=1")
    assert code == 1 and "FAILED (error): reset raised ValueError: no game today" in shown


GUESS = ["task=higher_lower", "environment=higher_lower", "environment.args.guesses=2", "n=1"]


def test_a_served_model_is_asked_for_each_turn_by_tokens(capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "mine")
    choices = [
        {"text": "7", "finish_reason": "stop"},  # encoded again, with the end's token
        {"text": "not these", "finish_reason": "length", "token_ids": [5, 6, 7]},
    ]
    with RewardServer(
        lambda body, number: HttpReply(body={"choices": [choices[number]]})
    ) as server:
        code, shown = tried(capsys, *GUESS, f"url={server.url}/v1/", "served=it", "seed=5")
    assert code == 0 and f"1 episodes with the model at {server.url}/v1/" in shown, shown
    first, second = server.seen
    assert first.path == "/v1/completions" and first.authorization == "Bearer mine"
    assert first.body["model"] == "it" and first.body["return_token_ids"] is True
    prompt, later = first.body["prompt"], second.body["prompt"]
    assert later[: len(prompt)] == prompt  # and what was said, and the answer to it
    said = [line.strip() for line in shown.split("\n") if line.startswith("    model ")]
    assert said[0].startswith(f'model {len(prompt)}-{len(prompt) + 1}: "7<')
    assert said[1].startswith(f"model {len(later)}-{len(later) + 2}: ")


@pytest.mark.parametrize("reply, sentence", [
    (HttpReply(404, b"no such model"), "answered 404: no such model"),
    (HttpReply(body={"choices": []}), 'answered {"choices": []}'),
    (HttpReply(body=[1]), "answered [1]"),
    (HttpReply(body={"choices": [None]}), 'answered {"choices": [null]}'),
    (HttpReply(body=b"<html>"), "gave no answer"),
    (HttpReply(body=b"{}", cut=True), "gave no answer"),
])  # fmt: skip
def test_a_server_that_does_not_answer_so_is_named_in_a_sentence(capsys, reply, sentence):
    with RewardServer(lambda body, number: reply) as server:
        code, shown = tried(capsys, *GUESS, f"url={server.url}/v1")
    assert code == 2 and f"url={server.url}/v1 {sentence}" in shown, shown


@pytest.mark.parametrize("words, sentence", [
    (["task=digits", "say=x"], "say=x is of a model in an environment, and there is none"),
    (["task=digits", "url=http://x"], "url=http://x is of a model in an environment"),
    ([*GUESS, "url=http://x", "say=x"], "give one of them"),
    ([*GUESS, "served=it"], "served=it names the model of a server, and none is given"),
    ([*GUESS, "url=nowhere"], "url=nowhere gave no answer"),
])  # fmt: skip
def test_words_that_name_no_model_are_refused(capsys, words, sentence):
    code, shown = tried(capsys, *words)
    assert code == 2 and sentence in shown, shown


def _healthy(port):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(400)
def test_a_model_that_vllm_serves_plays(capsys, monkeypatch, tmp_path):
    alphabet = make_task("higher_lower", {}).alphabet() or ""
    fresh = FreshModelSpec(hidden_size=64, layers=1, heads=2)
    folder = build_fresh_model(tmp_path / "model", alphabet, fresh, seed=1, max_len=128)
    port = free_port()
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    argv += ["--port", str(port), "--max-model-len", "128", "--enforce-eager"]
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    log = (tmp_path / "log").open("w")
    with subprocess.Popen(argv, stdout=log, stderr=log, start_new_session=True) as server:
        try:
            wait_until(lambda: server.poll() is not None or _healthy(port), 200, every_s=0.5)
            code, shown = tried(
                capsys, *GUESS, f"model.path={folder}", f"url=http://127.0.0.1:{port}/v1"
            )
        finally:
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                os.killpg(server.pid, signal.SIGKILL)
    assert code == 0 and "reward 0" in shown, shown + (tmp_path / "log").read_text()[-2000:]
    assert shown.count("    model ") == 2


@given(st.lists(st.booleans(), min_size=1))
def test_runs_cover_the_mask_and_alternate(mask):
    found = runs(np.array(mask))
    assert [v for first, end, v in found for _ in range(first, end)] == mask
    assert all(a[2] != b[2] for a, b in pairwise(found))
