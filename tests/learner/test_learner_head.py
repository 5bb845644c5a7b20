"""The chunked head pass against plain softmax: forward, backward, safe set, top k, low
precision."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from rlcore.corrections.dvp import OUTSIDE_LOGP, safe_set_logprobs
from rlcore.learner import lm_head
from rlcore.learner.lm_head import HeadSpec, TopkTarget, full_kl_pass, head_pass, topk_kl_pass
from rlcore.learner.specs import LearnerSpec


def _spec(**over):
    return HeadSpec(**({"temperature": 1.0, "chunk": 1024} | over))


def _inputs(n=37, d=24, v=5003, dtype=torch.float32, scale=1.0):
    torch.manual_seed(0)
    hidden = (scale * torch.randn(n, d)).to(dtype).requires_grad_()
    weight = torch.randn(v, d).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, v, (n,))


def _plain(hidden, weight, temperature):
    return torch.log_softmax((hidden @ weight.t()).float() / temperature, dim=-1)


def _gradients(scalar, *tensors):
    return torch.autograd.grad(scalar, tensors)


@pytest.mark.parametrize("chunk", [1, 10, 64])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("entropy_grad", [True, False])
def test_forward_and_backward_equal_plain_softmax(chunk, temperature, entropy_grad):
    hidden, weight, targets = _inputs()
    spec = _spec(temperature=temperature, topk=20, entropy_grad=entropy_grad, chunk=chunk)
    ids = torch.randint(0, weight.shape[0], (len(targets), 6))
    ids[::3, 4:] = -1
    scores = head_pass(hidden, weight, targets, spec, ids)
    logp = _plain(hidden, weight, temperature)
    entropy = -(logp.exp() * logp).sum(-1)
    chosen = logp.gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(scores.logp, chosen, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(scores.entropy, entropy, atol=2e-5, rtol=1e-5)
    top = logp.topk(20)
    assert torch.equal(scores.topk_ids, top.indices)
    torch.testing.assert_close(scores.topk_logp, top.values, atol=2e-5, rtol=1e-5)
    expected = torch.where(ids >= 0, logp.gather(1, ids.clamp_min(0)), 0.0)
    torch.testing.assert_close(scores.logp_at_ids, expected, atol=2e-5, rtol=1e-5)
    a, b = torch.randn(len(targets)), torch.randn(len(targets)) * float(entropy_grad)
    plain = _gradients((a * chosen + b * entropy).sum(), hidden, weight)
    for _ in range(2):
        ours = torch.autograd.grad(
            (a * scores.logp + b * scores.entropy).sum(), (hidden, weight), retain_graph=True
        )
        for mine, theirs in zip(ours, plain):
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("entropy_grad", [True, False])
@pytest.mark.parametrize("rho", [None, math.exp(-6.0)])
def test_gradients_flow_through_the_log_probs_at_ids(rho, entropy_grad):
    """Some of them the target, some outside a safe set, some none; with the target's own."""
    hidden, weight, targets = _inputs(v=301, d=8)
    temperature, k = 0.7, 6
    ids = torch.stack([torch.randperm(301)[:k] for _ in targets])
    ids[::2, 0], ids[::3, 4:] = targets[::2], -1
    spec = _spec(
        temperature=temperature,
        chunk=10,
        ids_grad=True,
        safe_set_rho=rho,
        entropy_grad=entropy_grad,
    )
    scores = head_pass(hidden, weight, targets, spec, ids)
    logits = (hidden @ weight.t()) / temperature
    if rho is not None:
        logits = logits.masked_fill(
            logits < logits.amax(-1, keepdim=True) + math.log(rho), -torch.inf
        )
    logp = logits.log_softmax(-1)
    a, b, c = torch.randn(len(targets)), torch.randn(len(targets), k), torch.randn(len(targets))
    at, own = logp.gather(1, ids.clamp_min(0)), logp.gather(1, targets[:, None])[:, 0]
    on, mine = (ids >= 0) & torch.isfinite(at), torch.isfinite(own)
    assert not on.all() and (rho is None or not mine.all())
    plain = torch.where(mine, a * own, 0.0).sum() + torch.where(on, b * at, 0.0).sum()
    ours = (a * scores.logp).sum() + (b * scores.logp_at_ids).sum()
    if entropy_grad:
        p = logp.exp()
        plain = plain - (c[:, None] * p * torch.where(p > 0, logp, 0.0)).sum()
        ours = ours + (c * scores.entropy).sum()
    for mine_, theirs in zip(_gradients(ours, hidden, weight), _gradients(plain, hidden, weight)):
        torch.testing.assert_close(mine_, theirs, atol=2e-4, rtol=1e-4)
    quiet = head_pass(hidden, weight, targets, _spec(), ids)
    assert not quiet.logp_at_ids.requires_grad


