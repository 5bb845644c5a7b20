"""Policy losses, KL and aggregation: values and gradients by hand, and safety where the mask is
0."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.corrections.numerics import ONE_RANK
from rlcore.errors import UserError
from rlcore.objectives.kl import entropy, full_kl, sampled_kl
from rlcore.objectives.losses import coefficients, counts, policy_loss
from rlcore.objectives.protocols import LossTensors
from rlcore.objectives.specs import ObjectiveSpec, loss_class, make_loss

KINDS = ["ppo", "gspo", "gmpo", "sapo", "cispo", "reinforce"]
MODES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def loss_of(kind, new, ref, advantages, mask, weight, sampled=None, short=False, eps=(0.2, 0.2)):
    spec = ObjectiveSpec(loss=kind, eps_low=eps[0], eps_high=eps[1])
    sampled = mask if sampled is None else sampled
    tokens = LossTensors(new, ref, advantages, weight, mask, sampled)
    return policy_loss(make_loss(spec), tokens, short_circuit=short)


def loss_and_grad(kind, ratio, advantage, mask=None, weight=None, short=False):
    new = torch.tensor(ratio, dtype=torch.float32).log().requires_grad_()
    mask = torch.ones(new.shape) if mask is None else torch.tensor(mask)
    weight = torch.ones(new.shape) if weight is None else torch.tensor(weight)
    advantages, ref = torch.tensor(advantage), torch.zeros_like(new)
    loss, metrics = loss_of(kind, new, ref, advantages, mask, weight, short=short, eps=(0.2, 0.3))
    loss.sum().backward()
    return loss.detach(), new.grad, metrics


def test_ppo_clips_each_side_and_only_against_the_advantage() -> None:
    loss, grad, metrics = loss_and_grad(
        "ppo", [[1.1, 1.5, 1.5, 0.5, 0.5]], [[1.0, 1.0, -1.0, 1.0, -1.0]]
    )
    torch.testing.assert_close(loss, torch.tensor([[-1.1, -1.3, 1.5, -0.5, 0.8]]))
    torch.testing.assert_close(grad, torch.tensor([[-1.1, 0.0, 1.5, -0.5, 0.0]]))
    assert metrics["clip_high_share"].tolist() == [[0, 1, 0, 0, 0]]
    assert metrics["clip_low_share"].tolist() == [[0, 0, 0, 0, 1]]


def test_a_widened_clip_binds_later_where_the_advantage_is_positive():
    """QuRL's eq. 9, written out: cap 2, ratios of p_ref to p_inf below and above it."""
    ratio, behind = [[1.1, 1.5, 1.5, 2.9, 1.5, 0.5]], [[1.0, 1.0, 4.0, 4.0, 4.0, 4.0]]
    advantage = torch.tensor([[1.0, 1.0, 1.0, 1.0, -1.0, -1.0]])
    new = torch.tensor(ratio).log().requires_grad_()
    on, actor = torch.ones(1, 6), torch.tensor(behind)
    weight, widen = actor.clamp(max=2.0), (actor / 2.0).clamp(min=1.0)
    spec = ObjectiveSpec(eps_low=0.2, eps_high=0.3)
    tokens = LossTensors(new, torch.zeros(1, 6), advantage, weight, on, on, widen=widen)
    loss, metrics = policy_loss(make_loss(spec), tokens, short_circuit=False)
    loss.sum().backward()
    again = torch.tensor(ratio, requires_grad=True)
    r = (2.0 / actor).clamp(max=1.0)
    upper = torch.where(advantage > 0, 1.3 / r, torch.tensor(1.3))
    clipped = torch.minimum(again.clamp(min=0.8), upper)
    expected = -weight * torch.minimum(again * advantage, clipped * advantage)
    expected.sum().backward()
    torch.testing.assert_close(loss.detach(), expected.detach())
    torch.testing.assert_close(new.grad, again.grad * again.detach())
    assert metrics["clip_high_share"].tolist() == [[0, 1, 0, 1, 0, 0]]
    torch.testing.assert_close(metrics["ratio"], torch.tensor(ratio))


def test_short_circuit_never_clips() -> None:
    loss, grad, metrics = loss_and_grad("ppo", [[0.1, 9.0]], [[2.0, -1.0]], short=True)
    assert torch.equal(loss, torch.tensor([[-2.0, 1.0]])) and torch.equal(grad, loss)
    assert not metrics["clip_high_share"].any() and not metrics["clip_low_share"].any()


