"""Targets and advantages of a critic: the recursion against sums written out, and expectations of
an enumerated chain."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.objectives.specs import ValueSpec
from rlcore.objectives.values import States, estimates, value_loss

F = torch.float64
OPEN = 1e9


def _traces(discount, lam, rho_cap, c_cap):
    return ValueSpec(discount=discount, lam=lam, rho_cap=rho_cap, c_cap=c_cap)


def _estimates(rewards, values, log_ratio, traces, cut=False):
    row = lambda xs: torch.tensor([xs], dtype=F)  # noqa: E731
    count, ended = torch.tensor([len(rewards)]), torch.tensor([cut])
    return estimates(row(rewards), row(values), row(log_ratio), count, ended, traces)


numbers = st.lists(st.floats(-3, 3), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(numbers, st.floats(0, 1), st.floats(0, 1), st.integers(0, 2**31))
def test_on_policy_advantages_are_gae_and_targets_value_plus_advantage(
    rewards, discount, lam, seed
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(len(rewards), generator=generator, dtype=F).tolist()
    found = _estimates(rewards, values, [0.0] * len(rewards), _traces(discount, lam, 1.0, 1.0))
    padded = [*values, 0.0]
    delta = [r + discount * padded[t + 1] - padded[t] for t, r in enumerate(rewards)]
    for t in range(len(rewards)):
        gae = sum((discount * lam) ** (k - t) * delta[k] for k in range(t, len(rewards)))
        assert float(found.advantages[0, t]) == pytest.approx(gae, abs=1e-10)
        assert float(found.targets[0, t]) == pytest.approx(values[t] + gae, abs=1e-10)


def _chain(logits_inf, logits_ref, reward, values, traces):
    """Expectations under p_inf of targets and of ratio-weighted `A + V`, on a chain of three binary
    actions whose policy depends on all that precedes; and the values under p_ref."""
    length = 3
    target, action = torch.zeros(length, dtype=F), torch.zeros(length, dtype=F)
    start = torch.zeros(length, dtype=F)
    exact = torch.zeros(length, dtype=F)

    def logp(logits, prefix):
        return torch.log_softmax(logits[prefix], 0)

    def value(prefix):
        """Exact value under p_ref of what follows."""
        if len(prefix) == length:
            return torch.zeros((), dtype=F)
        p = logp(logits_ref, prefix).exp()
        return sum(
            p[a] * (reward[(*prefix, a)] + traces.discount * value((*prefix, a))) for a in (0, 1)
        )

    for path in product((0, 1), repeat=length):
        steps = [(path[:t], path[t]) for t in range(length)]
        inf = torch.stack([logp(logits_inf, s)[a] for s, a in steps])
        ref = torch.stack([logp(logits_ref, s)[a] for s, a in steps])
        p = inf.sum().exp()
        found = _estimates(
            [float(reward[path[: t + 1]]) for t in range(length)],
            [float(values[s]) for s, _ in steps],
            (ref - inf).tolist(),
            traces,
        )
        for t, (prefix, _) in enumerate(steps):
            target[t] += p * found.targets[0, t]
            exact[t] += p * value(prefix)
            weight = (ref[t] - inf[t]).exp()
            action[t] += p * weight * (found.advantages[0, t] + values[prefix])
            start[t] += p
    assert torch.allclose(start, torch.ones(length, dtype=F))
    return target, action, exact


def _tree(seed, size):
    generator = torch.Generator().manual_seed(seed)
    prefixes = [p for n in range(4) for p in product((0, 1), repeat=n)]
    return {p: torch.randn(size, generator=generator, dtype=F).squeeze() for p in prefixes}


@pytest.mark.parametrize("discount", [1.0, 0.9])
def test_open_traces_are_unbiased_for_the_learners_values_whatever_the_critic_says(
    discount,
) -> None:
    """States are as p_inf visits them, and what follows is valued under p_ref."""
    for seed in range(3):
        inf, ref = _tree(seed, 2), _tree(seed + 10, 2)
        reward, values = _tree(seed + 20, 1), _tree(seed + 30, 1)
        target, action, exact = _chain(inf, ref, reward, values, _traces(discount, 1.0, OPEN, OPEN))
        assert torch.allclose(target, exact, atol=1e-12)
        assert torch.allclose(action, exact, atol=1e-12)


def test_uncorrected_traces_are_biased_towards_the_actors_values() -> None:
    inf, ref = _tree(0, 2), _tree(10, 2)
    reward, values = _tree(20, 1), _tree(30, 1)
    flat = {prefix: logits.clone() for prefix, logits in inf.items()}
    target, _, exact = _chain(inf, ref, reward, values, _traces(1.0, 1.0, OPEN, OPEN))
    # with p_ref replaced by p_inf in the ratio, nothing is corrected
    wrong, _, _ = _chain(inf, flat, reward, values, _traces(1.0, 1.0, OPEN, OPEN))
    assert torch.allclose(target, exact)
    assert float((wrong - exact).abs().max()) > 0.05


def test_exact_values_have_expected_errors_of_zero_whatever_lambda() -> None:
    """Of `delta` the ratio-weighted mean is 0 at exact values, so every trace is."""
    inf, ref = _tree(1, 2), _tree(11, 2)
    reward = _tree(21, 1)

    def value(prefix):
        if len(prefix) == 3:
            return torch.zeros((), dtype=F)
        p = torch.softmax(ref[prefix], 0)
        return sum(p[a] * (reward[(*prefix, a)] + value((*prefix, a))) for a in (0, 1))

    values = {prefix: value(prefix) for prefix in ref}
    for lam in (0.0, 0.5, 1.0):
        _, action, exact = _chain(inf, ref, reward, values, _traces(1.0, lam, OPEN, 1.0))
        assert torch.allclose(action, exact, atol=1e-12)


def test_what_the_learner_cannot_sample_ends_the_trace() -> None:
    found = _estimates([1.0, 5.0], [0.5, 0.25], [0.0, -torch.inf], _traces(1.0, 1.0, 1.0, 1.0))
    assert float(found.targets[0, 1]) == 0.25  # nothing learned from it
    assert float(found.targets[0, 0]) == pytest.approx(1.25)


def test_an_episode_that_was_cut_off_goes_on_with_the_value_of_its_last_state() -> None:
    found = _estimates([1.0, 9.0], [0.5, 2.0], [0.0, 0.0], _traces(0.5, 0.9, 1.0, 1.0), cut=True)
    assert found.known.tolist() == [[True, False]]
    assert float(found.targets[0, 0]) == pytest.approx(1.0 + 0.5 * 2.0)
    assert found.advantages[0].tolist() == [pytest.approx(1.5), 0.0]


def test_states_by_turn_skip_turns_without_tokens() -> None:
    mask = torch.tensor([[True, True, True, False], [True, False, False, False]])
    turns = torch.tensor([[0, 0, 2, 0], [1, 0, 0, 0]])
    states = States.by_turn(turns, mask)
    assert states.of_token.tolist() == [[0, 0, 1, 0], [0, 0, 0, 0]]
    assert states.count.tolist() == [2, 1]
    values = torch.tensor([[1.0, 2.0, 3.0, 0.0], [4.0, 0.0, 0.0, 0.0]])
    assert states.firsts(values)[:, :2].tolist() == [[1.0, 3.0], [4.0, 0.0]]
    assert states.sums(values)[:, :2].tolist() == [[3.0, 3.0], [4.0, 0.0]]
    spread = states.spread(torch.tensor([[5.0, 6.0, 0.0, 0.0], [7.0, 0.0, 0.0, 0.0]]), mask)
    assert spread.tolist() == [[5.0, 5.0, 6.0, 0.0], [7.0, 0.0, 0.0, 0.0]]


def test_a_clipped_value_loss_never_rewards_a_jump() -> None:
    values = torch.tensor([0.0, 1.0, 3.0], dtype=F, requires_grad=True)
    old, targets = torch.zeros(3, dtype=F), torch.full((3,), 2.0, dtype=F)
    loss, cut = value_loss(values, old, targets, 0.5)
    assert loss.tolist() == [2.0, 1.125, 1.125]
    assert cut.tolist() == [False, True, True]
    plain, none = value_loss(values, old, targets, None)
    assert plain.tolist() == [2.0, 0.5, 0.5] and not none.any()
    loss.sum().backward()
    assert values.grad is not None and values.grad.tolist() == [-2.0, 0.0, 0.0]
