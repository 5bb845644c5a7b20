"""Operations that give a position the same bits in any company."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import log_softmax, scaled_dot_product_attention
from transformers import Qwen3Config, Qwen3ForCausalLM

from rlcore.attention import bitwise
from rlcore.learner.lm_head import HeadSpec, head_pass

LENGTH = 48


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if reason := bitwise.machine_reason():
        pytest.skip(f"this machine has no such products: {reason}")
    yield
    torch.set_num_threads(before)


def test_several_threads_are_refused():
    torch.set_num_threads(2)
    assert "threads" in (bitwise.machine_reason() or "")


@pytest.mark.parametrize("bias", [False, True])
def test_a_product_gives_a_row_the_same_bits_in_any_company(bias):
    x, weight = torch.randn(100, 96), torch.randn(64, 96)
    added = torch.randn(64) if bias else None
    whole = bitwise.linear(x, weight, added)
    torch.testing.assert_close(whole, torch.nn.functional.linear(x, weight, added))
    for start, rows in ((0, 1), (40, 2), (97, 3), (50, 7), (3, 33)):
        part = bitwise.linear(x[start : start + rows], weight, added)
        assert torch.equal(part, whole[start : start + rows])
    # weights side by side, as an engine fuses them
    both = bitwise.linear(x, torch.cat((weight, weight)))
    assert torch.equal(both[:, :64], bitwise.linear(x, weight))
    assert bitwise.linear(x[:6].view(2, 3, 96), weight).shape == (2, 3, 64)


def test_attention_of_a_position_alone_is_that_within_its_sequence():
    q, k, v = (torch.randn(3, LENGTH, 16) for _ in range(3))
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    whole = bitwise.attend(q, k, v, causal[None], 0.25)
    expected = scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(whole, expected)
    for at in (0, 17, LENGTH - 1):
        later = torch.arange(LENGTH) > at  # another sequence's, or nothing yet
        mine, values = k.clone(), v.clone()
        mine[:, later], values[:, later] = 7.0, -3.0
        alone = bitwise.attend(q[:, at : at + 1], mine, values, causal[None, at : at + 1], 0.25)
        assert torch.equal(alone, whole[:, at : at + 1])


def test_log_probs_are_those_of_the_learners_head():
    hidden, weight = torch.randn(50, 32), torch.randn(64, 32)
    targets = torch.arange(50) % 64
    spec = HeadSpec(1.0, 16, invariant=True)
    found = bitwise.log_probs(bitwise.linear(hidden, weight))
    torch.testing.assert_close(found, log_softmax(hidden @ weight.t(), -1))
    expected = head_pass(hidden, weight, targets, spec).logp
    assert torch.equal(found.gather(1, targets[:, None])[:, 0], expected)
    few = head_pass(hidden[:3], weight, targets[:3], spec).logp
    assert torch.equal(few, expected[:3])


def test_a_model_gives_a_sequence_the_same_bits_beside_others_and_learns_as_before():
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "head_dim": 32}
    config = Qwen3Config(
        vocab_size=40, num_attention_heads=4, num_key_value_heads=2, **sizes, use_cache=False
    )
    lm = Qwen3ForCausalLM(config)
    ids = torch.randint(0, 40, (5, 30))
    loss = lm(ids).logits.log_softmax(-1)[..., 3].sum()
    before = torch.autograd.grad(loss, list(lm.parameters()))
    bitwise.hold(lm, LENGTH)
    loss = lm(ids).logits.log_softmax(-1)[..., 3].sum()
    for one, other in zip(torch.autograd.grad(loss, list(lm.parameters())), before, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    whole = lm.model(ids).last_hidden_state
    for row, width in ((0, 30), (3, 11), (4, 2)):
        alone = lm.model(ids[row : row + 1, :width]).last_hidden_state
        assert torch.equal(alone[0], whole[row, :width])
    with pytest.raises(RuntimeError, match="48 positions"):
        lm(torch.zeros(1, LENGTH + 1, dtype=torch.int64))
