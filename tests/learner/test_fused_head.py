"""The one-pass LM head equals the chunked one, under Triton's interpreter: it multiplies float32
alone, and the kernel compiles for bfloat16 in tests/attention/test_kernels_compile.py."""

from __future__ import annotations

import pytest

CHECK = """
from dataclasses import replace
import torch
from rlcore.learner.lm_head import HeadSpec, head_pass

gen = torch.Generator().manual_seed(0)

def scores(spec, hidden, weight, targets, ids, slopes):
    h, w = (t.clone().requires_grad_() for t in (hidden, weight))
    found = head_pass(h, w, targets, spec, ids)
    value = (found.logp * slopes[0]).sum() + (found.entropy * slopes[1]).sum()
    if spec.ids_grad:
        value = value + (found.logp_at_ids * slopes[2][:, None]).sum()
    value.backward()
    return found, (h.grad, w.grad)

# positions, vocabularies and states that no tile divides; one position; top k of all
for n, v, d, k in ((70, 300, 48, 20), (1, 129, 66, 5), (65, 17, 20, 17)):
    hidden, weight = torch.randn(n, d, generator=gen), torch.randn(v, d, generator=gen)
    weight[-1] = weight[0]  # equal logits
    targets = torch.randint(0, v, (n,), generator=gen)
    ids = torch.randint(-1, v, (n, 4), generator=gen)
    slopes = torch.randn(3, n, generator=gen)
    spec = HeadSpec(0.7, 16, topk=k, fp32=True, sketch=True, ids_grad=True, entropy_grad=True)
    want, slopes_want = scores(spec, hidden, weight, targets, ids, slopes)
    got, slopes_got = scores(replace(spec, fused=True), hidden, weight, targets, ids, slopes)
    for name in ("logp", "entropy", "topk_logp", "logp_at_ids", "sketch"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), atol=1e-5, rtol=1e-5)
    logits = (hidden @ weight.t()) / 0.7
    named, best = (logits.gather(1, t.topk_ids) for t in (got, want))
    torch.testing.assert_close(named, best, atol=1e-5, rtol=1e-5)
    assert all(len(row.unique()) == k for row in got.topk_ids)
    for a, b in zip(slopes_got, slopes_want):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    few, _ = scores(HeadSpec(0.7, 16, fp32=True, fused=True), hidden, weight, targets, None, slopes)
    torch.testing.assert_close(few.logp, want.logp, atol=1e-5, rtol=1e-5)
    assert few.topk_ids is None and few.sketch is None
# logits far from 0, on both sides
hidden, weight = torch.tensor([[1.0], [-1.0]]), torch.linspace(-3e4, 1e4, 200)[:, None]
for fused in (False, True):
    spec = HeadSpec(1.0, 16, topk=3, fp32=True, fused=fused)
    found = head_pass(hidden, weight, torch.tensor([199, 0]), spec)
    assert found.logp.abs().max() == 0 and found.topk_ids[:, 0].tolist() == [199, 0]
# a safe set is the chunked pass's
safe = HeadSpec(1.0, 16, topk=3, fp32=True, safe_set_rho=0.1)
both = safe, replace(safe, fused=True)
one, other = (head_pass(hidden, weight, torch.tensor([1, 0]), spec) for spec in both)
assert torch.equal(one.logp, other.logp) and torch.equal(one.inside, other.inside)
print("equal")
"""


@pytest.mark.processes
def test_one_pass_over_tiles_is_the_chunked_pass(under_interpreter):
    under_interpreter(CHECK)
