"""Emulated precision is a plain function of tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.weights.rounding import (
    is_rounded,
    precise_patterns,
    quantise,
    round_rows,
    round_tensor,
    round_weights,
)
from rlcore.weights.specs import RoundingSpec


def weight(seed: int, rows: int = 40, cols: int = 24) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)) * 0.05


@settings(max_examples=20, deadline=None)
@given(
    st.integers(0, 2**31),
    st.sampled_from(["fp8", "int8", "int4", "int3", "mxfp4", "nvfp4"]),
    st.sampled_from(["tensor", "channel", "block"]),
    st.floats(1e-3, 1e3),
)
def test_rounding_is_a_projection_that_scales_with_its_input(seed, kind, granularity, factor):
    w = weight(seed)
    once = round_tensor(w, kind, granularity, block=16)
    assert once.shape == w.shape and once.dtype == w.dtype and not torch.equal(once, w)
    torch.testing.assert_close(round_tensor(once, kind, granularity, block=16), once)
    # a power of two changes no rounding decision
    assert torch.equal(round_tensor(w * 4, kind, granularity, block=16), once * 4)
    assert torch.equal(round_tensor(-w, kind, granularity, block=16), -once)


@pytest.mark.parametrize(("kind", "largest"), [("int8", 127), ("int4", 7), ("int3", 3)])
def test_integer_error_is_at_most_half_a_step(kind, largest):
    w = weight(0)
    got = round_tensor(w, kind, "tensor")
    assert (got - w).abs().max() <= 0.5 / largest * w.abs().max() * (1 + 1e-5)
    assert len(got.unique()) <= 2 * largest + 1


def test_fp8_has_three_mantissa_bits_and_the_formats_own_values():
    w = weight(1)
    got = round_tensor(w, "fp8", "tensor")
    scale = w.abs().max() / 448
    normal = w.abs() > scale * 2**-6
    assert ((got - w).abs()[normal] / w.abs()[normal]).max() <= 2**-4
    again = got / scale
    torch.testing.assert_close(again.to(torch.float8_e4m3fn).float(), again, rtol=1e-6, atol=1e-9)
    assert got.abs().max() == w.abs().max()


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


@pytest.mark.parametrize(("kind", "columns"), [("mxfp4", 32), ("nvfp4", 16)])
def test_four_bit_floats_are_the_nearest_of_eight_sizes_times_their_blocks_scale(kind, columns):
    w = weight(3, 6, 80)
    w[0, :16], w[1, 16:32] = 0.0, 1e-9  # nothing, and too little for a block's scale in E4M3
    codes, scale = quantise(w, kind, "tensor")
    assert torch.isin(codes.abs(), E2M1).all()
    assert torch.equal(round_tensor(w, kind, "tensor"), codes * scale)
    signed = torch.cat([-E2M1, E2M1])
    nearest = (w.unsqueeze(-1) / scale.unsqueeze(-1) - signed).abs().amin(-1)
    torch.testing.assert_close((w / scale - codes).abs(), nearest)
    for start in range(0, 80, columns):
        part, own = w[:, start : start + columns], scale[:, start : start + columns]
        assert (own == own[:, :1]).all()
        largest = part.abs().amax(1)
        if kind == "mxfp4":
            exact = own[:, 0].log2()
            assert torch.equal(exact, exact.round())
            holds = (largest / own[:, 0] >= 4) & (largest / own[:, 0] < 8)
        else:
            units = own[:, 0] * 448 * 6 / w.abs().max()
            torch.testing.assert_close(units.to(torch.float8_e4m3fn).float(), units)
            holds = (largest / own[:, 0] - 6).abs() < 6 / 16
        assert (holds | (largest < 1e-6)).all()
    assert (round_tensor(w, kind, "tensor")[0, :16] == 0).all()


def test_ties_between_four_bit_floats_go_to_the_even_code():
    ties = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]])
    codes, scale = quantise(ties, "mxfp4", "tensor")
    assert torch.equal(codes, torch.tensor([[0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]]))
    assert (scale == 1).all()


@pytest.mark.parametrize("kind", ["fp8", "int8", "mxfp4", "nvfp4"])
def test_a_vector_is_rounded_by_itself(kind):
    x = weight(4, 6, 80)
    x[2] *= 1e3  # of which no other vector's scale, or unit of scales, may know
    each = torch.cat([round_tensor(row, kind, "tensor") for row in x.split(1)])
    assert torch.equal(round_rows(x, kind), each)
    assert torch.equal(round_rows(x.view(2, 3, 80), kind), each.view(2, 3, 80))
    assert round_rows(x.bfloat16(), kind).dtype == torch.bfloat16
    assert torch.equal(round_rows(x, "none"), x)


def test_finer_scales_protect_small_rows_from_a_large_one():
    w = weight(2, 32, 32)
    w[0] *= 1000
    scales = ("tensor", "channel", "block")
    error = {s: (round_tensor(w, "int8", s, block=16) - w)[16:].abs().mean() for s in scales}
    assert error["channel"] < error["tensor"] / 50 and error["block"] < error["tensor"] / 50
    assert (round_tensor(torch.zeros(4, 4), "fp8", "tensor") == 0).all()


def test_only_linear_weights_are_rounded():
    tensors = {
        "model.embed_tokens.weight": weight(0),
        "model.layers.0.mlp.up_proj.weight": weight(1),
        "model.layers.0.mlp.up_proj.bias": torch.randn(4),
        "model.layers.0.input_layernorm.weight": torch.randn(4),
        "lm_head.weight": weight(2),
    }
    got = round_weights(tensors, RoundingSpec(rounding="fp8"))
    assert [n for n in tensors if got[n] is not tensors[n]] == ["model.layers.0.mlp.up_proj.weight"]
    got = round_weights(tensors, RoundingSpec(rounding="fp8", keep_high_precision=("up_proj",)))
    assert [n for n in tensors if got[n] is not tensors[n]] == [
        "model.embed_tokens.weight",
        "lm_head.weight",
    ]
    layers = [f"model.layers.{n}.mlp.up_proj.weight" for n in (0, 1, 9, 10)]
    assert precise_patterns(layers, 2) == (".layers.9.", ".layers.10.")
    assert precise_patterns(layers, 0) == () and len(precise_patterns(layers, 99)) == 4
    assert not any(".layers.1." in name for name in layers[2:])  # a pattern ends with its number
    plain = round_weights(tensors, RoundingSpec(rounding="none"))
    assert all(a is b for a, b in zip(plain.values(), tensors.values()))
    assert not is_rounded("x.weight", torch.ones(3), ())


@pytest.mark.parametrize("scales", ["tensor", "channel", "block"])
def test_fp8_has_the_scales_of_the_weights_that_vllm_fuses(scales):
    parts = {"self_attn": ("q_proj", "k_proj", "v_proj"), "mlp": ("gate_proj", "up_proj")}
    names = [
        f"model.layers.{i}.{m}.{p}.weight"
        for i in (0, 1)
        for m in parts
        for p in reversed(parts[m])
    ]
    tensors = {n: weight(i, 20 + i) for i, n in enumerate(names)}
    got = round_weights(tensors, RoundingSpec(rounding="fp8", scales=scales), block=16)
    assert list(got) == names
    for layer in (0, 1):
        for module, of in parts.items():
            fused = [f"model.layers.{layer}.{module}.{p}.weight" for p in of]
            want = round_tensor(torch.cat([tensors[n] for n in fused]), "fp8", scales, block=16)
            assert torch.equal(torch.cat([got[n] for n in fused]), want)


def test_a_larger_k_proj_changes_how_q_proj_of_its_layer_is_rounded():
    k, q, other = (
        f"model.layers.{i}.self_attn.{p}_proj.weight" for i, p in ((0, "k"), (0, "q"), (1, "q"))
    )
    tensors = {k: weight(0), q: weight(1), other: weight(2)}

    def both(rounding):
        spec = RoundingSpec(rounding=rounding)
        return (round_weights(tensors | {k: tensors[k] * f}, spec) for f in (1.0, 3.0))

    plain, scaled = both("fp8")
    assert not torch.equal(plain[q], scaled[q]) and torch.equal(plain[other], scaled[other])
    plain, scaled = both("nvfp4")  # the units of their blocks' scales
    assert not torch.equal(plain[q], scaled[q]) and torch.equal(plain[other], scaled[other])
    plain, scaled = both("mxfp4")  # has no scale beyond its blocks
    assert torch.equal(plain[q], scaled[q])
    plain, scaled = both("int4")
    assert torch.equal(plain[q], scaled[q])  # vLLM has no such format to agree with
