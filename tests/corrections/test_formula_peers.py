"""Methods of peers and of newer papers: each formula written out in plain Python, in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from correction_helpers import mismatched_step, on_ranks, pipeline_of
from grid_bandit import Case, gradient, logits, share
from grid_cells import AGGREGATIONS, Cell
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlcore.corrections.covariance import KlCovSpec, covariance
from rlcore.corrections.dppo import DppoSpec, binary_divergence, topk_divergence
from rlcore.corrections.functional import (
    JackpotSpec,
    JackpotTokens,
    TopK,
    drpo,
    jackpot,
    m2po,
    minpro,
    outliers,
    tis,
    vesp,
)
from rlcore.corrections.numerics import ONE_RANK, InvalidArgument, smallest_that_fit

LOGS = st.lists(st.floats(-3, 3), min_size=1, max_size=9)
Rows = list[list[float]]


def padded(rows: Rows) -> tuple[Tensor, Tensor]:
    """Log ratios [B, T] as differences to 0, NaN outside the mask."""
    mask = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.bool)
    logs = torch.full(mask.shape, math.nan, dtype=torch.float64)
    for i, row in enumerate(rows):
        mask[i, : len(row)] = True
        logs[i, : len(row)] = torch.tensor(row, dtype=torch.float64)
    return logs, mask


def unpadded(values: Tensor, mask: Tensor) -> Rows:
    return [v[m].tolist() for v, m in zip(values, mask)]


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=30),
    limit=st.floats(-60, 60),
    cut=st.integers(0, 30),
)
def test_the_smallest_that_fit_are_found_by_bits(
    values: list[float], limit: float, cut: int
) -> None:
    """On one rank, and on two of which one may be empty."""
    v = torch.tensor([values], dtype=torch.float64)
    on = torch.ones(v.shape, dtype=torch.bool)

    def fits(counts: Tensor, sums: Tensor) -> Tensor:
        return sums <= limit * counts

    bounds = [b for b in sorted(set(values)) if mean([x for x in values if x <= b]) <= limit]
    expected = [bool(bounds) and x <= bounds[-1] for x in values]
    assert smallest_that_fit(v, on, fits, None)[0].tolist() == expected
    shares = [(v[:, :cut], on[:, :cut]), (v[:, cut:], on[:, cut:])]
    found = on_ranks(lambda r, reduce: smallest_that_fit(*shares[r], fits, reduce), 2)
    assert torch.cat(found, 1)[0].tolist() == expected


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(LOGS, min_size=1, max_size=4), budget=st.floats(0.01, 5))
def test_m2po_masks_the_largest_until_the_rest_keeps_to_the_budget(
    rows: Rows, budget: float
) -> None:
    logs, mask = padded(rows)
    left = sorted((d * d for row in rows for d in row), reverse=True)
    while left and mean(left) > budget:
        left.pop(0)
    found = m2po(logs, torch.zeros_like(logs), mask, budget=budget)
    bound = left[0] if left else -1.0
    for row, weights in zip(rows, unpadded(found, mask)):
        for d, weight in zip(row, weights):
            if abs(d * d - bound) > 1e-6 * bound:  # ties in float32 stay or go together
                assert weight == (d * d < bound)
    assert (found[~mask] == 1).all()


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(LOGS, min_size=1, max_size=4), budget=st.floats(0.01, 5), seed=st.integers())
def test_m2po_over_harmful_tokens_is_the_paper_s_algorithm(
    rows: Rows, budget: float, seed: int
) -> None:
    """Algorithm 1 of arXiv 2510.01161, line by line."""
    logs, mask = padded(rows)
    g = torch.Generator().manual_seed(seed % 1000)
    advantages = torch.randint(-1, 2, logs.shape, generator=g)
    moments = logs.double().square()
    trusted = (mask & (advantages * logs > 0)).nonzero().tolist()
    while trusted and mean([float(moments[i, j]) for i, j in trusted]) > budget:
        trusted.remove(max(trusted, key=lambda at: float(moments[at[0], at[1]])))
    how = {"budget": budget, "over": "harmful", "advantages": advantages}
    found = m2po(logs, torch.zeros_like(logs), mask, **how)
    bound = max((float(moments[i, j]) for i, j in trusted), default=0.0)
    for i, j in mask.nonzero().tolist():
        harmful = advantages[i, j] * logs[i, j] > 0
        if not harmful or abs(moments[i, j] - bound) > 1e-6 * bound:  # ties stay or go together
            assert found[i, j] == (not harmful or moments[i, j] <= bound)
    assert (found[~mask] == 1).all()


@pytest.mark.parametrize("over", ["all", "harmful"])
def test_m2po_s_second_moment_is_finite_where_p_ref_cannot_sample_a_token(over) -> None:
    step = mismatched_step(seed=2)
    step.logp_ref = step.logp_ref.clone()
    step.logp_ref[0, 0] = -math.inf
    step.advantages = torch.where(step.mask, -1.0, step.advantages)
    pipeline = pipeline_of({"m2po": {"over": over}, "tis": {}})
    found = pipeline.correct(step, ONE_RANK)
    assert 0 < found.metrics["correction/m2po/second_moment"] <= 400
    assert found.weight[0, 0] == 0 and found.metrics["correction/m2po/masked_share"] > 0


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(LOGS, min_size=1, max_size=4), cap=st.floats(1, 8))
def test_minpro_multiplies_by_the_smallest_ratio_before(rows: Rows, cap: float) -> None:
    logs, mask = padded(rows)
    found = unpadded(minpro(logs, torch.zeros_like(logs), mask, cap=cap), mask)
    for row, weights in zip(rows, found):
        for t, weight in enumerate(weights):
            least = min((math.exp(d) for d in row[:t]), default=1.0)
            assert weight == pytest.approx(min(math.exp(row[t]) * least, cap), rel=1e-12)


def test_a_prefix_minimum_skips_tokens_without_a_ratio() -> None:
    logs, mask = padded([[-1.0, math.nan, 0.5, 0.25]])
    mask[0, 2] = False
    found = minpro(logs, torch.zeros_like(logs), mask)[0]
    assert found.tolist() == pytest.approx([math.exp(-1), 0.0, 1.0, math.exp(-0.75)])


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(LOGS, min_size=1, max_size=4),
    a=st.sampled_from([1.5, 0.0, -0.5]),
    k=st.floats(0, 4),
    lam=st.floats(0, 4),
)
def test_vespo_s_kernel_is_of_the_product(rows: Rows, a: float, k: float, lam: float) -> None:
    logs, mask = padded(rows)
    mine: dict[str, Any] = {
        f"k_{'neg' if a < 0 else 'pos'}": k,
        f"lam_{'neg' if a < 0 else 'pos'}": lam,
    }
    advantages = torch.full_like(logs, a)
    found = unpadded(vesp(logs, torch.zeros_like(logs), advantages, mask, **mine), mask)
    for row, weights in zip(rows, found):
        w = math.exp(max(-20.0, min(20.0, sum(row))))
        assert weights == pytest.approx([w**k * math.exp(lam * (1 - w))] * len(row), rel=1e-9)


def test_vespo_s_kernel_is_1_without_mismatch_and_ends_on_both_sides() -> None:
    logs, mask = padded([[0.0], [9.0], [-9.0], [0.0] * 1])
    weight = vesp(logs, torch.zeros_like(logs), torch.ones_like(logs), mask)[:, 0]
    assert weight[0] == 1.0 and weight[1] < 1e-9 and weight[2] < 1e-3


OVER = {
    "sum": math.fsum,
    "mean": mean,
    "worst": max,
}


@settings(max_examples=80, deadline=None)
@given(
    rows=st.lists(LOGS, min_size=1, max_size=4),
    kind=st.sampled_from(["k1", "k2", "k3"]),
    over=st.sampled_from(["token", *OVER]),
    threshold=st.floats(0.01, 3),
)
def test_outliers_are_judged_as_declared(
    rows: Rows, kind: Any, over: Any, threshold: float
) -> None:
    logs, mask = padded(rows)
    found = outliers(
        logs, torch.zeros_like(logs), mask, threshold=threshold, divergence=kind, over=over
    )
    for row, weights in zip(rows, unpadded(found, mask)):
        each = {
            "k1": [abs(d) for d in row],
            "k2": [d * d / 2 for d in row],
            "k3": [math.exp(d) - 1 - d for d in row],
        }[kind]
        judged = each
        if over != "token":
            value = abs(OVER[over](row)) if kind == "k1" and over != "worst" else OVER[over](each)
            judged = [value] * len(row)
        for weight, value in zip(weights, judged):
            if abs(value - threshold) > 1e-9:
                assert weight == (value <= threshold)


def test_masks_by_sequence_go_beside_weights_by_token() -> None:
    step = mismatched_step(noise=0.5)
    chosen = {
        "tis": {"cap": 1.5},
        "outliers": {"threshold": 0.1, "divergence": "k3", "over": "mean"},
    }
    found = pipeline_of(chosen).correct(step, ONE_RANK, measure=False)
    d = (step.logp_ref - step.logp_inf).where(step.mask, 0.0).double()
    k3 = (d.exp() - 1 - d).sum(-1) / step.mask.sum(-1)
    expected = d.exp().clamp(max=1.5).where((k3 <= 0.1)[:, None], 0.0)
    torch.testing.assert_close(found.weight[step.mask].double(), expected[step.mask])
    assert 0 < (k3 > 0.1).sum() < len(k3)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_tis_has_a_floor_and_a_mean_of_1(level: Any) -> None:
    step = mismatched_step(noise=0.5)
    rows = unpadded((step.logp_ref - step.logp_inf).double(), step.mask)
    if level == "sequence":
        rows = [[sum(row)] * len(row) for row in rows]
    weights = [[min(max(math.exp(d), 0.7), 1.3) for d in row] for row in rows]
    flat = [w for row in weights for w in row]
    found = tis(step.logp_ref, step.logp_inf, step.mask, cap=1.3, floor=0.7, level=level)
    assert found[step.mask].tolist() == pytest.approx(flat, rel=1e-5)
    chosen = {"tis": {"cap": 1.3, "floor": 0.7, "level": level, "normalised": True}}
    corrected = pipeline_of(chosen).correct(step, ONE_RANK)
    average = mean(flat if level == "token" else [row[0] for row in weights])
    assert corrected.metrics["correction/tis/batch_mean"] == pytest.approx(average, rel=1e-6)
    assert corrected.weight[step.mask].tolist() == pytest.approx(
        [w / average for w in flat], rel=1e-5
    )
    assert pipeline_of(chosen).needs.batch_stats and not pipeline_of({"tis": {}}).needs.batch_stats


# ----- DPPO's other forms -----


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), kind=st.sampled_from(["tv", "kl"]), k=st.integers(1, 9))
def test_the_top_k_divergence_is_that_of_k_bins_and_the_rest(seed: int, kind: Any, k: int) -> None:
    g = torch.Generator().manual_seed(seed)
    new, inf = (2 * torch.randn(9, generator=g, dtype=torch.float64) for _ in range(2))
    new, inf = new.log_softmax(0), inf.log_softmax(0)
    top = inf.topk(k)
    found = topk_divergence(
        kind,
        torch.cat([top.indices, torch.tensor([-1, int(top.indices[0])])])[None, None],
        torch.cat([top.values, torch.tensor([-math.inf, 0.0])])[None, None],
        torch.cat([new[top.indices], torch.tensor([0.0, 0.0])])[None, None],
    ).item()
    bins = [
        [p.exp()[top.indices].tolist(), 1 - p.exp()[top.indices].sum().item()] for p in (inf, new)
    ]
    q, p = ([*listed, max(rest, 0.0)] for listed, rest in bins)
    if kind == "tv":
        written = sum(abs(a - b) for a, b in zip(p, q)) / 2
        whole = (new.exp() - inf.exp()).abs().sum().item() / 2
    else:
        written = sum(b * math.log(max(b, 1e-8) / max(a, 1e-8)) for a, b in zip(p, q))
        whole = (inf.exp() * (inf - new)).sum().item()
    assert found == pytest.approx(written, abs=1e-7)
    assert found <= whole + 1e-7
    stored = int(top.indices[-1])
    assert found >= binary_divergence(kind, new[stored], inf[stored]).item() - 1e-7


def test_dppo_masks_by_the_stored_top_k() -> None:
    step = mismatched_step(noise=0.6, k=6)
    bounds = {"low": 0.2, "high": 0.2, "cap": 1e9}
    pipeline = pipeline_of({"dppo": {"divergence": "topk_tv", **bounds}}, loss="reinforce")
    assert pipeline.needs.topk and pipeline.needs.new
    found = pipeline.correct(step, ONE_RANK, measure=False)
    assert step.topk_logp_inf is not None and step.new_logp_at_inf_ids is not None
    inf, new = step.topk_logp_inf.double().exp(), step.new_logp_at_inf_ids.double().exp()
    far = ((inf - new).abs().sum(-1) + (inf.sum(-1) - new.sum(-1)).abs()) / 2 > 0.2
    d, a = step.logp_new - step.logp_inf, step.advantages
    out = far & (a * d > 0) & step.mask
    torch.testing.assert_close(found.weight == 0, out)
    assert 0 < out.sum() < step.mask.sum()


@settings(max_examples=60, deadline=None)
@given(
    p=st.floats(1e-3, 0.999),
    q=st.floats(1e-3, 0.999),
    a=st.floats(-3, 3),
    delta=st.floats(0.05, 20),
)
def test_drpo_is_the_gradient_of_its_regularised_objective(
    p: float, q: float, a: float, delta: float
) -> None:
    """`r A - |A|/(2 delta) q (r - 1)^2` by autograd; weight times A is the slope in log p."""
    logp = torch.tensor(math.log(p), dtype=torch.float64, requires_grad=True)
    r = (logp - math.log(q)).exp()
    (r * a - abs(a) / (2 * delta) * q * (r - 1) ** 2).backward()
    logs = [torch.tensor([[math.log(x)]], dtype=torch.float64) for x in (p, q)]
    given_a = torch.tensor([[a]], dtype=torch.float64)
    weight = drpo(*logs, given_a, torch.ones(1, 1), delta=delta, cap=1e9).item()
    assert logp.grad is not None
    assert weight * a == pytest.approx(logp.grad.item(), rel=1e-9, abs=1e-12)


def test_wrong_arguments_are_named() -> None:
    x, on = torch.zeros(1, 2), torch.ones(1, 2)
    for call, argument in [
        (lambda: m2po(x, x, on, budget=0.0), "budget"),
        (lambda: m2po(x, x, on, over="some"), "over"),
        (lambda: m2po(x, x, on, over="harmful"), "advantages"),
        (lambda: minpro(x, x, on, cap=0.5), "cap"),
        (lambda: vesp(x, x, x, on, k_neg=-1.0), "k_neg"),
        (lambda: outliers(x, x, on, threshold=0.0), "threshold"),
        (lambda: drpo(x, x, x, on, delta=0.0), "delta"),
        (lambda: tis(x, x, on, floor=2.0), "floor"),
    ]:
        with pytest.raises(InvalidArgument, match=argument):
            call()


# ----- penalties, and covariance -----


def case_of(name: str, spec: Any, loss: str) -> Case:
    case = Cell((), loss, "token-mean", True, "none").case()
    return replace(case, corrections={name: spec})


def penalty_gradient(case: Case, coef: float, around: str) -> Tensor:
    """Of `coef * mean of (log p_new/p)^2` over the actor's tokens, negated."""
    batch = case.batch
    z = logits(case.p_new).requires_grad_()
    other = batch.inf if around == "inf" else batch.at(case.policies.ref)
    d = batch.at(z.log_softmax(-1).exp()).log() - other.log()
    loss = (share(case, batch) * coef * d * d).where(batch.mask, 0.0).sum()
    return -torch.autograd.grad(loss, z)[0]


