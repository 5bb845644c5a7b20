"""OBRS and Jackpot's weights: against the sum over the whole vocabulary, and the paper's theory as
laws."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rlcore.corrections.functional import (
    jackpot_weight,
    obrs_acceptance,
    obrs_calibrate,
    obrs_normalizer,
)

LAMBDAS = st.sampled_from([0.3, 0.7, 1.0, 1.5, 4.0])
SEEDS = st.integers(0, 100_000)


def pair(
    seed: int, v: int = 30, noise: float = 1.0, n: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """log p_inf and log p_target [n, v] in float64."""
    g = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(n, v, generator=g, dtype=torch.float64)
    moved = logits + noise * torch.randn(n, v, generator=g, dtype=torch.float64)
    return logits.log_softmax(-1), moved.log_softmax(-1)


def truncated(inf: torch.Tensor, tgt: torch.Tensor, k: int, k2: int | None = None):
    """The five tensors a learner would hand over, [n, k]."""
    a, b = inf.topk(k, -1), tgt.topk(k2 or k, -1)
    return (
        a.indices,
        a.values.float(),
        b.indices,
        b.values.float(),
        tgt.gather(-1, a.indices).float(),
    )


def brute_force(args, lam: float, missing: str, tail: str) -> tuple[float, float]:
    """METHODS.md's sums over one position, token by token."""
    ids_i, lp_i, ids_t, lp_t, at_i = (x.tolist() for x in args)
    p_inf = {i: math.exp(lp) for i, lp in zip(ids_i, lp_i) if i >= 0}
    p_tgt = {i: math.exp(lp) for i, lp in zip(ids_i, at_i) if i >= 0}
    p_tgt |= {i: math.exp(lp) for i, lp in zip(ids_t, lp_t) if i >= 0}
    unknown = [i for i in p_tgt if i not in p_inf]
    total = len(p_tgt)
    if missing == "bound" and unknown:
        share = min(min(p_inf.values()), (1 - sum(p_inf.values())) / len(unknown))
        p_inf |= {i: share for i in unknown}
    z = sum(min(p_inf.get(i, 0.0), p_tgt[i] / lam) for i in p_tgt)
    if tail == "residual":
        z += max(0.0, min(1 - sum(p_inf.values()), (1 - sum(p_tgt.values())) / lam))
    return z, len(unknown) / total


@pytest.mark.parametrize("missing", ["zero", "bound"])
@pytest.mark.parametrize("tail", ["none", "residual"])
@settings(max_examples=20, deadline=None)
@given(seed=SEEDS, lam=LAMBDAS, k=st.integers(1, 12), k2=st.integers(1, 12))
def test_normalizer_is_the_sum_over_the_union(
    missing, tail, seed: int, lam: float, k: int, k2: int
) -> None:
    args = truncated(*pair(seed), k, k2)
    z, unknown = obrs_normalizer(*args, lam=lam, missing=missing, tail=tail)
    expected = brute_force([x[0] for x in args], lam, missing, tail)
    assert z.item() == pytest.approx(expected[0], abs=2e-6)
    assert unknown.item() == pytest.approx(expected[1])


@settings(max_examples=20, deadline=None)
@given(seed=SEEDS, lam=LAMBDAS, k=st.integers(1, 30))
def test_the_two_tails_enclose_the_true_normaliser(seed: int, lam: float, k: int) -> None:
    inf, tgt = pair(seed)
    true = torch.minimum(inf.exp(), tgt.exp() / lam).sum().item()
    low, _ = obrs_normalizer(*truncated(inf, tgt, k), lam=lam)
    args = truncated(
        inf, tgt, k, 30
    )  # with every p_t known nothing outside the actor's top k is lost by missing=zero
    full = (*args[:2], args[0], args[4], args[4])
    high, _ = obrs_normalizer(*full, lam=lam, tail="residual")
    assert low.item() <= true + 1e-6
    assert high.item() >= true - 1e-6
    assert high.item() <= min(1.0, 1.0 / lam) + 1e-7


@settings(max_examples=20, deadline=None)
@given(seed=SEEDS, lam=LAMBDAS)
def test_padding_and_repeated_ids_count_nothing(seed: int, lam: float) -> None:
    args = truncated(*pair(seed, v=6), 6)
    ids_i, lp_i, ids_t, lp_t, at_i = args
    pad = torch.full((1, 3), -1), torch.full((1, 3), -0.3)  # as if they were likely
    again = torch.cat([ids_i, ids_i[:, :2], pad[0]], -1)
    padded = (
        again,
        torch.cat([lp_i, lp_i[:, :2], pad[1]], -1),
        torch.cat([pad[0], ids_t, ids_t[:, :1]], -1),
        torch.cat([pad[1], lp_t, lp_t[:, :1]], -1),
        torch.cat([at_i, at_i[:, :2], torch.zeros(1, 3)], -1),
    )
    for missing in ("zero", "bound"):
        for tail in ("none", "residual"):
            options = {"lam": lam, "missing": missing, "tail": tail}
            for clean, dirty in zip(
                obrs_normalizer(*args, **options), obrs_normalizer(*padded, **options)
            ):
                assert torch.equal(clean, dirty)


