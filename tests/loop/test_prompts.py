import pytest

from rlcore.errors import UserError
from rlcore.loop.prompts import HeldOutRequests, PromptSource, RequestMaker
from rlcore.testing.records import make_sampling
from rlcore.types import Item


class FiniteTask:
    """Ten rows; enough of a task for the cursor."""

    name = "ten"

    def size(self, split):
        return 10 if split == "train" else 4

    def item(self, split, index):
        return Item(f"ten/{split}/{index}", "x" * (index + 1), "")


def _source(limit=100, seed=0, **more):
    encode = lambda text: [0, *range(1, len(text))]  # noqa: E731
    return PromptSource(FiniteTask(), encode, run_seed=seed, max_prompt_tokens=limit, **more)


def test_every_epoch_is_a_fresh_permutation_and_a_cursor_resumes_it():
    source = _source()
    first, second = ([source.next().prompt_id for _ in range(10)] for _ in range(2))
    assert sorted(first) == sorted(second) and first != second
    resumed = _source()
    resumed.restore({"cursor": 7})
    assert [resumed.next().prompt_id for _ in range(13)] == (first + second)[7:]
    other = _source(seed=1)
    assert [other.next().prompt_id for _ in range(10)] != first


def test_looking_ahead_moves_nothing():
    source, same = _source(), _source()
    ahead = [item.prompt_id for item in source.peek(13)]
    assert source.state() == {"cursor": 0}
    source.advance(4)
    assert [source.next().prompt_id for _ in range(9)] == ahead[4:]
    assert [same.next().prompt_id for _ in range(13)] == ahead


def test_another_walk_over_the_same_task_begins_anew():
    source = _source()
    source.next()
    other = source.another_walk(run_seed=0, max_prompt_tokens=3)
    assert other.next().prompt_id == _source().next().prompt_id and source.cursor == 1
    with pytest.raises(UserError):
        other.encode(Item("ten/train/9", "xxxx", ""))


def test_a_prompt_longer_than_the_model_is_refused_by_name():
    with pytest.raises(UserError, match=r"model\.max_len: prompt ten/train/9 has 10 tokens"):
        _source(limit=9).check("train", 100)


def test_rows_that_are_too_long_are_left_out_everywhere_and_counted():
    source = _source(limit=3, overlong="skip")
    source.check("train", 100)
    source.check("heldout", 2)
    other = source.another_walk(run_seed=1, max_prompt_tokens=100)
    for walk in (source, other):
        drawn = {walk.next().prompt_id for _ in range(3)}
        assert drawn == {f"ten/train/{i}" for i in range(3)}
    maker = HeldOutRequests({"ten": source}, sampling=make_sampling(), run_seed=0)
    assert maker.count("ten", 100) == 2
    said = "7 of 10 train prompts have more than 3 tokens and are left out (overlong_rows=skip)"
    assert source.remarks() == [said]
    with pytest.raises(UserError, match="leaves no train problem of ten: all 10 prompts"):
        _source(limit=0, overlong="skip").check("train", 100)


def test_rows_that_are_too_long_lose_their_first_tokens_but_bos():
    item = FiniteTask().item("train", 9)
    plain, opened = (_source(limit=4, overlong="truncate_left", bos=bos) for bos in (None, 0))
    plain.check("train", 100)
    assert plain.size("train") == 10 and plain.remarks()[0].startswith("6 of 10 train prompts")
    assert plain.encode(item).tolist() == [6, 7, 8, 9]
    assert opened.encode(item).tolist() == [0, 7, 8, 9]


def test_seeds_depend_on_admission_and_sample_only():
    maker = RequestMaker(_source(), sampling=make_sampling(), samples=3, run_seed=5)
    again = RequestMaker(_source(), sampling=make_sampling(), samples=3, run_seed=5)
    a, b = maker.group(7, "ten/train/2"), again.group(7, "ten/train/2")
    assert [r.seed for r in a] == [r.seed for r in b]
    assert len({r.seed for r in a + maker.group(8, "ten/train/2")}) == 6
    assert all(r.asked == "xxx" and not len(r.prompt_ids) for r in a)


def test_prompts_are_not_encoded_where_they_are_chosen():
    def encode(text):
        raise AssertionError("encoded by the loop")

    source = PromptSource(FiniteTask(), encode, run_seed=0, max_prompt_tokens=100)
    maker = RequestMaker(source, sampling=make_sampling(), samples=2, run_seed=0)
    heldout = HeldOutRequests({"ten": source}, sampling=make_sampling(), run_seed=0)
    wanted = {"sampling": make_sampling(), "purpose": "eval/0/ten/greedy", "n": 1}
    assert [r.asked for r in maker.group(0, "ten/train/1")] == ["xx", "xx"]
    assert [r.asked for r in heldout.group("ten", 3, -1, **wanted)] == ["xxxx"]
    played = PromptSource(FiniteTask(), None, run_seed=0, max_prompt_tokens=100)
    maker = RequestMaker(played, sampling=make_sampling(), samples=1, run_seed=0)
    assert maker.group(0, "ten/train/1")[0].asked is None


def test_evaluation_asks_the_same_of_every_version():
    sampling = make_sampling()
    maker = HeldOutRequests({"ten": _source()}, sampling=sampling, run_seed=1)
    assert maker.count("ten", 100) == 4 and maker.count("ten", 3) == 3

    def ask(purpose):
        groups = [
            maker.group("ten", i, -1 - i, sampling=sampling, purpose=purpose, n=2) for i in range(4)
        ]
        return [[r.seed for r in group] for group in groups]

    assert ask("eval/0") == ask("eval/9")
    assert len({s for group in ask("eval/0") for s in group}) == 8