@pytest.mark.parametrize("region", ["mask", "smooth"])
def test_dppo_s_penalty_is_of_every_token(region: Any) -> None:
    """Masked ones too, in micro-batches and over ranks."""
    bare = DppoSpec(region=region, low=0.05, high=0.05)
    plain = gradient(case_of("dppo", bare, "reinforce"))[0]
    case = case_of("dppo", bare.model_copy(update={"penalty": 0.3}), "reinforce")
    for layout in ({}, {"ranks": 2, "parts": 2}):
        found = gradient(case, **layout)[0] - plain
        torch.testing.assert_close(found, penalty_gradient(case, 0.3, "inf"), atol=1e-9, rtol=1e-6)


def test_kl_cov_s_penalty_is_around_p_ref() -> None:
    plain = gradient(case_of("kl_cov", KlCovSpec(share=1.0, coef=0.0), "ppo"))[0]
    case = case_of("kl_cov", KlCovSpec(share=1.0, coef=0.4), "ppo")
    found = gradient(case)[0] - plain
    torch.testing.assert_close(found, penalty_gradient(case, 0.2, "ref"), atol=1e-9, rtol=1e-6)
    first = replace(case, later=False)
    assert torch.equal(gradient(first)[0], gradient(replace(first, corrections={}))[0])


