"""Which of the policy's samples a draft is trained on."""

from types import SimpleNamespace

from benchmarks.evidence.drawn import Sums
from benchmarks.speed.draft import worked
from rlcore.testing.records import make_trajectory


def test_answers_that_were_cut_off_are_left_out():
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: f"it is {ids[-1]}")
    prompts = SimpleNamespace(task=Sums(), tokenizer=tokenizer)
    ended = make_trajectory(1000, 0, turns=[([3], [5, 6])])
    cut_off = make_trajectory(1000, 1, turns=[([3], [7, 8])], finish_reason="length")
    question = Sums().item("train", 1000).question
    assert worked([ended, cut_off], prompts) == [{"question": question, "worked": "it is 6"}]
