"""torch's variable-length attention under transformers: packed and padded micro-batches against
SDPA on each sequence. The kernel has no CPU build; a plain implementation takes its place, and the
kernel's own registration checks the call on tensors without memory."""

from __future__ import annotations

import copy
import sys
import types

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import Qwen3Config, Qwen3ForCausalLM

from rlcore.attention import varlen
from rlcore.attention.varlen import Sequences, register_fa4, register_varlen
from rlcore.errors import UserError

LENGTHS = (5, 9, 1, 7)
WHEEL = "vllm.vllm_flash_attn.cute.interface"
real_kernel = varlen.varlen_attn


def plain(q, k, v, bounds, bounds_k, longest, longest_k, *, scale, window_size, enable_gqa):
    """What the kernel computes, one sequence at a time."""
    assert bounds is bounds_k and longest == longest_k == int(bounds.diff().max())
    assert bounds.dtype == torch.int32 and window_size[1] == 0
    out = []
    for a, z in zip(bounds[:-1].tolist(), bounds[1:].tolist()):
        age = torch.arange(z - a)[:, None] - torch.arange(z - a)
        mask = (age >= 0) & ((age <= window_size[0]) if window_size[0] >= 0 else True)
        one = (x[a:z].transpose(0, 1)[None] for x in (q, k, v))
        found = scaled_dot_product_attention(
            *one, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
        )
        out.append(found[0].transpose(0, 1))
    return torch.cat(out)


@pytest.fixture
def calls(monkeypatch):
    """The plain implementation, and the bounds that each of its calls was given."""
    seen = []

    def kernel(*args, **kwargs):
        seen.append(args[3])
        return plain(*args, **kwargs)

    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    return seen


def models(**changes):
    """The same model with SDPA and with the variable-length kernel."""
    config = Qwen3Config(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        **changes,
    )
    torch.manual_seed(0)
    config._attn_implementation = "sdpa"
    dense = Qwen3ForCausalLM(config)
    other = copy.deepcopy(config)
    other._attn_implementation = register_varlen()
    packed = Qwen3ForCausalLM(other)
    packed.load_state_dict(dense.state_dict())
    return dense, packed


def sequences():
    gen = torch.Generator().manual_seed(1)
    return [torch.randint(0, 40, (n,), generator=gen) for n in LENGTHS]


@pytest.mark.parametrize(
    "changes", [{}, {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}]
)
def test_packed_sequences_equal_sdpa_on_each_in_values_and_gradients(calls, changes):
    dense, packed = models(**changes)
    ids = sequences()
    alone = torch.cat([dense(i[None], use_cache=False).logits[0] for i in ids])
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    how = {"position_ids": positions, "sequences": Sequences.of(positions)}
    together = packed(torch.cat(ids)[None], use_cache=False, **how).logits[0]
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    assert len(calls) == 3 and all(c is calls[0] for c in calls)  # bounds are made once
    weights = torch.randn(alone.shape, generator=torch.Generator().manual_seed(2))
    for model, logits in ((dense, alone), (packed, together)):
        (logits * weights).sum().backward()
        assert model is not None
    for (name, a), b in zip(dense.named_parameters(), packed.parameters()):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-3, atol=1e-4, msg=name)


def test_a_torch_without_groups_is_given_a_key_head_for_each_query_head(monkeypatch):
    """torch 2.11, of the GPU kit."""
    heads = []

    def kernel(q, k, v, *args, **kwargs):
        assert "enable_gqa" not in kwargs
        heads.append((q.shape[1], k.shape[1], v.shape[1]))
        return plain(q, k, v, *args, **kwargs, enable_gqa=False)

    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    monkeypatch.setattr(varlen, "_TAKES_GROUPS", False)
    dense, packed = models()
    ids = sequences()
    alone = torch.cat([dense(i[None], use_cache=False).logits[0] for i in ids])
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    how = {"position_ids": positions, "sequences": Sequences.of(positions)}
    together = packed(torch.cat(ids)[None], use_cache=False, **how).logits[0]
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    assert heads == [(4, 4, 4)] * 3


