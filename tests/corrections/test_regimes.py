"""Figures of regimes: N* from parts of a batch, and the tokens of a floor."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.corrections.functional import InvalidArgument, batch_worth_correcting, floor_tokens
from rlcore.corrections.regimes import agreement_by_stretch, fixed_share, tail_slope


def gradients(parts, answers, *, bias, extra, seed=0, size=64):
    """Parts' gradients: the plain one biased by `bias`, the corrected one with variance `extra` in
    addition, both per answer and of unit variance before."""
    g = torch.Generator().manual_seed(seed)
    noise = torch.randn(parts, size, generator=g) / (size * answers) ** 0.5
    more = torch.randn(parts, size, generator=g) / (size * answers) ** 0.5
    return noise + bias / size**0.5, noise + more * extra**0.5


def test_n_star_is_the_batch_at_which_variance_and_squared_bias_are_equal():
    plain, corrected = gradients(4000, 8, bias=0.2, extra=2.0)
    found = batch_worth_correcting(plain, corrected, answers=8)
    assert abs(found / (2.0 / 0.2**2) - 1) < 0.2
    # a sum over all parts has as many answers: beyond N* the corrected error is the smaller one
    biased = plain.double().mean(0).square().sum(), corrected.double().mean(0).square().sum()
    assert biased[0] > biased[1]


def test_n_star_where_nothing_is_to_be_weighed():
    plain, corrected = gradients(2, 8, bias=0.0, extra=0.5)
    assert batch_worth_correcting(plain, plain) == math.inf  # no bias
    assert batch_worth_correcting(plain + 1, plain * 0.5) == 0.0  # less variance, too
    with pytest.raises(InvalidArgument, match="two parts"):
        batch_worth_correcting(plain[:1], corrected[:1])


@pytest.mark.parametrize(("kind", "slope"), [("error", 1.0), ("temperature", 0.91), ("floor", 0.1)])
def test_the_slope_of_the_tail_tells_a_floor_from_an_error(kind, slope):
    g = torch.Generator().manual_seed(0)
    rank = torch.arange(1, 151_937, dtype=torch.float64)
    z = -1.5 * rank.log() + torch.randn(len(rank), generator=g, dtype=torch.float64)
    z[0] = 3.0
    p = z.softmax(0)
    noise = 0.75 * torch.randn(len(rank), generator=g, dtype=torch.float64)
    q = {
        "error": (p.log() + noise).softmax(0),
        "temperature": (p.log() / 1.1).softmax(0),
        "floor": (p + 1e-6) / (1 + 1e-6 * len(p)),
    }[kind]
    low = (p < math.exp(-13) * p.max()).nonzero()[:, 0]
    x = low[torch.multinomial(q[low], 400, generator=g)]
    outside = torch.ones(1, 400, dtype=torch.bool)
    taken = (p[x].log()[None], q[x].log()[None], p.max().log().expand(1, 400))
    found = tail_slope(*taken, outside)
    assert found["tail_slope"] == pytest.approx(slope, abs=0.2 if kind == "floor" else 0.08)
    outside[:, 39:] = False
    assert tail_slope(*taken, outside) == {}


def test_the_tokens_of_a_floor_are_what_the_actor_has_beyond_the_learner():
    vocab, floor, length, answers = 4096, 1e-6, 64, 4000
    logits = torch.full((vocab,), -18.0, dtype=torch.float64)
    logits[:4] = torch.tensor([3.0, 1.0, 0.5, 0.0])
    p = logits.softmax(-1)
    p_inf = (p + floor) / (1 + vocab * floor)
    g = torch.Generator().manual_seed(0)
    x = torch.multinomial(p_inf, answers * length, replacement=True, generator=g)
    x = x.view(answers, length)
    outside = p[x] < math.exp(-13) * p.max()
    mask = torch.ones_like(outside)
    mask[:, length // 2 :] = False
    found = floor_tokens(p[x].log(), p_inf[x].log(), outside, mask)
    tail = p < math.exp(-13) * p.max()
    expected = (p_inf - torch.minimum(p_inf, p))[tail].sum() * length / 2
    assert found.shape == (answers,)
    assert abs(found.mean() / expected - 1) < 0.1
    unknown = torch.full_like(p[x], math.nan)
    assert floor_tokens(unknown, p_inf[x].log(), outside, mask).sum() == (outside & mask).sum()


def test_agreement_by_stretch_is_the_percentile_of_its_own_tokens():
    g = torch.Generator().manual_seed(3)
    logp = -torch.rand(6, 400, generator=g)
    stretch = torch.randint(-1, 4, (6, 400), generator=g)
    spread = torch.tensor([0.0, 0.02, 0.1, 0.3, 9.0])[stretch]
    other = logp + spread * torch.randn(6, 400, generator=g)
    on = torch.rand(6, 400, generator=g) < 0.8
    found = agreement_by_stretch(logp, other, on, stretch)
    assert set(found) == {f"stretch_{n}/agreement_p5" for n in (1, 2, 3, 4)}
    for n in range(4):
        own = (logp - other).abs()[on & (stretch == n)]
        want = math.exp(-float(own.quantile(0.95)))
        assert found[f"stretch_{n + 1}/agreement_p5"] == pytest.approx(want, abs=0.02)
    # counts add up over ranks: each of two has some of the tokens
    halves = []
    agreement_by_stretch(logp[:2], other[:2], on[:2], stretch[:2], lambda c: halves.append(c) or c)
    whole = agreement_by_stretch(
        logp[2:], other[2:], on[2:], stretch[2:], lambda counts: counts + halves[0]
    )
    assert whole == found


def drawn(fixed, fresh, *, contexts=40, draws=500, vocab=12, seed=0):
    """(logp_ref, logp_inf, repeats) [contexts, draws] of tokens that an actor samples whose logits
    are off by `fixed` times an error of the context and `fresh` times one of the draw."""
    g = torch.Generator().manual_seed(seed)
    logits, error = torch.randn(2, contexts, 1, vocab, generator=g, dtype=torch.float64)
    own = torch.randn(contexts, draws, vocab, generator=g, dtype=torch.float64)
    inf = (logits + fixed * error + fresh * own).log_softmax(-1)
    ref = logits.log_softmax(-1).expand_as(inf)
    x = torch.multinomial(inf.exp().view(-1, vocab), 1, generator=g).view(contexts, draws, 1)
    repeats = vocab * torch.arange(contexts)[:, None] + x[..., 0]
    return ref.gather(-1, x)[..., 0], inf.gather(-1, x)[..., 0], repeats


@settings(max_examples=25)  # of 20,000 tokens each
@given(st.floats(0.0, 0.3), st.floats(0.02, 0.3))
def test_the_fixed_share_is_the_fixed_part_of_the_variance(fixed, fresh):
    ref, inf, repeats = drawn(fixed, fresh)
    found = fixed_share(ref, inf, torch.ones_like(ref) > 0, repeats)
    assert found["fixed_share"] == pytest.approx(fixed**2 / (fixed**2 + fresh**2), abs=0.1)
    assert found["repeated_share"] > 0.95


def test_a_fixed_error_has_all_of_its_share_at_any_size():
    for size in (0.01, 3.0):
        ref, inf, repeats = drawn(size, 0.0)
        found = fixed_share(ref, inf, torch.ones_like(ref) > 0, repeats)
        assert found["fixed_share"] == pytest.approx(1.0)


def test_the_fixed_share_is_of_tokens_that_repeat_and_adds_up_over_ranks():
    ref, inf, repeats = drawn(0.3, 0.3, contexts=20, draws=40)
    on = torch.rand(ref.shape, generator=torch.Generator().manual_seed(4)) < 0.8
    alone = torch.arange(ref.numel()).view(ref.shape)
    assert fixed_share(ref, inf, on, alone) == {"repeated_share": 0.0}
    assert fixed_share(ref, ref, on, repeats).keys() == {"repeated_share"}  # matched
    assert fixed_share(ref, inf, on & False, repeats) == {"repeated_share": 0.0}
    # an unusable log-prob that is not `on` does not spread
    broken = inf.where(on, torch.nan)
    halves = []
    fixed_share(ref[:10], broken[:10], on[:10], repeats[:10], lambda v: halves.append(v) or v)
    rest = ref[10:], broken[10:], on[10:], repeats[10:]
    whole = fixed_share(*rest, lambda own: own + halves[0])
    assert whole == pytest.approx(fixed_share(ref, inf, on, repeats))
