import numpy as np
import pytest

from rlcore.errors import UserError
from rlcore.runtime.prompts import PromptSource
from rlcore.runtime.ranks import deal
from rlcore.runtime.requests import RequestMaker, evaluation_requests
from rlcore.types import Item, SamplingSpec


class FiniteTask:
    """Ten rows; enough of a task for the cursor."""

    name = "ten"

    def size(self, split):
        return 10 if split == "train" else 4

    def item(self, split, index):
        return Item(f"ten/{split}/{index}", "x" * (index + 1), "")


def _source(limit=100, seed=0):
    return PromptSource(FiniteTask(), lambda text: [1] * len(text), run_seed=seed, max_prompt_tokens=limit)


def test_every_epoch_is_a_fresh_permutation_and_a_cursor_resumes_it():
    source = _source()
    first, second = ([source.next().prompt_id for _ in range(10)] for _ in range(2))
    assert sorted(first) == sorted(second) and first != second
    resumed = _source()
    resumed.restore({"cursor": 7})
    assert [resumed.next().prompt_id for _ in range(13)] == (first + second)[7:]
    other = _source(seed=1)
    assert [other.next().prompt_id for _ in range(10)] != first


def test_a_prompt_longer_than_the_model_is_refused_by_name():
    with pytest.raises(UserError, match=r"model\.max_len: prompt ten/train/9 has 10 tokens"):
        _source(limit=9).check("train", 100)


def test_seeds_hang_on_admission_and_sample_only():
    maker = RequestMaker(_source(), sampling=SamplingSpec(), samples=3, run_seed=5)
    again = RequestMaker(_source(), sampling=SamplingSpec(), samples=3, run_seed=5)
    a, b = maker.group(7, "ten/train/2"), again.group(7, "ten/train/2")
    assert [r.seed for r in a] == [r.seed for r in b]
    assert len({r.seed for r in a + maker.group(8, "ten/train/2")}) == 6
    assert all(np.array_equal(r.prompt_ids, [1, 1, 1]) for r in a)


def test_evaluation_asks_the_same_of_every_version():
    def ask(purpose):
        made = evaluation_requests(
            _source(), indices=range(4), samples=2, sampling=SamplingSpec(), run_seed=1, purpose=purpose
        )
        return [[r.seed for r in group] for group in made]

    assert ask("eval/0") == ask("eval/9")
    assert len({s for group in ask("eval/0") for s in group}) == 8


def test_groups_are_dealt_whole_and_evenly():
    groups = [(i, tokens) for i, tokens in enumerate([100, 5, 60, 40, 1, 90])]
    shares = deal(groups, 2)
    assert sorted(shares[0] + shares[1]) == list(range(6))
    loads = [sum(dict(groups)[g] for g in share) for share in shares]
    assert abs(loads[0] - loads[1]) <= 10
    assert deal(groups, 1) == [[0, 1, 2, 3, 4, 5]]
    assert deal(groups[:1], 3) == [[0], [], []]
