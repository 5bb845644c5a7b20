"""Advantages: the formulas, and exactly 0 where there is nothing to compare."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.corrections.reduction import ONE_RANK
from rlcore.errors import UserError
from rlcore.interfaces import Reduce
from rlcore.objectives.registry import advantage_class, make_advantage
from rlcore.objectives.rewards import Rewards, over_tokens, sequence_advantages
from rlcore.objectives.shaping import overlong_penalty
from rlcore.objectives.specs import ObjectiveSpec

KINDS = ["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce", "group_mean"]
REWARDS = torch.tensor([1.0, 0.0, 0.0, 0.5, 2.0, 0.3])
GROUPS = torch.tensor([4, 4, 4, 9, 9, 1])


def advantages(
    kind: str, rewards: torch.Tensor, groups: torch.Tensor, reduce: Reduce
) -> torch.Tensor:
    return sequence_advantages(
        make_advantage(ObjectiveSpec(advantage=kind)), rewards, groups, reduce
    )


def test_group_advantages_by_hand() -> None:
    centred = torch.tensor([2 / 3, -1 / 3, -1 / 3, -0.75, 0.75, 0.0])
    for kind in ("dr_grpo", "group_mean"):
        torch.testing.assert_close(advantages(kind, REWARDS, GROUPS, ONE_RANK), centred)
    std = torch.tensor([3**-0.5] * 3 + [1.5 / 2**0.5] * 2 + [1.0])
    torch.testing.assert_close(
        advantages("grpo", REWARDS, GROUPS, ONE_RANK), centred / std, atol=1e-5, rtol=1e-5
    )
    others = torch.tensor([1.0, -0.5, -0.5, -1.5, 1.5, 0.0])
    torch.testing.assert_close(advantages("rloo", REWARDS, GROUPS, ONE_RANK), others)


def test_batch_advantages_by_hand() -> None:
    centred = REWARDS - REWARDS.mean()
    torch.testing.assert_close(advantages("reinforce", REWARDS, GROUPS, ONE_RANK), centred)
    whitened = advantages("reinforce_pp", REWARDS, GROUPS, ONE_RANK)
    torch.testing.assert_close(whitened, centred / REWARDS.std(), atol=1e-5, rtol=1e-5)


class OtherRank:
    """Adds what a second rank with the given rewards contributes to each reduction, in the order of
    the calls."""

    def __init__(self, rewards: torch.Tensor, mean: float) -> None:
        values = rewards.double()
        self.sums = [
            torch.tensor([float(len(values)), values.sum()]),
            ((values - mean) ** 2).sum()[None],
        ]
        self.extremes = torch.stack([values.max(), -values.min()])

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        return values + self.sums.pop(0)

    def max(self, values: torch.Tensor) -> torch.Tensor:
        return torch.maximum(values, self.extremes)


@pytest.mark.parametrize("kind", ["reinforce", "reinforce_pp"])
@pytest.mark.parametrize("here", [0, 1, 4])
def test_batch_advantages_are_global(kind, here: int) -> None:
    whole = advantages(kind, REWARDS, GROUPS, ONE_RANK)
    other = OtherRank(REWARDS[here:], REWARDS.double().mean().item())
    part = advantages(kind, REWARDS[:here], GROUPS[:here], other)
    torch.testing.assert_close(part, whole[:here])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(
    reward=st.floats(-10, 10),
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_equal_rewards_give_exactly_zero(
    kind, reward: float, sizes: list[int], dtype: torch.dtype
) -> None:
    groups = torch.cat([torch.full((n,), i) for i, n in enumerate(sizes)])
    rewards = torch.full((len(groups),), reward, dtype=dtype)
    assert torch.equal(advantages(kind, rewards, groups, ONE_RANK), torch.zeros(len(groups)))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), b=st.integers(0, 9))
def test_advantages_follow_their_sequences_and_are_finite(kind, seed: int, b: int) -> None:
    g = torch.Generator().manual_seed(seed)
    rewards, groups = torch.rand(b, generator=g), torch.randint(0, 3, (b,), generator=g)
    order = torch.randperm(b, generator=g)
    advantage = advantages(kind, rewards, groups, ONE_RANK)
    assert torch.isfinite(advantage).all() and advantage.shape == (b,)
    torch.testing.assert_close(
        advantages(kind, rewards[order], groups[order], ONE_RANK), advantage[order]
    )
    torch.testing.assert_close(  # a reward's offset is nobody's merit
        advantages(kind, rewards + 3, groups, ONE_RANK), advantage, atol=1e-4, rtol=1e-4
    )


def test_names_traits_and_a_user_s_own(tmp_path) -> None:
    with pytest.raises(UserError, match=r"algorithm\.advantage=gae"):
        advantage_class("gae")
    assert {k for k in KINDS if advantage_class(k).compares_group} == {
        "grpo",
        "dr_grpo",
        "rloo",
        "group_mean",
    }
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from rlcore.objectives.protocols import Advantage\n"
        "class Raw(Advantage):\n"
        "    def __call__(self, rewards):\n"
        "        return rewards.values\n"
    )
    got = advantages(f"{mine}:Raw", REWARDS, GROUPS, ONE_RANK)
    assert torch.equal(got, REWARDS) and not advantage_class(f"{mine}:Raw").compares_group


def test_group_statistics_by_hand() -> None:
    rewards = Rewards(REWARDS, GROUPS, ONE_RANK)
    assert rewards.group_size.tolist() == [3, 3, 3, 2, 2, 1]
    assert rewards.group_sum(rewards.values).tolist() == pytest.approx([1, 1, 1, 2.5, 2.5, 0.3])
    assert rewards.batch_std == pytest.approx(REWARDS.std().item())


def test_an_advantage_is_repeated_over_the_sampled_tokens() -> None:
    spread = over_tokens(torch.tensor([2.0, -1.0]), torch.tensor([[1, 0], [1, 1]]))
    assert spread.tolist() == [[2.0, 0.0], [-1.0, -1.0]]


def test_overlong_penalty_rises_over_the_buffer() -> None:
    lengths = torch.tensor([0, 80, 90, 100, 130])
    got = overlong_penalty(lengths, max_len=100, buffer=20, penalty=0.5)
    assert got.tolist() == pytest.approx([0.0, 0.0, -0.25, -0.5, -0.5])
    assert overlong_penalty(lengths, max_len=100, buffer=0, penalty=1.0).tolist() == [0.0] * 5
    assert ObjectiveSpec(overlong_share=0.15).overlong_buffer(50) == 8
    assert ObjectiveSpec().overlong_buffer(50) == 0
