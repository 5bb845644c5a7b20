"""`rlcore chat`: what a conversation is, and that its answers are the model's."""

import io

import pytest
import torch

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
        return f"you said {said[-1]['content']}"

    assert converse(answer, io.StringIO(lines), out, prompt) == 0
    return out.getvalue(), given


def test_an_answer_knows_what_was_said_before_until_another_conversation_begins():
    out, given = echoed("one\n\ntwo\n/new\nthree\n/quit\nfour\n")
    assert out == "you said one\nyou said two\nyou said three\n"
    assert given == [["one"], ["one", "you said one", "two"], ["three"]]


def test_a_last_line_without_an_end_is_answered():
    assert echoed("one", prompt="> ")[0] == "> you said one\n> \n"


def test_ctrl_c_and_a_refusal_end_an_answer_and_not_the_conversation():
    out = io.StringIO()

    def answer(said, show):
        show("half")
        if said[-1]["content"] == "one":
            raise KeyboardInterrupt
        if said[-1]["content"] == "two":
            raise UserError("refused.")
        assert [m["content"] for m in said] == ["three"]
        return "whole"

    assert converse(answer, io.StringIO("one\ntwo\nthree\n"), out) == 0
    assert out.getvalue() == "half\nhalfrefused.\nhalf\n"


def test_answers_are_the_model_s_own(folder, tmp_path):
    words = [f"model.path={folder}", "model=path", f"run_dir={tmp_path}", "model.max_len=64"]
    words += ["rollout.max_new_tokens=12", "rollout.temperature=1e-6"]
    model, shown = ChatModel(load(words), str(folder), folder), []
    answer = model.answer([{"role": "user", "content": "3 1 2 "}], shown.append)
    tokenizer = load_tokenizer(folder)
    ids = torch.tensor([tokenizer.encode("3 1 2 ", add_special_tokens=False)])
    greedy = model._lm.generate(ids, do_sample=False, max_new_tokens=12, pad_token_id=0)
    assert answer == tokenizer.decode(greedy[0, ids.shape[1] :], skip_special_tokens=True)
    assert "".join(shown) == answer


def test_a_folder_without_a_model_is_one_sentence(tmp_path, capsys):
    assert main(["chat", f"model.path={tmp_path}", f"run_dir={tmp_path / 'run'}"]) == 2
    assert "model.path=" in capsys.readouterr().err
