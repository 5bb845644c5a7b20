"""Advantages: the formulas, and exactly 0 where there is nothing to compare."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.corrections.numerics import ONE_RANK
from rlcore.errors import UserError
from rlcore.interfaces import Reduce
from rlcore.objectives.advantages import Rewards, over_tokens, overlong_penalty, sequence_advantages
from rlcore.objectives.specs import ObjectiveSpec, advantage_class, make_advantage

PLAIN = ["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "reinforce"]
PLAIN += ["opo", "gpg", "passk"]
OVER_TOKENS = ["reinforce_pp/tokens", "reinforce_pp_baseline/tokens"]
KINDS = [*PLAIN, *OVER_TOKENS, "group_mean"]
REWARDS = torch.tensor([1.0, 0.0, 0.0, 0.5, 2.0, 0.3])
GROUPS = torch.tensor([4, 4, 4, 9, 9, 1])


TOKENS = torch.tensor([3, 1, 7, 2, 5, 4])


def advantages(
    kind: str,
    rewards: torch.Tensor,
    groups: torch.Tensor,
    reduce: Reduce,
    tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    name = kind.removesuffix("/tokens")
    spec = ObjectiveSpec(advantage=name, whitening="episodes" if name == kind else "tokens")
    tokens = 1 + torch.arange(len(rewards)) % 5 if tokens is None else tokens
    return sequence_advantages(make_advantage(spec), rewards, groups, reduce, tokens)


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


def test_opo_weighs_the_baseline_by_lengths() -> None:
    found = advantages("opo", REWARDS, GROUPS, ONE_RANK, TOKENS)
    for group in set(GROUPS.tolist()):
        r, n = REWARDS[group == GROUPS].double(), TOKENS[group == GROUPS].double()
        expected = r - (n * r).sum() / n.sum() if len(r) > 1 else torch.zeros(1).double()
        torch.testing.assert_close(found[group == GROUPS].double(), expected)


def test_gpg_makes_up_for_groups_of_equal_rewards() -> None:
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.5, 0.5, 0.5])
    groups = torch.tensor([0, 0, 1, 1, 2, 2, 2])
    found = advantages("gpg", rewards, groups, ONE_RANK)
    torch.testing.assert_close(found, 7 / 2 * torch.tensor([0.5, -0.5, 0, 0, 0, 0, 0]))

    class Other:  # seven more episodes, all of informative groups
        def __call__(self, values: torch.Tensor) -> torch.Tensor:
            return values + 7

    torch.testing.assert_close(advantages("gpg", rewards, groups, Other()), found * 4 / 9)
    assert not advantages("gpg", torch.ones(7), groups, ONE_RANK).any()


@settings(max_examples=60, deadline=None)
@given(rewards=st.lists(st.floats(-2, 2, width=32), min_size=2, max_size=7), k=st.integers(2, 7))
def test_pass_k_is_what_a_sample_adds_to_the_best_of_k(rewards: list[float], k: int) -> None:
    """Over all sets, written out; other groups do not matter."""
    n, k = len(rewards), min(k, len(rewards))
    expected = []
    for i, r in enumerate(rewards):
        others = [rewards[j] for j in range(n) if j != i]
        sets = list(itertools.combinations(others, k - 1))
        expected.append(k * sum(max(r - max(s), 0.0) for s in sets) / len(sets))
    advantage = make_advantage(ObjectiveSpec(advantage="passk", pass_k=k))
    groups = torch.tensor([5, *[2] * n, 5])
    found = sequence_advantages(advantage, torch.tensor([9.0, *rewards, 0.0]), groups, ONE_RANK)
    assert found[1:-1].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_pass_k_s_gradient_is_unbiased() -> None:
    """Of a Bernoulli policy: the mean over all groups of n is d pass@k/d log-odds."""
    p, n, k = 0.3, 4, 3
    advantage, slope = make_advantage(ObjectiveSpec(advantage="passk", pass_k=k)), 0.0
    for group in itertools.product([0.0, 1.0], repeat=n):
        a = sequence_advantages(advantage, torch.tensor(group), torch.zeros(n), ONE_RANK)
        chance = math.prod(p if r else 1 - p for r in group)
        slope += chance * sum(x * (r - p) for x, r in zip(a.tolist(), group)) / n
    assert slope == pytest.approx(k * (1 - p) ** (k - 1) * p * (1 - p), rel=1e-6)


def test_batch_advantages_by_hand() -> None:
    centred = REWARDS - REWARDS.mean()
    torch.testing.assert_close(advantages("reinforce", REWARDS, GROUPS, ONE_RANK), centred)
    whitened = advantages("reinforce_pp", REWARDS, GROUPS, ONE_RANK)
    torch.testing.assert_close(whitened, centred / REWARDS.std(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", [*OVER_TOKENS, "reinforce_pp_baseline"])
def test_whitening_by_hand(kind: str) -> None:
    found = advantages(kind, REWARDS, GROUPS, ONE_RANK, TOKENS)
    start = REWARDS.double()
    if "baseline" in kind:
        means = {g: start[g == GROUPS].mean() for g in GROUPS.tolist()}
        start = start - torch.stack([means[g] for g in GROUPS.tolist()])
    if "tokens" not in kind:
        expected = (start - start.mean()) / start.std()
    else:
        every = torch.cat([start[i].repeat(n) for i, n in enumerate(TOKENS.tolist())])
        expected = (start - every.mean()) / every.std(correction=0)
        whitened = torch.cat([found[i].repeat(n) for i, n in enumerate(TOKENS.tolist())])
        assert whitened.mean().item() == pytest.approx(0, abs=1e-6)
        assert whitened.std(correction=0).item() == pytest.approx(1, abs=1e-6)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


def test_whitening_over_tokens_needs_their_numbers_and_leaves_out_what_has_none() -> None:
    advantage = make_advantage(ObjectiveSpec(advantage="reinforce_pp", whitening="tokens"))
    with pytest.raises(ValueError, match="sampled tokens"):
        sequence_advantages(advantage, REWARDS, GROUPS, ONE_RANK)
    rewards, groups = torch.tensor([1.0, 1.0, 5.0]), torch.zeros(3)
    found = advantages("reinforce_pp/tokens", rewards, groups, ONE_RANK, torch.tensor([2, 3, 0]))
    assert found[:2].tolist() == [0.0, 0.0]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), length=st.integers(1, 9))
def test_over_tokens_of_equal_lengths_it_is_the_whitening_over_episodes(seed, length) -> None:
    g = torch.Generator().manual_seed(seed)
    rewards, groups = torch.rand(8, generator=g), torch.arange(8) // 4
    for name in ("reinforce_pp", "reinforce_pp_baseline"):
        lengths = torch.full((8,), length)
        tokens = advantages(f"{name}/tokens", rewards, groups, ONE_RANK, lengths)
        episodes = advantages(name, rewards, groups, ONE_RANK)
        # the population's deviation in the place of the sample's
        torch.testing.assert_close(tokens, episodes * (8 / 7) ** 0.5, atol=1e-4, rtol=1e-4)


class OtherRank:
    """Adds what a second rank with the given rewards contributes to each reduction, in the order of
    the calls."""

    def __init__(self, rewards: torch.Tensor, weight: torch.Tensor, mean: float) -> None:
        values = rewards.double()
        self.sums = [
            torch.stack([weight.sum(), (weight * values).sum()]).double(),
            (weight * (values - mean) ** 2).sum()[None],
        ]
        self.extremes = torch.stack([values.max(), -values.min()])

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        return values + self.sums.pop(0)

    def max(self, values: torch.Tensor) -> torch.Tensor:
        return torch.maximum(values, self.extremes)


@pytest.mark.parametrize("kind", ["reinforce", *PLAIN[3:5], *OVER_TOKENS])
@pytest.mark.parametrize("here", [0, 3, 5])
def test_batch_advantages_are_global(kind: str, here: int) -> None:
    whole = advantages(kind, REWARDS, GROUPS, ONE_RANK, TOKENS)
    rewards = Rewards(REWARDS, GROUPS, ONE_RANK)
    start = rewards.group_centred if "baseline" in kind else rewards.values
    weight = TOKENS if "tokens" in kind else torch.ones(6)
    mean = ((start * weight).sum() / weight.sum()).item()
    other = OtherRank(start[here:], weight[here:], mean)
    part = advantages(kind, REWARDS[:here], GROUPS[:here], other, TOKENS[:here])
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


@settings(max_examples=60, deadline=None)
@given(
    middle=st.floats(-10, 10),
    steps=st.lists(st.floats(1e-3, 10), min_size=1, max_size=4),
    kind=st.sampled_from(["group_mean", "grpo", "rloo", "reinforce", "reinforce_pp"]),
)
def test_what_is_0_up_to_rounding_has_no_sign(middle: float, steps: list[float], kind) -> None:
    """The middle of rewards that lie around it in pairs is their mean but for rounding."""
    pairs = [middle + s * step for step in steps for s in (-1, 1)]
    rewards = torch.tensor([middle, *pairs], dtype=torch.float64)
    found = advantages(kind, rewards, torch.zeros(len(rewards), dtype=torch.int64), ONE_RANK)
    assert found[0] == 0.0 and (found[1:] != 0).all()


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), b=st.integers(0, 9))
def test_advantages_follow_their_sequences_and_are_finite(kind, seed: int, b: int) -> None:
    g = torch.Generator().manual_seed(seed)
    rewards, groups = torch.rand(b, generator=g), torch.randint(0, 3, (b,), generator=g)
    order = torch.randperm(b, generator=g)
    tokens = torch.randint(1, 9, (b,), generator=g)
    advantage = advantages(kind, rewards, groups, ONE_RANK, tokens)
    assert torch.isfinite(advantage).all() and advantage.shape == (b,)
    moved = advantages(kind, rewards[order], groups[order], ONE_RANK, tokens[order])
    torch.testing.assert_close(moved, advantage[order])
    raised = advantages(kind, rewards + 3, groups, ONE_RANK, tokens)
    # a reward's offset is nobody's merit
    torch.testing.assert_close(raised, advantage, atol=1e-4, rtol=1e-4)


def test_names_traits_and_a_user_s_own(tmp_path) -> None:
    with pytest.raises(UserError, match=r"algorithm\.advantage=gea"):
        advantage_class("gea")
    assert {k for k in [*PLAIN, "group_mean"] if advantage_class(k).compares_group} == {
        "grpo",
        "dr_grpo",
        "rloo",
        "reinforce_pp_baseline",
        "opo",
        "gpg",
        "passk",
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


@pytest.mark.parametrize("kind", [*PLAIN, *OVER_TOKENS])
def test_a_penalty_to_go_is_taken_off_or_whitened_with_the_reward(kind: str) -> None:
    name = kind.removesuffix("/tokens")
    spec = ObjectiveSpec(advantage=name, whitening="episodes" if name == kind else "tokens")
    mask = torch.arange(7) < TOKENS[:, None]
    penalty = torch.rand(6, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    given = Rewards(REWARDS, GROUPS, ONE_RANK, TOKENS)
    found = make_advantage(spec).of_tokens(given, penalty, mask)
    alone = advantages(kind, REWARDS, GROUPS, ONE_RANK, TOKENS).double()[:, None]
    expected = alone - penalty
    if name != kind:
        centred = given.values if name == "reinforce_pp" else given.group_centred
        every = (centred[:, None] - penalty)[mask]
        expected = (centred[:, None] - penalty - every.mean()) / every.std(unbiased=False)
    torch.testing.assert_close(found, expected * mask, atol=1e-6, rtol=1e-6)
