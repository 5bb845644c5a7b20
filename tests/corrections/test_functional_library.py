"""`functional` as a library: micro-batches, one-call Jackpot, argument checks, no waiting."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from correction_helpers import log_softmax, mismatched_step, pipeline_of

from rlcore.corrections import functional as F
from rlcore.corrections.functional import JackpotSpec, JackpotTokens, TopK
from rlcore.corrections.numerics import ONE_RANK
from rlcore.errors import UserError
from rlcore.types import StepTensors

CUTS = [[range(8)], [range(1), range(1, 8)], [[i] for i in (5, 3, 7, 1, 0, 6, 2, 4)]]


def step_of() -> StepTensors:
    return mismatched_step(b=8, t=12, noise=0.6, seed=5)


def jackpot_tokens(step: StepTensors, target: str = "ref") -> JackpotTokens:
    assert step.topk_ids_inf is not None and step.topk_logp_inf is not None
    sides = (
        (step.ref_topk_ids, step.ref_topk_logp, step.ref_logp_at_inf_ids)
        if target == "ref"
        else (step.new_topk_ids, step.new_topk_logp, step.new_logp_at_inf_ids)
    )
    uniforms = F.token_uniforms(9, "obrs", step.step, step.sample_ids, step.mask.shape[1])
    return JackpotTokens(
        step.logp_new,
        step.logp_ref,
        step.logp_inf,
        step.mask,
        uniforms,
        TopK(step.topk_ids_inf, step.topk_logp_inf, *sides),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("cut", CUTS, ids=["whole", "uneven", "eight"])
def test_ais_of_micro_batches_is_ais_of_the_batch(cut: list[Any]) -> None:
    s = step_of()
    whole, expected = F.ais(s.logp_ref, s.logp_inf, s.advantages, s.mask, delta=0.5)
    parts = [s.rows(list(part)) for part in cut]
    statistics = F.merge(
        F.ais_accumulate(p.logp_ref, p.logp_inf, p.advantages, p.mask) for p in parts
    )
    for part, p in zip(cut, parts):
        weight, signals = F.ais_weight(statistics, p.logp_ref, p.logp_inf, p.mask, delta=0.5)
        torch.testing.assert_close(weight, whole[list(part)], rtol=1e-6, atol=1e-7)
        assert {n: v.item() for n, v in signals.items()} == pytest.approx(expected, rel=1e-9)
    assert 0 < expected["alpha"] < 1


@pytest.mark.parametrize("cut", CUTS, ids=["whole", "uneven", "eight"])
def test_the_step_size_of_micro_batches_is_that_of_the_batch(cut: list[Any]) -> None:
    s = step_of()
    logs = torch.where(s.mask != 0, s.logp_new - s.logp_inf, 0.0).double()
    w = logs.sum(-1).exp()[s.mask.any(-1)]
    share = float(w.sum() ** 2 / (len(w) * (w * w).sum()))
    parts = [s.rows(list(part)) for part in cut]
    tokens = [(p.logp_new, p.logp_inf, p.mask) for p in parts]
    largest = torch.stack([F.sequence_ess_largest(*t) for t in tokens]).max()
    statistics = F.merge(F.sequence_ess_accumulate(*t, largest=largest) for t in tokens)
    assert F.vcpo_scale(F.sequence_ess(statistics)) == pytest.approx(share**0.5, rel=1e-6)
    assert share < 0.9


def test_the_share_of_effective_tokens_ignores_how_small_all_ratios_are() -> None:
    logs = torch.tensor([[-1.0, -2.0, -5.0]], dtype=torch.float64)

    def found(shift: float) -> dict[str, float]:
        ones, zeros = torch.ones_like(logs), torch.zeros_like(logs)
        return F.mismatch_values(F.mismatch_accumulate(logs + shift, zeros, ones))

    for name in ("ess", "ratio_cv"):
        assert found(-40.0)[name] == pytest.approx(found(0.0)[name], rel=1e-9)
    assert found(-40.0)["ess"] < 0.7


def test_ais_in_two_phases_on_next_to_nothing() -> None:
    s = step_of()
    for mask in (
        torch.zeros_like(s.mask),
        torch.arange(12).expand(8, 12) + s.sample_ids[:, None] == 3,
    ):
        whole, expected = F.ais(s.logp_ref, s.logp_inf, s.advantages, mask)
        statistics = F.ais_accumulate(s.logp_ref, s.logp_inf, s.advantages, mask)
        weight, signals = F.ais_weight(statistics, s.logp_ref, s.logp_inf, mask)
        torch.testing.assert_close(weight, whole)
        assert {n: v.item() for n, v in signals.items()} == pytest.approx(expected)


@pytest.mark.parametrize("cut", CUTS, ids=["whole", "uneven", "eight"])
@pytest.mark.parametrize("alpha_hat", ["expected", "bernoulli"])
@pytest.mark.parametrize("target", ["ref", "new"])
def test_jackpot_of_micro_batches_is_the_pipeline_s(cut: list[Any], alpha_hat, target) -> None:
    s = step_of()
    settings = {"alpha_hat": alpha_hat, "target": target}
    expected = pipeline_of({"jackpot": settings}, 9).correct(s, ONE_RANK)
    spec = JackpotSpec(**settings)
    parts = [jackpot_tokens(s.rows(list(part)), target) for part in cut]
    statistics = F.merge(F.jackpot_accumulate(p, spec) for p in parts)
    for part, tokens in zip(cut, parts):
        found = F.jackpot(tokens, spec, statistics=statistics)
        kept = expected.mask[list(part)]
        assert torch.equal(found.keep, kept)
        torch.testing.assert_close(found.weight[kept], expected.weight[list(part)][kept])


def test_jackpot_in_one_call_with_the_defaults() -> None:
    s = step_of()
    found = F.jackpot(jackpot_tokens(s))
    expected = pipeline_of({"jackpot": {}}, 9).correct(s, ONE_RANK)
    assert torch.equal(found.keep, expected.mask)
    torch.testing.assert_close(found.weight[found.keep], expected.weight[found.keep])
    doubled = F.jackpot(jackpot_tokens(s), reduce=lambda sums: 2 * sums)  # an equal second rank
    torch.testing.assert_close(doubled.weight, found.weight)
    free = F.jackpot(jackpot_tokens(s), JackpotSpec(normaliser="none", c1=100.0))
    assert torch.equal(free.keep, s.mask)
    ratio = (s.logp_ref - s.logp_inf).exp().clamp(min=1.0)
    torch.testing.assert_close(free.weight[found.keep], ratio[found.keep])
    assert not free.weight[s.mask & ~found.keep].any()


@pytest.mark.parametrize("cut", CUTS, ids=["whole", "uneven", "eight"])
def test_mismatch_of_micro_batches_is_the_pipeline_s(cut: list[Any]) -> None:
    s = step_of()
    parts = [s.rows(list(part)) for part in cut]
    values = F.mismatch_values(
        F.merge(F.mismatch_accumulate(p.logp_ref, p.logp_inf, p.mask) for p in parts)
    )
    metrics = pipeline_of({}).correct(s, ONE_RANK).metrics
    for name, value in values.items():
        assert value == pytest.approx(metrics[f"mismatch/{name}"], rel=1e-12, abs=1e-15), name


T = torch.zeros(2, 3)
WRONG: list[tuple[str, Any]] = [
    ("cap=0.5", lambda: F.tis(T, T, T, cap=0.5)),
    ("level=geometric", lambda: F.tis(T, T, T, level="geometric")),  # type: ignore[arg-type]
    ("low=2.0, high=1.0", lambda: F.mis(T, T, T, low=2.0, high=1.0)),
    ("low=-1.0", lambda: F.mis(T, T, T, low=-1.0, high=1.0)),
    ("threshold=0.0", lambda: F.veto(T, T, T, threshold=0.0)),
    ("mask has shape", lambda: F.veto(T, T, torch.zeros(2))),
    ("logp_inf has shape", lambda: F.tis(T, T[:1], T)),
    ("lam=0.0", lambda: F.obrs_acceptance(T, T, lam=0.0)),
    ("logp_inf has shape", lambda: F.obrs_acceptance(T, T[0])),
    ("c1=0.5", lambda: F.jackpot_weight(T, T, T, T, c1=0.5)),
    ("c2=0.0", lambda: F.jackpot_weight(T, T, T, T, c2=0.0)),
    ("z has", lambda: F.jackpot_weight(T[0], T, T, T)),
    ("cap=0.9", lambda: F.ais(T, T, T, T, cap=0.9)),
    ("delta=0.0", lambda: F.ais(T, T, T, T, delta=0.0)),
    ("beta=-1.0", lambda: F.ais(T, T, T, T, beta=-1.0)),
    ("advantages has shape", lambda: F.ais(T, T, T[:, 0], T)),
    ("statistics has shape", lambda: F.ais_weight(torch.zeros(3), T, T, T)),
    ("statistics has shape", lambda: F.mismatch_values(torch.zeros(8))),
    ("eta=0.5", lambda: F.rapid_advantages(T, T, T, T[:, 0], T[:, 0], eta=0.5)),
    ("rewards has 3", lambda: F.rapid_advantages(T, T, T, T[0], T[0])),
    ("group_ids has shape", lambda: F.best_of_group(T[0], T[:, 0], keep=1)),
    ("keep=0", lambda: F.best_of_group(T[0], T[0], keep=0)),
    ("rho=2.0", lambda: F.safe_set_logprobs(T, T[:, 0].long(), rho=2.0)),
    ("ids has shape", lambda: F.safe_set_logprobs(T, T.long())),
    ("topk=None", lambda: F.jackpot(JackpotTokens(T, T, T, T, T))),
    ("uniforms has shape", lambda: F.jackpot(JackpotTokens(T, T, T, T, T[0]))),
]


@pytest.mark.parametrize(("said", "call"), WRONG, ids=lambda x: x if isinstance(x, str) else "")
def test_wrong_arguments_are_named(said: str, call: Any) -> None:
    with pytest.raises(F.InvalidArgument, match=said) as error:
        call()
    assert isinstance(error.value, ValueError) and isinstance(error.value, UserError)
    assert "correction." not in str(error.value) and "algorithm." not in str(error.value)


def test_nothing_asks_the_device_for_a_value() -> None:
    """On the meta device there are shapes and no values: asking for one raises."""
    with torch.device("meta"):
        f, ids = torch.empty(4, 6), torch.empty(4, 6, 5, dtype=torch.long)
        at, mask = torch.empty(4, 6, 5), torch.empty(4, 6, dtype=torch.bool)
        rewards, groups = torch.empty(4), torch.empty(4, dtype=torch.long)
        logits = torch.empty(4, 6, 9)
    tokens = JackpotTokens(f, f, f, mask, f, TopK(ids, at, ids, at, at))
    found = [
        F.tis(f, f, mask, level="sequence"),
        F.mis(f, f, mask, low=0.5, high=2.0, level="geometric"),
        F.veto(f, f, mask),
        F.obrs_acceptance(f, f),
        *F.obrs_normalizer(ids, at, ids, at, at, missing="bound", tail="residual"),
        F.obrs_divergence(ids, at, at),
        F.jackpot_weight(f, f, f, f),
        F.ais_weight(F.ais_accumulate(f, f, f, mask), f, f, mask)[0],
        F.jackpot(tokens, statistics=F.merge([F.jackpot_accumulate(tokens)] * 2)).weight,
        F.jackpot(tokens, JackpotSpec(normaliser="none")).weight,
        F.mismatch_accumulate(f, f, mask),
        *F.rapid_advantages(f, f, mask, rewards, groups, leave_one_out=True),
        F.best_of_group(rewards, groups, keep=2),
        *F.safe_set_logprobs(logits, ids[..., 0]),
        F.kl_penalty("k3", f, f, F.penalty_weight(f, f, f, mask, cap=2.0)),
        F.sampled_kl("k1", f, f, mask),
        F.full_kl(logits, logits),
    ]
    assert all(value.device.type == "meta" for value in found)


def test_divergence_of_the_kept_from_the_target() -> None:
    g = torch.Generator().manual_seed(3)
    logits = 2 * torch.randn(5, 4, 30, generator=g)
    inf = log_softmax(logits)
    tgt = log_softmax(logits + torch.randn(5, 4, 30, generator=g))
    found = []
    for lam in (0.5, 1.0, 2.0):
        kept = torch.minimum(inf.exp(), tgt.exp() / lam)
        true = (tgt.exp() * (tgt - (kept / kept.sum(-1, keepdim=True)).log())).sum(-1)
        top = inf.topk(30, -1)
        at = tgt.gather(-1, top.indices)
        whole = F.obrs_divergence(top.indices, top.values, at, lam=lam)
        torch.testing.assert_close(whole, true, atol=2e-5, rtol=1e-4)
        some = F.obrs_divergence(top.indices[..., :8], top.values[..., :8], at[..., :8], lam=lam)
        assert (some >= 0).all() and (some.mean() - true.mean()).abs() < 0.5 * true.mean()
        found.append(true.mean().item())
    assert found == sorted(found, reverse=True)  # it falls as lambda rises
    assert F.obrs_divergence(top.indices, top.values, top.values).max() < 1e-6
    padded = torch.cat([top.indices, torch.full((5, 4, 2), -1)], -1)
    values = torch.cat([top.values, torch.full((5, 4, 2), -math.inf)], -1)
    junk = torch.cat([at, torch.full((5, 4, 2), math.nan)], -1)
    exact = F.obrs_divergence(top.indices, top.values, at)
    torch.testing.assert_close(F.obrs_divergence(padded, values, junk), exact)
    assert exact.dtype == torch.float32
