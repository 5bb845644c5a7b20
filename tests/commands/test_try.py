"""`rlcore try`: what the model would be asked, what graders say, and scripted episodes."""

import contextlib
import json
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
from rlcore.commands.try_task import (
    ANOTHER,
    EMPTY,
    REFERENCE,
    WORKED,
    prompts_asked,
    responses,
    verdict,
)
from rlcore.errors import UserError
from rlcore.models.fresh import build_char_tokenizer, build_fresh_model
from rlcore.models.specs import FreshModelSpec
from rlcore.tasks import make_task
from rlcore.testing.reward_server import HttpReply, RewardServer
from rlcore.types import Item, Score

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
ROWS = [{"question": f"{n}+1", "answer": str(n + 1)} for n in range(1, 6)]
GRADER = """
def grade(item, response):
    if response == "":
        raise ValueError("nothing to judge")
    return float(response == item.answer), {"length": len(response)}

def generous(item, response):
    return 1.0

def broken(item, response):
    return item.answr
"""
TASK = """
from rlcore.types import Grade, Item

class Echo:
    name = "echo"

    def __init__(self, *, word="yes"):
        self.word = word

    def size(self, split):
        return 2

    def item(self, split, index):
        return Item(f"{self.name}/{split}/{index}", f"say {self.word} {index}", f"{index}")

    def grade(self, item, response):
        return Grade(float(response == f"{self.word} {item.answer}"))

    def worked_answer(self, item):
        return f"{self.word} {item.answer}"

    def alphabet(self):
        return None
"""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "mine.py").write_text(GRADER)
    (tmp_path / "tasks.py").write_text(TASK)


@pytest.fixture
def tokenizer(tmp_path):
    made = build_char_tokenizer("0123456789+<>abcdefghijklmnopqrstuvwxyz .")
    made.chat_template = TEMPLATE
    made.save_pretrained(tmp_path / "model")
    return made


FILE = ("task=file", "task.args.train_path=rows.jsonl", "task.args.grader=mine.py:grade")


def tried(capsys, *words, code=0):
    assert main(["try", *words]) == code
    return capsys.readouterr().out


@pytest.mark.processes
def test_prompts_and_verdicts_of_a_generated_task(tmp_path, capsys):
    shown = tried(capsys, "n=2", "seed=3")
    assert "task digits: 2 training prompts, as seed=3 draws them" in shown
    assert "chat template off, since the tokenizer has none" in shown
    assert shown.count("worked answer (") == 2 and shown.count("digits/train/") == 2
    assert "worked answer 1 (2), another problem's answer 0 (2), empty response 0 (2)" in shown
    assert "0 failed scores" in shown and not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.processes
def test_the_rendered_prompt_is_what_the_model_gets(tokenizer, capsys):
    words = (*FILE, "model.path=model", "n=1", "seed=1")
    shown = tried(capsys, *words, "model.system_prompt=count", code=1)
    assert "chat template on" in shown
    (rendered,) = (line for line in shown.splitlines() if line.startswith("  | "))
    question = rendered.removeprefix("  | <system>count<user>").removesuffix("<assistant>")
    assert question in [row["question"] for row in ROWS]
    ids = tokenizer.encode(rendered.removeprefix("  | "), add_special_tokens=False)
    assert f"{len(ids)} tokens: {' '.join(map(str, ids[:16]))} ..." in shown
    off = tried(capsys, *words, "model.chat_template=off", code=1)
    assert f"  | {question}\n" in off and "off, by model.chat_template=off" in off


@pytest.mark.processes
def test_what_ends_an_answer_is_shown(tokenizer, tmp_path, capsys):
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": [1, 5]}')
    words = (*FILE, "model.path=model", "n=1", 'rollout.stop=["<pad>","a b"]')
    fifth = tokenizer.convert_ids_to_tokens(5)
    said = f'an answer ends with token 1 <eos>, token 5 {fifth}, token 0 <pad>, text "a b"\n'
    assert said in tried(capsys, *words, code=1)


@pytest.mark.processes
def test_control_characters_of_rows_do_not_reach_the_terminal(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "a\x1b[2J\r\tb", "answer": "1"}))
    (tmp_path / "g.py").write_text(GRADER)
    assert (
        main(["try", "data=rows.jsonl", "reward=g.py:grade", "n=1"]) == 1
    )  # an empty answer fails
    assert "  | a\\x1b[2J\\x0d\tb\n" in capsys.readouterr().out