def test_entropy_carries_a_gradient_only_when_asked():
    hidden, weight, targets = _inputs()
    assert not head_pass(hidden, weight, targets, _spec()).entropy.requires_grad
    assert head_pass(hidden, weight, targets, _spec(entropy_grad=True)).entropy.requires_grad


@settings(max_examples=15, deadline=None)
@given(v=st.integers(2, 700), k=st.integers(1, 40), seed=st.integers(0, 99))
def test_topk_is_exact_at_any_vocabulary_size(v, k, seed):
    torch.manual_seed(seed)
    hidden, weight = torch.randn(5, 4), torch.randn(v, 4)
    scores = head_pass(hidden, weight, torch.zeros(5, dtype=torch.long), _spec(topk=k, chunk=2))
    expected = _plain(hidden, weight, 1.0).topk(min(k, v))
    torch.testing.assert_close(scores.topk_logp, expected.values, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(
        _plain(hidden, weight, 1.0).gather(1, scores.topk_ids),
        expected.values,
        atol=2e-5,
        rtol=1e-5,
    )


def test_safe_set_equals_the_formula_and_has_no_gradient_outside():
    rho, temperature = math.exp(-3.0), 0.8
    hidden, weight, targets = _inputs(v=301, d=8)
    with torch.no_grad():
        logits = (hidden @ weight.t()) / temperature
        targets = torch.distributions.Categorical(logits=logits).sample()
        targets[::5] = logits[::5].argmin(-1)  # certainly outside
    scores = head_pass(
        hidden,
        weight,
        targets,
        _spec(temperature=temperature, topk=7, safe_set_rho=rho, entropy_grad=True, chunk=10),
        targets[:, None],
    )
    logp, inside, coverage = safe_set_logprobs(
        (hidden @ weight.t()) / temperature, targets, rho=rho
    )
    assert torch.equal(scores.inside, inside) and 0 < int(inside.sum()) < len(inside)
    torch.testing.assert_close(scores.logp, logp, atol=1e-5, rtol=1e-5)
    assert (scores.logp[~inside] == OUTSIDE_LOGP).all() and (
        scores.logp_at_ids[~inside] == OUTSIDE_LOGP
    ).all()
    torch.testing.assert_close(scores.coverage, coverage, atol=1e-5, rtol=1e-5)
    g = torch.randn(len(targets))
    ours = _gradients((g * scores.logp).sum(), hidden, weight)
    plain = _gradients((g * logp).sum(), hidden, weight)
    for mine, theirs in zip(ours, plain):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
    # with D = V and the identity as hidden states, row n of the weight's gradient is the gradient
    # at logit n
    one = torch.eye(30)[:1].requires_grad_()
    square = torch.randn(30, 30).mul(3).requires_grad_()
    only = head_pass(one, square, square[:, :1].argmax(0), _spec(safe_set_rho=rho))
    at_logits = _gradients(only.logp.sum(), square)[0][:, 0]
    outside = square[:, 0] < square[:, 0].max() + math.log(rho)
    assert outside.any() and (at_logits[outside] == 0).all() and (at_logits[~outside] != 0).all()


def test_safe_set_keeps_a_token_at_its_very_edge():
    hidden, weight = torch.ones(3, 1), torch.tensor([[2.0], [2.0], [1.0]])
    scores = head_pass(hidden, weight, torch.arange(3), _spec(safe_set_rho=1.0))
    logp, inside, coverage = safe_set_logprobs(hidden @ weight.t(), torch.arange(3), rho=1.0)
    assert scores.inside.tolist() == inside.tolist() == [True, True, False]
    torch.testing.assert_close(scores.logp, logp)
    torch.testing.assert_close(scores.coverage, coverage)


def test_safe_set_entropy_gradient():
    rho = math.exp(-2.0)
    hidden, weight, targets = _inputs(v=101, d=8)
    scores = head_pass(hidden, weight, targets, _spec(safe_set_rho=rho, entropy_grad=True, chunk=9))
    logits = hidden @ weight.t()
    safe = logits >= logits.amax(-1, keepdim=True) + math.log(rho)
    logp = torch.log_softmax(logits.masked_fill(~safe, -1e30), -1)
    entropy = -(torch.where(safe, logp, 0.0) * logp.exp()).sum(-1)
    torch.testing.assert_close(scores.entropy, entropy, atol=1e-5, rtol=1e-5)
    for mine, theirs in zip(
        _gradients(scores.entropy.sum(), hidden, weight), _gradients(entropy.sum(), hidden, weight)
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shift", [0.0, 300.0])
def test_kept_sets_equal_the_formula_and_have_no_gradient_outside(shift):
    """`shift`: how far the kept tokens are below others, far beyond what exp() can hold."""
    hidden, weight, targets = _inputs(v=301, d=8)
    n, free = len(targets), 300  # a token of no set
    targets = targets.clamp(max=free - 1)
    ids = torch.rand(n, free).argsort(1)[:, :6]
    ids[:, 0] = targets
    ids[ids[:, 1:].eq(targets[:, None]).any(1), 1:] = -1  # the target stands once
    ids[::4, 3:] = -1
    ids[1] = -1  # not stored: everything
    listed = torch.zeros(n, free + 1, dtype=torch.bool)
    for row, kept in enumerate(ids.tolist()):
        listed[row, [i for i in kept if i >= 0]] = True
    listed[1] = True
    with torch.no_grad():
        hidden[:, 0] = 1.0
        weight[free, 0] = shift
    spec = _spec(temperature=0.7, topk=5, kept_sets=True, entropy_grad=True, chunk=10)
    scores = head_pass(hidden, weight, targets, spec, ids)
    logits = (hidden @ weight.t()) / 0.7
    logp = logits.masked_fill(~listed, -torch.inf).log_softmax(-1)
    own = logp.gather(1, targets[:, None])[:, 0]
    entropy = -(logp.exp() * logp.masked_fill(~listed, 0.0)).sum(-1)
    sure = torch.arange(n) != 1
    torch.testing.assert_close(scores.logp[sure], own[sure], atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(scores.entropy[sure], entropy[sure], atol=2e-5, rtol=1e-4)
    assert scores.inside[sure].all() and (scores.coverage[sure] <= 1).all()
    at = logp.gather(1, ids.clamp_min(0)).masked_fill(ids < 0, 0.0)
    torch.testing.assert_close(scores.logp_at_ids[sure], at[sure], atol=2e-5, rtol=1e-5)
    g = torch.randn(2, n) * sure
    ours = _gradients((g[0] * scores.logp + g[1] * scores.entropy).sum(), hidden, weight)
    plain = _gradients((g[0] * own + g[1] * entropy).sum(), hidden, weight)
    for mine, theirs in zip(ours, plain):
        torch.testing.assert_close(mine, theirs, atol=2e-4, rtol=1e-4)
    assert (ours[1][free] == 0).all()


def test_bfloat16_accumulates_the_weight_gradient_in_float32():
    hidden, weight, targets = _inputs(n=512, d=16, v=64, dtype=torch.bfloat16, scale=0.3)
    exact_h, exact_w = (t.detach().double().requires_grad_() for t in (hidden, weight))
    logp = torch.log_softmax(exact_h @ exact_w.t(), -1).gather(1, targets[:, None])
    exact = _gradients(logp.sum(), exact_h, exact_w)[1]
    errors = []
    for chunk in (4, 512):
        scores = head_pass(hidden, weight, targets, _spec(chunk=chunk))
        torch.testing.assert_close(scores.logp.double(), logp[:, 0], atol=0.03, rtol=0.01)
        mine = _gradients(scores.logp.sum(), hidden, weight)[1]
        assert mine.dtype == torch.bfloat16
        errors.append(((mine.double() - exact).norm() / exact.norm()).item())
    # accumulating 128 chunks in bfloat16 would lose a digit more than one chunk does
    assert max(errors) < 0.01 and errors[0] < 1.5 * errors[1]


def test_no_positions():
    hidden, weight, targets = _inputs(n=1)
    scores = head_pass(hidden[:0], weight, targets[:0], _spec(topk=3), targets[:0, None])
    assert scores.logp.shape == (0,) and scores.topk_ids.shape == (0, 3)
    assert _gradients(scores.logp.sum(), weight)[0].abs().sum() == 0


def test_full_kl_equals_the_plain_sum_forward_and_backward():
    hidden, weight, _ = _inputs(v=203)
    base = (torch.randn(37, 8), torch.randn(203, 8))
    spec = _spec(temperature=0.9, chunk=10)
    new, old = _plain(hidden, weight, 0.9), _plain(*base, 0.9)
    plain = (new.exp() * (new - old)).sum(-1)
    kl = full_kl_pass(hidden, weight, base, spec)
    torch.testing.assert_close(kl, plain, atol=1e-5, rtol=1e-5)
    g = torch.randn(37)
    for mine, theirs in zip(
        _gradients((g * kl).sum(), hidden, weight), _gradients((g * plain).sum(), hidden, weight)
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


class _Largest(TorchDispatchMode):
    """The most elements of any float32 tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, list | tuple) else [out]:
            if isinstance(t, torch.Tensor) and t.dtype == torch.float32:
                self.elements = max(self.elements, t.numel())
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize("rho", [None, 1e-3])
def test_no_float32_tensor_holds_all_logits_of_a_short_micro_batch_either(dtype, entropy_grad, rho):
    n, v = 512, 3001
    hidden, weight, targets = _inputs(n, 8, v, dtype)
    spec = _spec(topk=5, entropy_grad=entropy_grad, safe_set_rho=rho)
    with _Largest() as largest:
        scores = head_pass(hidden, weight, targets, spec, targets[:, None])
        (scores.logp.sum() + scores.entropy.sum()).backward()
    assert n * v / 16 < largest.elements <= n * v / 8


def test_no_float32_tensor_holds_all_logits_under_a_kl_either():
    n, v = 512, 3001
    hidden, weight, targets = _inputs(n, 8, v)
    for whole in (True, False):
        with _Largest() as largest:
            if whole:
                kl = full_kl_pass(hidden, weight, (hidden.detach() + 0.1, weight.detach()), _spec())
            else:
                target = TopkTarget(targets[:, None], torch.full((n, 1), -1.0))
                kl = topk_kl_pass(hidden, weight, target, _spec())
            kl.sum().backward()
        assert n * v / 16 < largest.elements <= n * v / 8


@pytest.mark.parametrize("rho", [None, 1e-3])
def test_an_fp32_head_is_the_float32_product_of_bfloat16_inputs(rho):
    hidden, weight, targets = _inputs(dtype=torch.bfloat16)
    ids = torch.randint(-1, weight.shape[0], (len(targets), 6))
    options = {"topk": 20, "temperature": 0.7, "entropy_grad": True, "safe_set_rho": rho}
    wide = [t.detach().float().requires_grad_() for t in (hidden, weight)]
    g = torch.randn(2, len(targets))
    found, expected, rounded = (
        head_pass(h, w, targets, _spec(**options, fp32=fp32), ids)
        for h, w, fp32 in ((hidden, weight, True), (*wide, False), (hidden, weight, False))
    )
    for name in ("logp", "entropy", "topk_logp", "logp_at_ids"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name))
    assert torch.equal(found.topk_ids, expected.topk_ids)
    apart = (rounded.topk_logp - expected.topk_logp)[:, 0].abs().mean()
    assert apart > 1e-3  # what the choice removes
    ours = _gradients((g[0] * found.logp + g[1] * found.entropy).sum(), hidden, weight)
    theirs = _gradients((g[0] * expected.logp + g[1] * expected.entropy).sum(), *wide)
    for a, b in zip(ours, theirs):
        assert a.dtype == torch.bfloat16
        torch.testing.assert_close(a, b.bfloat16())


def test_on_a_gpu_the_sums_of_a_bfloat16_product_are_not_rounded(monkeypatch):
    """The GPU's product is stood in for: bfloat16 inputs, float32 sums. torch's own signature is
    checked without a device."""
    real = torch.mm
    wide = real(*_without_device(), out_dtype=torch.float32, out=torch.empty(4, 16, device="meta"))
    assert wide.dtype == torch.float32

    def product(a, b, *, out_dtype=None, out=None):
        if out_dtype is None:
            return real(a, b) if out is None else real(a, b, out=out)
        assert a.dtype == b.dtype == torch.bfloat16
        return real(a.float(), b.float(), out=out)

    monkeypatch.setattr(lm_head, "_sums_in_float32", lambda weight: True)
    monkeypatch.setattr(torch, "mm", product)
    hidden, weight, targets = _inputs(dtype=torch.bfloat16)
    exact = [t.detach().float().requires_grad_() for t in (hidden, weight)]
    options = {"topk": 20, "temperature": 0.7, "entropy_grad": True}
    found = head_pass(hidden, weight, targets, _spec(**options, fp32=True))
    monkeypatch.undo()
    expected = head_pass(*exact, targets, _spec(**options))
    for name in ("logp", "entropy", "topk_logp"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name))
    ours = _gradients(found.logp.sum(), hidden, weight)
    theirs = _gradients(expected.logp.sum(), *exact)
    for a, b in zip(ours, theirs):  # of bfloat16's accuracy
        assert a.dtype == torch.bfloat16
        assert (a.float() - b).norm() < 0.01 * b.norm()


def _without_device():
    """Operands of a product [4, 8] @ [8, 16] in bfloat16, without values."""
    shapes = ((4, 8), (8, 16))
    return (torch.empty(s, dtype=torch.bfloat16, device="meta") for s in shapes)


def test_by_default_a_learner_on_a_gpu_has_exact_logits():
    assert LearnerSpec(num_gpus=1).exact_head and not LearnerSpec().exact_head
    assert not LearnerSpec(num_gpus=1, fp32_head=False).exact_head


def test_an_fp32_head_of_a_float32_model_is_the_same_to_the_bit():
    hidden, weight, targets = _inputs()
    plain, wide = (head_pass(hidden, weight, targets, _spec(fp32=fp32)) for fp32 in (False, True))
    assert torch.equal(plain.logp, wide.logp) and torch.equal(plain.entropy, wide.entropy)


def test_the_kl_of_an_fp32_head_is_that_of_the_float32_product():
    hidden, weight, _ = _inputs(dtype=torch.bfloat16)
    base = ((hidden + 0.1).detach(), (weight * 1.01).detach())
    wide = [t.detach().float() for t in (hidden, weight, *base)]
    found = full_kl_pass(hidden, weight, base, _spec(fp32=True))
    torch.testing.assert_close(found, full_kl_pass(*wide[:2], (wide[2], wide[3]), _spec()))
    d_hidden, d_weight = _gradients(found.sum(), hidden, weight)
    assert d_hidden.dtype == d_weight.dtype == torch.bfloat16
    ids = torch.randint(0, weight.shape[0], (len(hidden), 5))
    target = TopkTarget(ids, torch.full(ids.shape, -3.0))
    found = topk_kl_pass(hidden, weight, target, _spec(fp32=True))
    torch.testing.assert_close(found, topk_kl_pass(*wide[:2], target, _spec()))


@pytest.mark.parametrize(
    ("n", "chunk", "rows"),
    [
        (0, 1024, [0]),  # a rank without positions takes part in the pass
        (50, 1024, [50]),
        (600, 1024, [75] * 8),
        (601, 1024, [76] * 7 + [69]),
        (100, 1024, [64, 36]),  # an eighth would be too few
        (100, 32, [32, 32, 32, 4]),  # unless fewer are asked for
        (9000, 1024, [1024] * 8 + [808]),
    ],
)
def test_chunks_are_an_eighth_at_most_and_no_larger_than_asked(n, chunk, rows):
    slices = HeadSpec(1.0, chunk).slices(n)
    assert [s.stop - s.start for s in slices] == rows
    assert [i for s in slices for i in range(s.start, s.stop)] == list(range(n))