def covariances(logp: Tensor, advantages: Tensor, mask: Tensor) -> Rows:
    rows, a = unpadded(logp.double(), mask), unpadded(advantages.double(), mask)
    mean_logp, mean_a = mean([x for row in rows for x in row]), mean([x for row in a for x in row])
    return [[(x - mean_logp) * (y - mean_a) for x, y in zip(r, s)] for r, s in zip(rows, a)]


def test_covariances_are_centred_over_the_batch() -> None:
    step = mismatched_step()
    found, on = covariance(step.logp_new, step.advantages, step.mask)
    assert torch.equal(on, step.mask)
    for row, expected in zip(
        unpadded(found, step.mask), covariances(step.logp_new, step.advantages, step.mask)
    ):
        assert row == pytest.approx(expected, rel=1e-9)


def test_kl_cov_penalises_the_largest_share() -> None:
    step = mismatched_step()
    found = pipeline_of({"kl_cov": {"share": 0.2, "coef": 0.5}}).correct(step, ONE_RANK)
    flat = [x for row in covariances(step.logp_new, step.advantages, step.mask) for x in row]
    least = sorted(flat)[-int(0.2 * len(flat))]
    d = (step.logp_new - step.logp_ref)[step.mask].tolist()
    assert found.score is not None
    expected = [0.5 * x if c >= least else 0.0 for x, c in zip(d, flat)]
    assert found.score[step.mask].tolist() == pytest.approx(expected, rel=1e-5)
    assert (found.weight == 1).all()


