"""Which task comes next: shares, resumption, and what a checkpoint of other tasks meets."""

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.errors import UserError
from rlcore.loop.prompts import Mixture, PromptSource, TaskOrder
from rlcore.types import Item

# multiples of 1/8, some of them 0: shares differ by more than the bound below
WEIGHTS = st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any)


class Numbers:
    """`size` problems, or endlessly many."""

    def __init__(self, name, size=None):
        self.name = name
        self._size = size

    def size(self, split):
        return self._size

    def item(self, split, index):
        return Item(f"{self.name}/{split}/{index}", "x", "")


def mixture(weights, *, seed=0, sizes=None):
    sources = {
        label: PromptSource(
            Numbers(label, (sizes or {}).get(label)),
            lambda text: [1] * len(text),
            run_seed=seed,
            max_prompt_tokens=9,
        )
        for label in weights
    }
    return Mixture(sources, weights, run_seed=seed)


def labelled(counts):
    return {f"task{i}": count / 8 for i, count in enumerate(counts)}


@settings(deadline=None)
@given(WEIGHTS, st.integers(0, 2**62), st.integers(0, 2**40), st.integers(1, 3000))
def test_every_stretch_of_draws_has_the_shares_of_the_weights(counts, seed, start, length):
    weights = labelled(counts)
    order = TaskOrder(weights, seed)
    drawn = Counter(order.label(start + i) for i in range(length))
    for label, weight in weights.items():
        share = weight / sum(weights.values())
        # Two ends, each with a discrepancy that grows like the logarithm of the length.
        assert abs(drawn[label] - share * length) <= 8
        assert drawn[label] == 0 if not weight else True


@settings(deadline=None)
@given(WEIGHTS, st.integers(0, 2**62), st.integers(0, 300), st.integers(0, 200))
def test_resumed_at_any_point_the_sequence_is_the_same(counts, seed, before, after):
    weights = labelled(counts)
    sizes = {"task0": 7, "task2": 5}
    whole = mixture(weights, seed=seed, sizes=sizes)
    ids = [whole.next().prompt_id for _ in range(before + after)]
    stopped = mixture(weights, seed=seed, sizes=sizes)
    stopped.advance(before)
    resumed = mixture(weights, seed=seed, sizes=sizes)
    resumed.restore(json.loads(json.dumps(stopped.state())))
    assert [item.prompt_id for item in resumed.peek(after)] == ids[before:]
    assert resumed.state() == stopped.state()


@settings(deadline=None)
@given(WEIGHTS, st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=20))
def test_looking_ahead_by_any_amount_changes_nothing(counts, moves):
    weights = labelled(counts)
    one, other = mixture(weights), mixture(weights)
    for ahead, moved in moves:
        seen = [item.prompt_id for item in one.peek(max(ahead, moved))]
        one.advance(moved)
        assert seen[:moved] == [other.next().prompt_id for _ in range(moved)]


def test_the_order_depends_on_the_seed_and_each_label_walks_its_own_way():
    weights = {"a": 1.0, "b": 1.0}
    orders = {tuple(TaskOrder(weights, seed).label(i) for i in range(40)) for seed in range(8)}
    assert len(orders) > 1


def test_new_weights_and_a_new_task_hold_from_the_next_draw_on():
    before = mixture({"a": 1.0, "b": 1.0})
    before.advance(100)
    at = before.state()["tasks"]
    after = mixture({"a": 0.0, "b": 1.0, "c": 1.0})
    after.restore(before.state())
    labels = [item.prompt_id.split("/")[0] for item in after.peek(200)]
    assert "a" not in labels and abs(labels.count("c") - 100) <= 4
    first = {label: next(i for i in after.peek(20) if i.prompt_id[0] == label) for label in "bc"}
    assert first["b"].prompt_id == f"b/train/{at['b']['cursor']}"  # its walk goes on
    assert first["c"].prompt_id == "c/train/0"


def test_a_checkpoint_of_tasks_that_are_missing_is_refused():
    both = mixture({"a": 1.0, "b": 1.0})
    both.advance(9)
    with pytest.raises(UserError, match=r"task=\[a\] lacks b.*task\.b\.weight=0"):
        mixture({"a": 1.0}).restore(both.state())
    single = both.sources["a"]
    with pytest.raises(UserError, match=r"task=\[a,b\] cannot continue a run with a single task"):
        both.restore(single.state())
    with pytest.raises(UserError, match=r"task=a cannot continue a run with task=\[a,b\]"):
        single.restore(both.state())


def test_weights_that_draw_nothing_are_refused():
    for weights in ({"a": 0.0}, {"a": -1.0, "b": 2.0}, {}):
        with pytest.raises(ValueError, match="weights of tasks"):
            TaskOrder(weights, 0)