@pytest.mark.parametrize("sliding", [None, 4])
def test_the_fourth_kernel_is_asked_for_what_torch_s_computes(monkeypatch, sliding):
    """FlashAttention 4 needs a GPU: its interface, and a plain implementation behind it."""

    # the parameters that are used, by the names of vLLM 0.32's wheel
    def flash_attn_varlen_func(
        q,
        k,
        v,
        *,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        causal,
        window_size,
    ):
        assert causal and window_size[1] is None and all(x.is_contiguous() for x in (q, k, v))
        window = (-1 if window_size[0] is None else window_size[0], 0)
        grouped = {"scale": softmax_scale, "window_size": window, "enable_gqa": True}
        bounds = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return plain(q, k, v, *bounds, **grouped), None

    monkeypatch.setattr(varlen, "varlen_attn", plain)
    parts = WHEEL.split(".")
    for n in range(len(parts)):  # vLLM itself takes seconds to import
        name = ".".join(parts[: n + 1])
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules[WHEEL].flash_attn_varlen_func = flash_attn_varlen_func
    varlen._fourth.cache_clear()
    name = register_fa4()
    assert "flash" not in name
    _, packed = models(
        **({} if sliding is None else {"use_sliding_window": True, "sliding_window": sliding})
    )
    ids = torch.cat(sequences())[None]
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    how = {"position_ids": positions, "sequences": Sequences.of(positions), "use_cache": False}
    want = packed(ids, **how).logits
    packed.set_attn_implementation(name)
    torch.testing.assert_close(packed(ids, **how).logits, want)
    varlen._fourth.cache_clear()


def test_without_vllm_s_wheel_the_fourth_kernel_is_refused(monkeypatch):
    varlen._fourth.cache_clear()
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(UserError, match=r"learner.attention=fa4 needs .* choose varlen"):
        register_fa4()


def test_padded_rows_equal_sdpa_where_there_are_tokens(calls):
    dense, packed = models()
    ids = torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.int64)
    for row, one in zip(ids, sequences()):
        row[: len(one)] = one
    positions = torch.arange(ids.shape[1]).expand(ids.shape)
    how = {"position_ids": positions, "sequences": Sequences.of(positions)}
    got = packed(ids, use_cache=False, **how).logits
    for r, one in enumerate(sequences()):
        want = dense(one[None], use_cache=False).logits[0]
        torch.testing.assert_close(got[r, : len(one)], want, rtol=1e-4, atol=1e-5)


def test_torch_s_kernel_takes_these_arguments():
    def on_meta(*shape):
        return torch.empty(*shape, device="meta", dtype=torch.bfloat16, requires_grad=True)

    bounds = torch.empty(3, device="meta", dtype=torch.int32)
    out, _ = varlen.attend_packed(
        varlen.by_torch,
        None,
        on_meta(1, 16, 4096, 128),
        on_meta(1, 8, 4096, 128),
        on_meta(1, 8, 4096, 128),
        None,
        scaling=0.1,
        sequences=Sequences(bounds, 3000),
    )
    assert varlen.varlen_attn is real_kernel
    assert out.shape == (1, 4096, 16, 128) and out.dtype == torch.bfloat16


def test_what_the_kernel_cannot_compute_is_refused(calls):
    x = torch.zeros(1, 2, 4, 8)
    bounds = Sequences(torch.tensor([0, 4], dtype=torch.int32), 4)
    with pytest.raises(UserError, match=r"learner\.attention=varlen"):
        varlen.attend_packed(varlen.by_torch, None, x, x, x, None, sequences=bounds, softcap=30.0)
    with pytest.raises(RuntimeError, match="takes sequences"):
        varlen.attend_packed(varlen.by_torch, None, x, x, x, None)