def test_the_dual_clip_bounds_what_a_negative_advantage_loses() -> None:
    ratio = [0.5, 1.1, 2.9, 3.1, 50.0]
    new = torch.tensor([ratio, ratio]).log().requires_grad_()
    advantages = torch.tensor([[-2.0], [2.0]]).expand(2, 5)
    spec = ObjectiveSpec(dual_clip=3.0)
    ones, ref = torch.ones(2, 5), torch.zeros(2, 5)
    tokens = LossTensors(new, ref, advantages, ones, ones, ones)
    loss, indicators = policy_loss(make_loss(spec), tokens, short_circuit=False)
    expected = torch.tensor([[1.6, 2.2, 5.8, 6.0, 6.0], [-1.0, -2.2, -2.4, -2.4, -2.4]])
    torch.testing.assert_close(loss.detach(), expected)
    loss.sum().backward()
    assert new.grad is not None
    expected = torch.tensor([[0.0, 2.2, 5.8, 0.0, 0.0], [-1.0, -2.2, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(new.grad, expected)
    assert indicators["dual_clip_share"].tolist() == [[0, 0, 0, 1, 1], [0] * 5]
    assert "dual_clip_share" not in make_loss(ObjectiveSpec()).indicators


@settings(max_examples=50, deadline=None)
@given(
    logs=st.lists(st.floats(-15, 15), min_size=1, max_size=8),
    advantage=st.floats(-5, 5),
    c=st.floats(1.01, 50),
)
def test_the_dual_clip_is_the_larger_of_ppo_and_c_a_below_0(logs, advantage: float, c) -> None:
    new = torch.tensor([logs], dtype=torch.float64)
    ones, given_a = torch.ones_like(new), torch.full_like(new, advantage)
    tokens = LossTensors(new, torch.zeros_like(new), given_a, ones, ones, ones)
    plain, dual = (
        -policy_loss(make_loss(ObjectiveSpec(dual_clip=d)), tokens, short_circuit=False)[0]
        for d in (None, c)
    )
    expected = [max(v, c * advantage) if advantage < 0 else v for v in plain[0].tolist()]
    assert dual[0].tolist() == pytest.approx(expected, rel=1e-12)


def test_gspo_clips_the_sequences_geometric_mean() -> None:
    loss, grad, _ = loss_and_grad(
        "gspo", [[2.0, 0.6, 99.0], [4.0, 1.0, 1.0]], [[1.0] * 3] * 2, [[1, 1, 0], [1, 1, 1]]
    )
    s = math.sqrt(1.2)
    torch.testing.assert_close(loss, torch.tensor([[-s, -s, 0.0], [-1.3, -1.3, -1.3]]))
    torch.testing.assert_close(grad, torch.tensor([[-s, -s, 0.0], [0.0, 0.0, 0.0]]))


LOGS = st.lists(st.floats(-3, 3), min_size=1, max_size=8)


def gradient_of(loss, logs, advantage):
    """Of the mean over the tokens of one sequence, in float64; and the indicators."""
    new = torch.tensor([logs], dtype=torch.float64, requires_grad=True)
    ones, a = torch.ones_like(new), torch.full_like(new, advantage)
    tokens = LossTensors(new, torch.zeros_like(new), a, ones, ones, ones)
    value, indicators = policy_loss(loss, tokens, short_circuit=False)
    value.mean().backward()
    return value.detach(), new.grad, indicators


@settings(max_examples=50, deadline=None)
@given(logs=LOGS, a=st.floats(-4, 4), low=st.floats(0.01, 1.5), high=st.floats(0.01, 3))
def test_gmpo_is_the_geometric_mean_of_clipped_ratios(logs, a, low, high) -> None:
    """The paper's sequence form, by autograd."""
    loss = make_loss(ObjectiveSpec(loss="gmpo", eps_low=low, eps_high=high))
    value, grad, indicators = gradient_of(loss, logs, a)
    new = torch.tensor(logs, dtype=torch.float64, requires_grad=True)
    r = new.exp()
    clipped = r.clamp(max=1 + high) if a > 0 else r.clamp(min=1 - low)
    sequence = -a * clipped.log().mean().exp()
    sequence.backward()
    torch.testing.assert_close(value, sequence.detach().expand_as(value))
    torch.testing.assert_close(grad[0], new.grad)
    beyond = [x > math.log(1 + high) and a > 0 for x in logs]
    assert indicators["clip_high_share"][0].tolist() == beyond


@settings(max_examples=50, deadline=None)
@given(logs=LOGS, a=st.floats(-4, 4), pos=st.floats(0.1, 9), neg=st.floats(0.1, 9))
def test_sapo_s_gradient_is_that_of_the_paper_s_gate(logs, a, pos, neg) -> None:
    loss = make_loss(ObjectiveSpec(loss="sapo", sapo_tau_pos=pos, sapo_tau_neg=neg))
    _, grad, _ = gradient_of(loss, logs, a)
    new = torch.tensor(logs, dtype=torch.float64, requires_grad=True)
    tau = pos if a > 0 else neg
    (-a * 4 / tau * torch.sigmoid(tau * (new.exp() - 1))).mean().backward()
    torch.testing.assert_close(grad[0], new.grad, atol=1e-12, rtol=1e-7)
    at_one, slope, _ = gradient_of(loss, [0.0], a)
    assert (at_one.item(), slope.item()) == pytest.approx((-a, -a), rel=1e-12)


def test_gspo_s_ratio_is_over_every_sampled_token_kept_or_not() -> None:
    new = torch.tensor([[2.0, 0.5, 1.5], [1.1, 1.0, 9.0]]).log().requires_grad_()
    kept, sampled = torch.tensor([[1, 1, 0], [1, 1, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    ones, ref = torch.ones(2, 3), torch.zeros(2, 3)
    loss, indicators = loss_of("gspo", new, ref, ones, kept, ones, sampled, eps=(0.9, 9.0))
    s = [1.5 ** (1 / 3), 1.1**0.5]
    expected = torch.tensor([[-s[0], -s[0], 0.0], [-s[1], -s[1], 0.0]])
    torch.testing.assert_close(loss.detach(), expected)
    assert indicators["ratio"][0, 2] == 0  # metrics are of the tokens kept
    loss.sum().backward()
    assert new.grad is not None and new.grad[:, 2].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_rejected_token_changes_no_other_token_s_objective(kind, data) -> None:
    """GMPO clips it on the side that its own advantage says."""
    length = data.draw(st.integers(2, 5))
    rows = st.lists(st.floats(-3, 3), min_size=length, max_size=length)
    new = torch.tensor([data.draw(rows)], dtype=torch.float64)
    a = torch.tensor([data.draw(rows)], dtype=torch.float64)
    kept = torch.tensor([data.draw(st.lists(st.booleans(), min_size=length, max_size=length))])
    ones, zeros = torch.ones_like(new), torch.zeros_like(new)
    sampled = torch.ones_like(kept)
    whole, _ = loss_of(kind, new, zeros, a, sampled, ones, sampled)
    some, _ = loss_of(kind, new, zeros, a, kept, ones, sampled)
    torch.testing.assert_close(some, torch.where(kept, whole, 0.0), rtol=0, atol=0)


def test_gmpo_by_hand_beside_a_rejected_token() -> None:
    new = torch.tensor([[0.0, 0.0, 2.0]], dtype=torch.float64)  # the third has the ratio e^2
    on, kept = torch.ones(1, 3), torch.tensor([[1, 1, 0]])
    eps = (1 - math.exp(-0.4), math.exp(0.4) - 1)
    loss, _ = loss_of("gmpo", new, torch.zeros(1, 3), on, kept, on, on, eps=eps)
    assert -loss[0, 0].item() == pytest.approx(math.exp(0.4 / 3))


def test_gspo_leaves_out_tokens_outside_the_safe_set_and_undefined_ones() -> None:
    filler = -1e6
    new = torch.tensor([[-1.0, -1.0, filler], [-1.0, -1.0, -1.0]], requires_grad=True)
    ref = torch.tensor([[-1.1, -1.0, -0.5], [-1.1, -1.0, -math.inf]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])  # the token outside stays, with weight 0
    weight = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
    sampled = torch.tensor([[1, 1, 0], [1, 1, 1]])
    loss, _ = loss_of("gspo", new, ref, torch.ones(2, 3), mask, weight, sampled)
    s = math.exp(0.05)
    torch.testing.assert_close(loss.detach(), torch.tensor([[-s, -s, 0.0], [-s, -s, 0.0]]))
    loss.sum().backward()
    assert new.grad is not None and torch.isfinite(new.grad).all()


def test_gspo_with_equal_weights_has_the_gradient_of_the_sequence_ratio() -> None:
    g = torch.Generator().manual_seed(0)
    ref, mask = -torch.rand(4, 6, generator=g), torch.arange(6) < torch.tensor([[6], [3], [1], [4]])
    new = (ref + 0.05 * torch.randn(4, 6, generator=g)).requires_grad_()
    adv, one = torch.tensor([1.0, -1.0, 2.0, 0.5])[:, None].expand(4, 6), torch.ones(4, 6)
    loss, _ = loss_of("gspo", new, ref, adv, mask, one)
    ours = torch.autograd.grad(
        (loss * coefficients("seq-mean-token-mean", mask, 14, 4, 6)).sum(), new
    )[0]
    s = (((new - ref) * mask).sum(-1) / mask.sum(-1)).exp()
    plain = torch.autograd.grad(-(s * adv[:, 0]).mean(), new)[0]
    torch.testing.assert_close(ours, plain)


def test_cispo_caps_the_weight_and_keeps_the_gradient() -> None:
    loss, grad, _ = loss_and_grad("cispo", [[1.1, 3.0, 0.1]], [[1.0, 1.0, -1.0]])
    torch.testing.assert_close(grad, torch.tensor([[-1.1, -1.3, 0.8]]))
    torch.testing.assert_close(loss, grad)


def test_reinforce_ignores_the_ratio() -> None:
    loss, grad, _ = loss_and_grad("reinforce", [[0.2, 5.0]], [[1.5, -2.0]])
    assert torch.equal(loss, torch.tensor([[-1.5, 2.0]])) and torch.equal(grad, loss)


@pytest.mark.parametrize("kind", KINDS)
def test_the_weight_multiplies_and_carries_no_gradient(kind: str) -> None:
    plain, plain_grad, _ = loss_and_grad(kind, [[1.1, 0.9]], [[1.0, -1.0]])
    loss, grad, _ = loss_and_grad(kind, [[1.1, 0.9]], [[1.0, -1.0]], weight=[[3.0, 0.0]])
    torch.testing.assert_close(loss, plain * torch.tensor([[3.0, 0.0]]))
    torch.testing.assert_close(grad, plain_grad * torch.tensor([[3.0, 0.0]]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_masked_junk_reaches_neither_loss_nor_gradient(kind, junk: float) -> None:
    new = torch.tensor([[-1.0, junk], [junk, junk]], requires_grad=True)
    other = torch.tensor([[-1.1, -junk], [junk, 0.0]])
    mask = torch.tensor([[True, False], [False, False]])
    loss, metrics = loss_of(kind, new, other, other, mask, other)
    loss.sum().backward()
    assert torch.isfinite(loss).all() and not loss[~mask].any()
    assert new.grad is not None and torch.isfinite(new.grad).all() and not new.grad[~mask].any()
    assert all(torch.isfinite(m).all() and not m[~mask].any() for m in metrics.values())


@pytest.mark.parametrize("kind", KINDS)
def test_extreme_ratios_are_finite(kind) -> None:
    new = torch.tensor([[-1e4, -0.1, -math.inf]], requires_grad=True)
    ref = torch.tensor([[-0.1, -1e4, -1.0]])
    ones = torch.ones(1, 3)
    loss, _ = loss_of(kind, new, ref, -ones, ones, ones, eps=(1.0, 1.0))
    finite = torch.isfinite(loss)
    assert finite[:, :2].all() and (kind == "reinforce" or finite.all())


def test_names_and_traits() -> None:
    with pytest.raises(UserError, match=r"algorithm\.loss=trpo"):
        loss_class("trpo")
    assert [k for k in KINDS if not loss_class(k).carries_ratio] == ["reinforce"]
    assert [k for k in KINDS if loss_class(k).inner_clip] == ["ppo"]
    one = torch.ones(1, 1)
    for kind in KINDS:
        _, indicators = loss_of(kind, one, one, one, one, one)
        assert {*indicators} == {*loss_class(kind).indicators, "ratio"}


def test_coefficients_by_hand() -> None:
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])
    tokens, sequences = counts(mask, ONE_RANK)
    assert (tokens, sequences) == (4, 2)
    by_mode = {m: coefficients(m, mask, tokens, sequences, 8) for m in MODES}
    torch.testing.assert_close(by_mode["token-mean"], mask / 4)
    torch.testing.assert_close(
        by_mode["seq-mean-token-mean"], mask / torch.tensor([[6.0], [2.0], [1.0]])
    )
    torch.testing.assert_close(by_mode["seq-mean-token-sum-norm"], mask / 16)
    assert counts(torch.zeros(2, 3), ONE_RANK) == (0, 0)
    for mode in MODES:
        assert torch.equal(coefficients(mode, torch.zeros(2, 3), 0, 0, 8), torch.zeros(2, 3))


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), cuts=st.lists(st.integers(0, 9), max_size=6))
def test_any_split_of_the_sequences_adds_up_to_the_same_loss(
    mode, seed: int, cuts: list[int]
) -> None:
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(9, 5, generator=g) > 0.4
    loss = torch.randn(9, 5, generator=g, dtype=torch.float64)
    tokens, sequences = counts(mask, ONE_RANK)
    whole = (coefficients(mode, mask, tokens, sequences, 5) * loss).sum()
    edges = [0, *sorted(cuts), 9]
    parts = [
        (coefficients(mode, mask[a:b], tokens, sequences, 5) * loss[a:b]).sum()
        for a, b in itertools.pairwise(edges)
    ]
    torch.testing.assert_close(sum(parts), whole)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000))
def test_sampled_estimators_have_the_full_kl_as_expectation(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    new, base = (torch.randn(12, generator=g, dtype=torch.float64).log_softmax(0) for _ in range(2))
    true = (new.exp() * (new - base)).sum()
    torch.testing.assert_close(full_kl(new, base).double(), true, atol=1e-6, rtol=1e-5)
    for kind in ("k1", "k3"):
        estimate = (new.exp() * sampled_kl(kind, new, base, torch.ones(12)).double()).sum()
        torch.testing.assert_close(estimate, true, atol=1e-5, rtol=1e-5)
    assert (sampled_kl("k3", new, base, torch.ones(12)) >= 0).all()
    near = new + 1e-3 * torch.randn(12, generator=g, dtype=torch.float64)
    torch.testing.assert_close(
        sampled_kl("k2", new, near, torch.ones(12)),
        sampled_kl("k3", new, near, torch.ones(12)),
        atol=1e-8,
        rtol=0.01,
    )
    torch.testing.assert_close(
        entropy(new).double(), -(new.exp() * new).sum(), atol=1e-6, rtol=1e-5
    )


def test_k2_has_the_gradient_of_the_kl() -> None:
    z = torch.randn(8, dtype=torch.float64, requires_grad=True)
    base = torch.randn(8, dtype=torch.float64).log_softmax(0)
    true = torch.autograd.grad(full_kl(z.log_softmax(0), base), z)[0]
    new = z.log_softmax(0)
    by_k2 = torch.autograd.grad(
        (new.exp().detach() * sampled_kl("k2", new, base, torch.ones(8))).sum(), z
    )[0]
    torch.testing.assert_close(by_k2, true, atol=1e-6, rtol=1e-5)


def test_kl_and_entropy_with_excluded_tokens_and_masked_junk() -> None:
    new = torch.tensor([[0.0, -math.inf], [-math.log(2), -math.log(2)]], requires_grad=True)
    total = (
        full_kl(new, torch.tensor([[-0.5, -0.5], [-math.log(2), -math.log(2)]])).sum()
        + entropy(new).sum()
    )
    total.backward()
    assert total.item() == pytest.approx(0.5 + math.log(2))
    assert new.grad is not None and torch.isfinite(new.grad).all()
    for kind in ("k1", "k2", "k3"):
        junk = torch.tensor([[math.nan, math.inf]], requires_grad=True)
        kl = sampled_kl(kind, junk, torch.zeros(1, 2), torch.zeros(1, 2))  # type: ignore[arg-type]
        kl.sum().backward()
        assert torch.equal(kl, torch.zeros(1, 2)) and junk.grad is not None and not junk.grad.any()
