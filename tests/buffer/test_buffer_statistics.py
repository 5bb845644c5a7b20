"""Sums over the samples that arrived: in whichever order, across a checkpoint or not."""

import json
import math
import random

import pytest
from buffer_helpers import PROMPT, deliver, load, make_buffer, sample

from rlcore.buffer import journal, store
from rlcore.buffer.intake import ArrivalTotals

# no binary fraction among them, as partial credit has it: their rounded sums depend on the order
REWARDS = [i / 7 for i in range(7)] + [i / 5 for i in range(5)] + [0.1, 1e-9]


def arrived(buffer, order):
    """Deliver the single samples of these groups, in this order."""
    for g in order:
        deliver(buffer, sample(g, 0, reward=REWARDS[g], tokens=1 + g))
    return {k: v for k, v in store.metrics(buffer).items() if k.startswith("buffer/arrived")}


def admitted():
    buffer = make_buffer(len(REWARDS), 1)
    buffer.admit([PROMPT] * len(REWARDS))
    return buffer


def orders():
    numbers = list(range(len(REWARDS)))
    return [random.Random(seed).sample(numbers, len(numbers)) for seed in range(20)]


def test_statistics_of_arrivals_do_not_depend_on_their_order():
    # the rewards are such that it would show
    assert len({sum(REWARDS[g] for g in order) for order in orders()}) > 1
    first, *others = [arrived(admitted(), order) for order in orders()]
    assert all(other == first for other in others)
    mean = math.fsum(REWARDS) / len(REWARDS)
    assert first["buffer/arrived_reward_mean"] == pytest.approx(mean, rel=1e-15)
    deviation = math.sqrt(math.fsum((r - mean) ** 2 for r in REWARDS) / len(REWARDS))
    assert first["buffer/arrived_reward_std"] == pytest.approx(deviation, rel=1e-15)


def test_equal_rewards_count_once_each():
    buffer = make_buffer(3, 1)
    buffer.admit([PROMPT] * 3)
    for group, reward in enumerate((1.0, 1.0, 0.0)):
        deliver(buffer, sample(group, 0, reward=reward))
    found = store.metrics(buffer)
    assert found["buffer/arrived_reward_mean"] == pytest.approx(2 / 3)
    assert found["buffer/arrived_reward_std"] == pytest.approx(math.sqrt(2) / 3)


@pytest.mark.parametrize("at", [0, 1, 5, len(REWARDS)])
def test_they_go_on_after_a_checkpoint_as_if_there_had_been_none(at, tmp_path):
    whole, stopped, resumed = admitted(), admitted(), admitted()
    one, other = orders()[:2]
    arrived(stopped, one[:at])
    journal.save(tmp_path / "buffer", journal.cut(stopped))
    load(tmp_path / "buffer", resumed)
    assert arrived(resumed, [g for g in other if g not in one[:at]]) == arrived(whole, one)


def test_a_checkpoint_of_an_earlier_version_has_its_sums_as_numbers():
    state = {"samples": 3, "tokens": 9, "scored": 2, "reward_sum": 1.5, "reward_squares": 1.25}
    totals = ArrivalTotals.from_state(state)
    assert totals.metrics()["buffer/arrived_reward_mean"] == 0.75
    assert totals.metrics()["buffer/arrived_reward_std"] == 0.25
    equal = {**state, "scored": 3, "reward_sum": 0.1 + 0.1 + 0.1, "reward_squares": 3 * 0.1**2}
    assert ArrivalTotals.from_state(equal).metrics()["buffer/arrived_reward_std"] < 1e-7
    assert ArrivalTotals.from_state(json.loads(json.dumps(totals.state()))) == totals


def test_rewards_and_lengths_of_a_batch_are_those_of_each_kind_of_actors_too():
    """By the actor that drew each sample, also within a group."""
    buffer = make_buffer(2, 2, kinds=("bf16", "fp8", "idle"))
    buffer.admit([PROMPT] * 2)
    first = [(0, 0, "bf16-0", 1.0), (0, 1, "fp8-3", 0.0)]
    drawn = [*first, (1, 0, "fp8-1", 0.5), (1, 1, "bf16-0", 0.0)]
    for group, index, actor, reward in drawn:
        fields = {"actor_id": actor, "draw_id": f"{actor}:77-ab:{index}"}
        deliver(buffer, sample(group, index, reward=reward, tokens=1 + group, **fields))
    found = buffer.take(0).metrics
    assert found["reward/mean"] == 0.375
    assert (found["reward/mean@bf16"], found["reward/mean@fp8"]) == (0.5, 0.25)
    assert found["response_length/mean@fp8"] == 1.5
    assert not any(name.endswith("@idle") for name in found)
