"""Prompts that fill a context: solved problems before the question."""

import json

import pytest

from benchmarks.evidence.sparse_kl import FewShot, by_group
from rlcore.tasks.gsm8k import Gsm8k
from rlcore.testing.records import make_trajectory


@pytest.fixture
def prompts(tmp_path, monkeypatch):
    data = tmp_path / "train.jsonl"
    rows = [{"question": f"Q{i}?", "answer": f"It is {i}.\n#### {i}"} for i in range(4000)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    class Words:
        chat_template = None

        def encode(self, text, add_special_tokens=False):
            return list(range(len(text.split())))

        def decode(self, ids, skip_special_tokens=True):
            return f"#### {ids[-1]}"

    monkeypatch.setattr("benchmarks.evidence.drawn.load_tokenizer", lambda model: Words())
    return FewShot("model", Gsm8k(train_path=str(data)), 60)


def test_a_prompt_is_as_long_as_it_may_be_and_ends_with_its_question(prompts):
    first, second = (prompts.requests(g, 2, 8, 0)[0].prompt_ids for g in (3, 4))
    assert 50 <= len(first) <= 60 and 50 <= len(second) <= 60
    item = prompts.task.item("train", 3)
    asked = prompts.question(item)
    assert asked.endswith(f"Question: {item.question}\nAnswer:")
    assert (
        asked.split("\n\n")[0] != prompts.question(prompts.task.item("train", 4)).split("\n\n")[0]
    )


def test_samples_of_a_prompt_are_one_group_with_their_rewards(prompts):
    answer = int(prompts.task.item("train", 7).answer)
    right = make_trajectory(7, 0, turns=[([1], [answer])])
    wrong = make_trajectory(7, 1, turns=[([1], [answer + 1])])
    other = make_trajectory(8, 0, turns=[([1], [answer])])
    groups = by_group([right, wrong, other], prompts)
    assert [[e.score.reward for e in g.episodes] for g in groups] == [[1.0, 0.0], [0.0]]