def test_clip_cov_draws_a_share_among_those_between_the_bounds() -> None:
    step = mismatched_step(b=400, t=20, v=10)
    bounds = {"share": 0.1, "low": 0.1, "high": 2.0}
    found = pipeline_of({"clip_cov": bounds}).correct(step, ONE_RANK)
    flat = [x for row in covariances(step.logp_new, step.advantages, step.mask) for x in row]
    candidates = torch.tensor([0.1 < x < 2.0 for x in flat])
    drawn = (found.weight == 0)[step.mask]
    assert not (drawn & ~candidates).any()
    expected, n = 0.1 * len(flat), int(candidates.sum())
    spread = math.sqrt(expected * (1 - expected / n))
    assert abs(drawn.sum().item() - expected) < 5 * spread and expected < n / 2
    everyone = pipeline_of({"clip_cov": bounds | {"share": 1.0}}).correct(step, ONE_RANK)
    assert torch.equal((everyone.weight == 0)[step.mask], candidates)


# ----- Jackpot averaged over its draws -----


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1000), c1=st.floats(1.0, 4.0), noise=st.floats(0.1, 2.0))
def test_expected_jackpot_is_min_of_z_rho_and_c1_over_the_accepted_share(
    seed: int, c1: float, noise: float
) -> None:
    """At lambda 1, to 1e-12: and the mean of mode=both over its draws."""
    g = torch.Generator().manual_seed(seed)
    base = 2 * torch.randn(3, 5, 12, generator=g, dtype=torch.float64)
    off = noise * torch.randn(base.shape, generator=g, dtype=torch.float64)
    inf, ref = base.log_softmax(-1), (base + off).log_softmax(-1)
    token = torch.randint(0, 12, (3, 5, 1), generator=g)
    ours, theirs = (logp.gather(-1, token)[..., 0] for logp in (ref, inf))
    a, b = inf.topk(6), ref.topk(6)
    topk = TopK(a.indices, a.values, b.indices, b.values, ref.gather(-1, a.indices))
    mask = torch.rand(3, 5, generator=g) < 0.8
    tokens = JackpotTokens(ours, ours, theirs, mask, torch.full((3, 5), 0.5), topk)
    found = jackpot(tokens, JackpotSpec(mode="expected", c1=c1))
    drawn = jackpot(tokens, JackpotSpec(mode="both", c1=c1))
    assert found.z is not None and torch.equal(found.keep, mask)
    accepted = found.probability[mask].mean() if mask.any() else torch.ones(())
    rho = (ours - theirs).exp()
    expected = (found.z * rho).clamp(max=c1)
    averaged = drawn.probability * drawn.weight  # what a draw adds: its weight, or nothing
    for written in (expected, averaged):
        torch.testing.assert_close(
            (found.weight * accepted)[mask], written[mask], atol=1e-12, rtol=1e-12
        )


@pytest.mark.parametrize("target", ["ref", "new"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_expected_jackpot_has_the_gradient_of_all_draws(aggregation: Any, target: Any) -> None:
    """The bandit holds every draw as often as it occurs."""
    chosen = (("jackpot", (("target", target),)),)
    case = Cell(chosen, "ppo", aggregation, True, "none").case()
    (spec,) = case.corrections.values()
    expected = replace(case, corrections={"jackpot": spec.model_copy(update={"mode": "expected"})})
    torch.testing.assert_close(gradient(expected)[0], gradient(case)[0], atol=1e-9, rtol=1e-7)