@pytest.mark.parametrize(
    ("k", "tail"), [(1, "residual"), (5, "residual"), (300, "residual"), (300, "none")]
)
def test_matched_distributions_weigh_exactly_one(k: int, tail: str) -> None:
    logits = 3 * torch.randn(4, 9, 300)
    logp = torch.log_softmax(logits, -1)
    top = logp.topk(k, -1)
    z, unknown = obrs_normalizer(
        top.indices, top.values, top.indices, top.values, top.values, tail=tail
    )
    taken = logp[..., 17]
    accepted = obrs_acceptance(taken, taken)
    calibrated, kappa, alpha = obrs_calibrate(z, accepted, torch.ones(4, 9))
    ones = torch.ones(4, 9)
    assert torch.equal(z, ones) and torch.equal(calibrated, ones) and torch.equal(accepted, ones)
    assert kappa == 1.0 and alpha == 1.0 and not unknown.any()
    for target in ("ref", "new"):
        assert torch.equal(jackpot_weight(calibrated, taken, taken, taken, target=target), ones)


def test_dropped_tail_of_a_matched_pair_is_the_missing_mass() -> None:
    logp, _ = pair(3)
    z, _ = obrs_normalizer(*truncated(logp, logp, 5))
    assert z.item() == pytest.approx(logp.exp().topk(5).values.sum().item(), abs=1e-6)


def test_actor_without_a_stored_top_k_falls_back_on_the_acceptance() -> None:
    empty = torch.zeros(2, 3, 0)
    z, unknown = obrs_normalizer(empty.long(), empty, empty.long(), empty, empty)
    assert not z.any() and not unknown.any()
    calibrated, kappa, alpha = obrs_calibrate(
        z, torch.tensor([[1, 1, 0], [1, 1, 1]]), torch.ones(2, 3)
    )
    assert alpha == pytest.approx(5 / 6) and kappa == 1.0
    torch.testing.assert_close(calibrated, torch.full((2, 3), 5 / 6))


@settings(max_examples=30, deadline=None)
@given(seed=SEEDS, lam=LAMBDAS, noise=st.floats(0.0, 3.0))
def test_expected_acceptance_is_the_normaliser(seed: int, lam: float, noise: float) -> None:
    inf, tgt = pair(seed, noise=noise)
    accepted = (inf.exp() * obrs_acceptance(tgt, inf, lam=lam)).sum().item()
    z, _ = obrs_normalizer(*truncated(inf, tgt, 30), lam=lam)
    assert z.item() == pytest.approx(accepted, abs=2e-6)
    assert z.item() <= 1 / lam + 1e-6


def kl(p: torch.Tensor, q: torch.Tensor) -> float:
    return (p * (p.log() - q.log())).sum().item()


@settings(max_examples=40, deadline=None)
@given(seed=SEEDS, lam=LAMBDAS, shape=st.floats(0.1, 5.0))
def test_no_acceptance_rule_of_the_same_budget_comes_closer(
    seed: int, lam: float, shape: float
) -> None:
    inf, tgt = pair(seed)
    rule = obrs_acceptance(tgt, inf, lam=lam)
    budget = (inf.exp() * rule).sum()
    rival = (
        torch.rand(
            inf.shape, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64
        )
        ** shape
    )
    low, high = 0.0, 1e12
    for _ in range(200):  # scale the rival to the same budget
        middle = (low + high) / 2 if high < 1e3 else math.sqrt(max(low, 1e-6) * high)
        if (inf.exp() * (rival * middle).clamp(max=1)).sum() < budget:
            low = middle
        else:
            high = middle
    rival = (rival * high).clamp(max=1)
    assume(abs((inf.exp() * rival).sum() - budget) < 1e-9)
    ours = kl(tgt.exp(), inf.exp() * rule / budget)
    assert ours <= kl(tgt.exp(), inf.exp() * rival / budget) + 1e-7
    assert ours <= kl(tgt.exp(), inf.exp()) + 1e-7


@settings(max_examples=30, deadline=None)
@given(seed=SEEDS, noise=st.floats(0.1, 3.0))
def test_kl_to_the_target_does_not_rise_with_lambda(seed: int, noise: float) -> None:
    inf, tgt = pair(seed, noise=noise)
    distances = []
    for lam in (0.1, 0.3, 1.0, 1.5, 3.0, 10.0, 100.0):
        kept = inf.exp() * obrs_acceptance(tgt, inf, lam=lam)
        distances.append(kl(tgt.exp(), kept / kept.sum()))
    assert all(b <= a + 1e-7 for a, b in itertools.pairwise(distances))


