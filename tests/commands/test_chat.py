"""`rlcore chat`: what a conversation is, and that its answers are the model's."""

import io
import os
import signal
import string
import subprocess
import sys

import pytest
import torch
from timing import deadline

from rlcore.cli import main
from rlcore.commands.chat import ChatModel, converse
from rlcore.config.compose import load
from rlcore.errors import UserError
from rlcore.models.fresh import build_fresh_model
from rlcore.models.specs import FreshModelSpec
from rlcore.models.text import load_tokenizer

SPEC = FreshModelSpec(hidden_size=32, layers=1, intermediate_size=64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("chat") / "model"
    build_fresh_model(path, "0123456789 ", SPEC, seed=0, max_len=64)
    return path


def echoed(lines, prompt=""):
    """What is written, and the conversations that a model which echoes was given."""
    given, out = [], io.StringIO()

    def answer(said, show):
        given.append([m["content"] for m in said])
        show("you said ")
        show(said[-1]["content"])
        return f"you said {said[-1]['content']}", ""

    assert converse(answer, io.StringIO(lines), out, prompt) == 0
    return out.getvalue(), given


def test_an_answer_knows_what_was_said_before_until_another_conversation_begins():
    out, given = echoed("one\n\ntwo\n/new\nthree\n/quit\nfour\n")
    assert out == "you said one\nyou said two\nyou said three\n"
    assert given == [["one"], ["one", "you said one", "two"], ["three"]]


def test_a_last_line_without_an_end_is_answered():
    assert echoed("one", prompt="> ")[0] == "> you said one\n> \n"


def test_ctrl_c_and_a_refusal_end_an_answer_and_not_the_conversation(capsys):
    out = io.StringIO()

    def answer(said, show):
        show("half")
        if said[-1]["content"] == "one":
            raise KeyboardInterrupt
        if said[-1]["content"] == "two":
            raise UserError("refused.")
        assert [m["content"] for m in said] == ["three"]
        return "whole", "cut off: here"

    assert converse(answer, io.StringIO("one\ntwo\nthree\n"), out) == 0
    assert out.getvalue() == "half\nhalf\nhalf\n"
    assert capsys.readouterr().err == "rlcore: refused.\nrlcore: cut off: here\n"


def test_an_interrupt_in_a_finalizer_ends_the_answer():
    """Python prints and drops an exception of a finalizer, and so the interrupt that it was."""

    class Finalized:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)

    out, before = io.StringIO(), signal.getsignal(signal.SIGINT)

    def answer(said, show):
        show("half")
        Finalized()
        show("whole")
        return "whole", ""

    assert converse(answer, io.StringIO("one\n"), out) == 0
    assert out.getvalue() == "half\n"
    assert signal.getsignal(signal.SIGINT) is before


def talker(folder, tmp_path, most=12, temperature=1e-6):
    words = [f"model.path={folder}", "model=path", f"run_dir={tmp_path}"]
    config = load([*words, f"rollout.temperature={temperature}"])
    return ChatModel(config, str(folder), folder, most)


def asked(text):
    return [{"role": "user", "content": text}]


def test_answers_are_the_model_s_own(folder, tmp_path):
    model, shown = talker(folder, tmp_path), []
    answer, remark = model.answer(asked("3 1 2 "), shown.append)
    tokenizer = load_tokenizer(folder)
    ids = torch.tensor([tokenizer.encode("3 1 2 ", add_special_tokens=False)])
    greedy = model._lm.generate(ids, do_sample=False, max_new_tokens=12, pad_token_id=0)
    assert answer == tokenizer.decode(greedy[0, ids.shape[1] :], skip_special_tokens=True)
    assert "".join(shown) == answer
    assert remark == "cut off: rollout.max_new_tokens=12"


def test_an_answer_ends_where_the_model_is_full_and_a_longer_question_is_refused(folder, tmp_path):
    model = talker(folder, tmp_path, most=100)
    answer, remark = model.answer(asked("1" * 60), lambda piece: None)
    assert len(answer) == 4
    assert remark.endswith("fills the 64 tokens that the model holds: /new")
    with pytest.raises(UserError, match="holds 64 tokens and this conversation has 64: begin"):
        model.answer(asked("1" * 64), lambda piece: None)


@pytest.mark.processes
def test_a_conversation_by_pipes(tmp_path):
    """Ctrl-C ends an answer and, between answers, the command; no byte ends either."""
    spec = FreshModelSpec(hidden_size=32, layers=1, intermediate_size=64)
    folder = tmp_path / "model"
    letters = string.ascii_letters + string.punctuation + " "  # no line ends within an answer
    build_fresh_model(folder, letters, spec, seed=0, max_len=1 << 14)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.content == 'no' %}{{ raise_exception('not this') }}"
        "{% endif %}{{ m.content }} {% endfor %}"
    )
    words = ["chat", f"model={folder}", "model.max_len=30000", "rollout.max_new_tokens=20000"]
    words.append("rollout.temperature=1e-6")
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-m", "rlcore.cli", *words],
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        cwd=tmp_path,
    ) as process:
        try:
            stopped = [_stopped(process, line) for line in (b"one\n", b"\xff caf\xc3\n")]
            out, said = process.communicate(
                b"no\n" + b"x" * (1 << 14) + b"\n/new\n", timeout=deadline(60)
            )
        finally:
            process.kill()
    assert process.returncode == 0, said
    lines = [line for line in said.decode().splitlines() if line.startswith("rlcore: ")]
    assert "loading" in lines[0] and "/quit or Ctrl-D ends" in lines[1]
    assert "not this" in lines[2] and "begin another one with /new" in lines[3]
    assert len(lines) == 4 and "Traceback" not in said.decode() and out == b"\n\n"
    assert all(1 < len(answer) < 1 << 14 for answer in stopped)


def _stopped(process, asked):
    """The answer so far, and the end of its line, when it is stopped soon after it begins."""
    process.stdin.write(asked)
    process.stdin.flush()
    found = os.read(process.stdout.fileno(), 1)
    process.send_signal(signal.SIGINT)
    while not found.endswith(b"\n"):
        found += os.read(process.stdout.fileno(), 1 << 16)
    return found


def test_a_folder_without_a_model_is_one_sentence(tmp_path, capsys):
    assert main(["chat", f"model={tmp_path}", f"run_dir={tmp_path / 'run'}"]) == 2
    assert "model.path=" in capsys.readouterr().err


def test_a_diffusion_model_is_refused(tmp_path, capsys):
    words = ["experiment=diffusion", f"run_dir={tmp_path}"]
    assert main(["chat", *words]) == 2
    assert "rlcore chat talks to causal models only" in capsys.readouterr().err