@pytest.mark.processes
def test_system_turns_of_conversations_are_shown(tokenizer, tmp_path, capsys):
    system, user = {"role": "system", "content": "add"}, {"role": "user", "content": "1+1"}
    row = {"messages": [system, user, {"role": "assistant", "content": "2"}], "answer": "2"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    shown = tried(capsys, *FILE, "model.path=model", code=1)
    assert "  | <system>add<user>1+1<assistant>\n" in shown
    assert "worked answer (1 token): reward 1 (length 1)" in shown
    assert "  | [system] add\n  | [user] 1+1\n" in tried(capsys, *FILE, code=1)


@pytest.mark.processes
def test_what_a_users_grader_says_and_where_it_fails(capsys):
    shown = tried(capsys, *FILE, "n=2", code=1)
    assert "no tokenizer: model=FOLDER" in shown
    assert "reference answer: reward 1 (length 1)" in shown
    assert "another problem's answer: reward 0 (length 1)" in shown
    assert "empty response: FAILED (error): ValueError: nothing to judge" in shown
    assert "2 failed scores\n2 of 6 responses could not be scored: a run counts and drops" in shown
    generous = tried(capsys, *FILE[:2], "task.args.grader=mine.py:generous", "n=1")
    assert "does not prefer known answers to wrong ones" in generous
    broken = tried(capsys, *FILE[:2], "task.args.grader=mine.py:broken", "n=1", code=1)
    assert "the grader fails for every known answer: a run would drop" in broken
    assert "no known answers" not in broken


@pytest.mark.processes
def test_a_prompt_that_a_run_would_refuse_is_shown_with_its_sentence(tokenizer, capsys):
    words = ("model.path=model", "model.max_len=20", "rollout.max_new_tokens=8", "n=1")
    shown = tried(capsys, *FILE, *words, "task.args.answer_field=null", code=1)
    assert "REFUSED: model.max_len: prompt file/train/" in shown
    assert "no known answers" in shown


@pytest.mark.processes
def test_a_task_of_ones_own_has_none_of_the_default_tasks_arguments(capsys):
    shown = tried(capsys, "task=tasks.py:Echo", "task.args.word=no", "n=9")
    assert "task echo: 2 of 2 training prompts" in shown and '"no 1"' in shown
    assert "worked answer 1 (2), another problem's answer 0 (2)" in shown


@pytest.mark.processes
def test_every_task_of_a_mixture_is_shown_with_its_own_settings(capsys):
    digits = ",".join(f"'{n}'" for n in range(10))
    shown = tried(capsys, "task=[digits,arithmetic]", "n=1", f"task.digits.stop=[{digits}]")
    first, second = shown.split("task arithmetic: 1 training prompt,")
    assert "digits/train/" in first and "arithmetic/train/" in second
    # cut at its first character, as a sampled answer would be
    assert "worked answer 0 (1)" in first and "does not prefer known answers" in first
    assert "worked answer 1 (1)" in second


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["n=0"], "n=0 is not accepted"),
        (["n=some"], "n=some is not accepted"),
        (["task=none.py:Task"], "task.name="),
        (["task=file"], "task.args.grader has no default"),
        (["model.path=nowhere"], "model.path="),
    ],
)
def test_what_cannot_be_tried_is_refused_in_a_sentence(capsys, words, said):
    assert main(["try", *words]) == 2
    (sentence,) = capsys.readouterr().err.strip().splitlines()
    assert said in sentence


def test_the_number_of_prompts():
    assert prompts_asked("7") == 7 and prompts_asked(None) > 0
    with pytest.raises(UserError, match="n=-1"):
        prompts_asked("-1")


class Known:
    def worked_answer(self, item):
        return item.meta.get("worked")


def test_responses_are_the_known_answer_another_and_nothing():
    one, same, two = Item("t/train/0", "a", "1"), Item("t/train/1", "b", "1"), Item("", "c", "2")
    assert responses(Known(), one, [same, two]) == [(REFERENCE, "1"), (ANOTHER, "2"), (EMPTY, "")]
    assert responses(Known(), one, [same]) == [(REFERENCE, "1"), (EMPTY, "")]
    assert responses(Known(), Item("t/train/2", "d", ""), []) == [(EMPTY, "")]
    worked = Item("t/train/3", "e", "3", {"worked": "so 3"})
    assert responses(Known(), worked, [])[0] == (WORKED, "so 3")


def test_verdicts_in_words():
    ok = Score(0, 0, "d", "ok", 0.5, {"correct": 0.0, "format": 1.0})
    assert verdict(ok) == "reward 0.5 (correct 0, format 1)"
    late = Score(0, 0, "d", "timeout", error="the grader passed its deadline of 10 s")
    assert verdict(late) == "FAILED (timeout): the grader passed its deadline of 10 s"