@settings(max_examples=20, deadline=None)
@given(seed=SEEDS, lam=LAMBDAS, target=st.sampled_from(["ref", "new"]))
def test_the_mean_over_accepted_tokens_is_the_targets(seed: int, lam: float, target: str) -> None:
    """Enumerated over one state: sum p_inf a w f / sum p_inf a = E_{p_t}[f], and p_ref's mean for
    target=new."""
    inf, ref = pair(seed, noise=0.5)
    _, new = pair(seed, noise=0.7)
    towards = ref if target == "ref" else new
    f = torch.randn(inf.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    accepted = inf.exp() * obrs_acceptance(towards, inf, lam=lam)
    z = accepted.sum()
    weight = jackpot_weight(z.expand_as(inf), new, ref, inf, target=target, lam=lam, c1=1e9, c2=1e9)
    estimate = (accepted * weight * f).sum() / accepted.sum()
    assert estimate.item() == pytest.approx((ref.exp() * f).sum().item(), abs=1e-5)
    assert (accepted * weight * f).sum().item() == pytest.approx(
        z.item() * (ref.exp() * f).sum().item(), abs=1e-5
    )


def test_weights_are_capped() -> None:
    new, ref, inf = torch.tensor([[-0.1]]), torch.tensor([[-0.01]]), torch.tensor([[-5.0]])
    z = torch.ones(1, 1)
    assert jackpot_weight(z, new, ref, inf, target="ref", c1=3.0).item() == 3.0
    assert jackpot_weight(z, inf, ref, inf, target="new", c1=3.0, c2=2.0).item() == 2.0
    assert jackpot_weight(z * 0.5, new, inf, ref, target="ref", lam=1.0).item() == 0.5


@pytest.mark.parametrize("k", [5, 10, 20])
@pytest.mark.parametrize("alpha_hat", ["bernoulli", "expected"])
def test_kappa_repairs_the_dropped_tail(k: int, alpha_hat: str) -> None:
    inf, tgt = pair(11, v=400, noise=0.4, n=6000)
    true = torch.minimum(inf.exp(), tgt.exp()).sum(-1)
    g = torch.Generator().manual_seed(5)
    token = torch.multinomial(inf.exp(), 1, generator=g)
    accepted = obrs_acceptance(tgt.gather(-1, token), inf.gather(-1, token))[:, 0]
    if alpha_hat == "bernoulli":
        accepted = torch.rand(len(accepted), generator=g) < accepted
    z, _ = obrs_normalizer(*truncated(inf, tgt, k))
    calibrated, kappa, _ = obrs_calibrate(z[None], accepted[None], torch.ones(1, len(z)))
    before = abs(z.double().mean() - true.mean()) / true.mean()
    after = abs((z.double() * kappa).mean() - true.mean()) / true.mean()
    assert before > 0.03 and kappa > 1.03
    assert after < 0.015
    assert (calibrated <= 1).all() and (calibrated[0] - true).abs().mean() < (z - true).abs().mean()


def test_expected_acceptance_is_the_steadier_estimate() -> None:
    inf, tgt = pair(2, noise=1.0)
    g = torch.Generator().manual_seed(0)
    tokens = torch.multinomial(inf.exp(), 200 * 64, replacement=True, generator=g).view(200, 64)
    a = obrs_acceptance(tgt, inf)[0][tokens]
    drawn = torch.rand(a.shape, generator=g) < a
    assert a.mean(-1).std() < drawn.float().mean(-1).std()


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e4, -1e4])
def test_broken_and_extreme_log_probs_stay_finite(junk: float) -> None:
    broken = torch.tensor([[junk, -1.0]])
    fine = torch.tensor([[-1.0, -1.0]])
    for a, b in ((broken, fine), (fine, broken), (broken, broken)):
        accepted = obrs_acceptance(a, b)
        assert ((accepted >= 0) & (accepted <= 1)).all()
        for target in ("ref", "new"):
            weight = jackpot_weight(torch.full((1, 2), 0.5), a, fine, b, target=target)
            assert torch.isfinite(weight).all()
    if math.isnan(junk):
        assert obrs_acceptance(fine, broken)[0, 0] == 0
        assert jackpot_weight(torch.ones(1, 2), fine, fine, broken)[0, 0] == 0
    ids = torch.zeros(1, 2, 1, dtype=torch.long)
    z, _ = obrs_normalizer(
        ids, broken[..., None], ids, fine[..., None], broken[..., None], tail="residual"
    )
    assert ((z >= 0) & (z <= 1)).all()


def test_calibration_ignores_masked_tokens_and_survives_none() -> None:
    z = torch.tensor([[0.5, math.nan]])
    accepted = torch.tensor([[1.0, math.nan]])
    out, kappa, alpha = obrs_calibrate(z, accepted, torch.tensor([[1, 0]]))
    assert (kappa, alpha) == (2.0, 1.0) and out.tolist() == [[1.0, 1.0]]
    out, kappa, alpha = obrs_calibrate(z, accepted, torch.zeros(1, 2))
    assert (kappa, alpha) == (1.0, 1.0) and torch.isfinite(out).all()