# `rlcore try` of environments: episodes of a scripted model, with tokens, masks and parts.


BROKEN = """
class Broken:
    def reset(self, item, seed):
        raise ValueError("no game today")
    def step(self, action): ...
    def grade(self): ...
"""


def tried_episodes(capsys, *words):
    code = main(["try", "model=tiny", *words])
    out, err = capsys.readouterr()
    return code, out + err


@pytest.mark.processes
def test_worked_turns_are_played_and_shown_with_their_masks(capsys):
    code, shown = tried_episodes(
        capsys, "experiment=tools_quickstart", "environment.args.taught=1", "n=2"
    )
    assert code == 0, shown
    assert shown.count("part 1 of 1:") == 2 and "sampled in 2 turns" in shown
    lines = [line.strip() for line in shown.split("\n") if line.startswith("    ")]
    assert [line.split()[0] for line in lines[:4]] == ["given", "model", "given", "model"]
    question = lines[0].partition(": ")[2].strip('"')
    assert lines[1].endswith(f'"={question[:-1]}<eos>"')
    assert shown.count("reward 1 (correct 1, calls 1") == 2


@pytest.mark.processes
def test_a_scripted_model_says_what_it_is_told_until_a_limit_ends_it(capsys):
    words = ["task=higher_lower", "environment=higher_lower", "environment.args.guesses=2"]
    code, shown = tried_episodes(capsys, *words, "say=x", "n=1")
    assert code == 0, shown
    assert "reward 0 (correct 0, guesses 2" in shown and shown.count("model ") == 2


@pytest.mark.processes
def test_a_failing_environment_is_shown_and_counted(capsys, tmp_path):
    (tmp_path / "mine.py").write_text(BROKEN)
    code, shown = tried_episodes(
        capsys, "task=digits", f"environment={tmp_path}/mine.py:Broken", "n=1"
    )
    assert code == 1 and "FAILED (error): reset raised ValueError: no game today" in shown


GUESS = ["task=higher_lower", "environment=higher_lower", "environment.args.guesses=2", "n=1"]


@pytest.mark.processes
def test_a_served_model_is_asked_for_each_turn_by_tokens(capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "mine")
    choices = [
        {"text": "7", "finish_reason": "stop"},  # encoded again, with the end's token
        {"text": "not these", "finish_reason": "length", "token_ids": [5, 6, 7]},
    ]
    with RewardServer(
        lambda body, number: HttpReply(body={"choices": [choices[number]]})
    ) as server:
        code, shown = tried_episodes(capsys, *GUESS, f"url={server.url}/v1/", "served=it", "seed=5")
    assert code == 0 and f"1 episodes with the model at {server.url}/v1/" in shown, shown
    first, second = server.seen
    assert first.path == "/v1/completions" and first.authorization == "Bearer mine"
    assert first.body["model"] == "it" and first.body["return_token_ids"] is True
    prompt, later = first.body["prompt"], second.body["prompt"]
    assert later[: len(prompt)] == prompt  # and what was said, and the answer to it
    said = [line.strip() for line in shown.split("\n") if line.startswith("    model ")]
    assert said[0].startswith(f'model {len(prompt)}-{len(prompt) + 1}: "7<')
    assert said[1].startswith(f"model {len(later)}-{len(later) + 2}: ")


@pytest.mark.processes
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
        code, shown = tried_episodes(capsys, *GUESS, f"url={server.url}/v1")
    assert code == 2 and f"url={server.url}/v1 {sentence}" in shown, shown


@pytest.mark.processes
@pytest.mark.parametrize("words, sentence", [
    (["task=digits", "say=x"], "say=x is of a model in an environment, and there is none"),
    (["task=digits", "url=http://x"], "url=http://x is of a model in an environment"),
    ([*GUESS, "url=http://x", "say=x"], "give one of them"),
    ([*GUESS, "served=it"], "served=it names the model of a server, and none is given"),
    ([*GUESS, "url=nowhere"], "url=nowhere gave no answer"),
])  # fmt: skip
def test_words_that_name_no_model_are_refused(capsys, words, sentence):
    code, shown = tried_episodes(capsys, *words)
    assert code == 2 and sentence in shown, shown


def _healthy(port):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


@pytest.mark.processes
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


@pytest.mark.processes
@given(st.lists(st.booleans(), min_size=1))
def test_runs_cover_the_mask_and_alternate(mask):
    found = runs(np.array(mask))
    assert [v for first, end, v in found for _ in range(first, end)] == mask
    assert all(a[2] != b[2] for a, b in pairwise(found))
