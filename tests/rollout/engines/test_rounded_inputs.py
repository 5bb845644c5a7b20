"""Rounded activations of CPU actors, against a plain transformers forward that rounds what its
linear maps read."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from rlcore.errors import UserError
from rlcore.weights.rounding import round_rows, round_weights
from rlcore.weights.specs import RoundingSpec

pytest.importorskip("vllm")

from vllm.model_executor.layers.linear import LinearBase

from rlcore.rollout.engines.vllm.rounded_inputs_cpu import round_inputs

pytestmark = pytest.mark.engine


def reference(model, rounding, activations, kept=()):
    """Log-probs [S, V] of a trajectory, as `model.logp`, of the same model rounded by hand."""
    spec = RoundingSpec(rounding=rounding, keep_high_precision=("lm_head", "embed_tokens", *kept))
    before = {n: t.clone() for n, t in model.hf.state_dict().items()}

    def of(t):
        hooks = [
            m.register_forward_pre_hook(lambda _, args: (round_rows(args[0], activations),))
            for n, m in model.hf.named_modules()
            if isinstance(m, nn.Linear) and "lm_head" not in n and not any(k in n for k in kept)
        ]
        model.hf.load_state_dict(before | round_weights(model.tensors, spec), strict=False)
        found = model.logp(t)
        model.hf.load_state_dict(before)
        for hook in hooks:
            hook.remove()
        return found

    return of


def test_log_probs_are_those_of_a_forward_that_rounds(start, model_a, ask, finish):
    """Weights and activations in four bits; the head reads what it is given."""
    engine = start(model_a, kind="fp8", rounding="nvfp4", activations="nvfp4")
    assert engine.core.by_modules == "what its linear maps read is rounded"
    engine.add(ask(8))
    together = finish(engine)
    rounded, weights = reference(model_a, "nvfp4", "nvfp4"), reference(model_a, "nvfp4", "none")
    apart, from_weights = [], []
    for t in together:
        assert t.actor_kind == "nvfp4_emulated"
        for of, found in ((rounded, apart), (weights, from_weights)):
            full = np.take_along_axis(of(t), t.topk_ids, 1)
            found.append(np.abs(full - t.topk_logp).max(1))
    # a sum in another order may take another of two codes; elsewhere they are equal
    assert np.quantile(np.concatenate(apart), 0.8) < 1e-4
    assert np.median(np.concatenate(from_weights)) > 0.01
    engine.add(ask(8)[3:4])
    (alone,) = finish(engine)
    assert alone.token_ids.tolist() == together[3].token_ids.tolist()


class Map(LinearBase):
    """A linear map of vLLM's, as far as what it reads goes."""

    def __init__(self) -> None:
        nn.Module.__init__(self)

    def forward(self, x):
        return x


def model(*names):
    """A decoder of two layers with maps of these names, and one outside."""
    found = nn.Module()
    layers = [nn.ModuleDict({name: Map() for name in names}) for _ in range(2)]
    found.layers, found.other = nn.ModuleList(layers), Map()
    found.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    return SimpleNamespace(
        named_modules=lambda: ((f"model.{n}", m) for n, m in found.named_modules()),
        named_parameters=lambda: iter(()),
        packed_modules_mapping=found.packed_modules_mapping,
        layers=layers,
        other=found.other,
    )


def test_maps_that_stay_read_what_they_are_given():
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    for kind in ("fp8", "int8", "mxfp4", "nvfp4"):
        lm = model("qkv_proj", "down_proj")
        round_inputs(lm, kind, ("down_proj", "other"), 1, "actor.q")
        first, last = lm.layers
        assert torch.equal(first["qkv_proj"](x), round_rows(x, kind))
        assert not torch.equal(first["qkv_proj"](x), x)
        assert all(torch.equal(m(x), x) for m in (first["down_proj"], *last.values(), lm.other))


def test_what_cannot_be_rounded_is_refused():
    with pytest.raises(UserError, match="cannot leave out q_proj alone"):
        round_inputs(model("qkv_proj"), "int8", ("q_proj",), 0, "actor.q")
    round_inputs(model("qkv_proj"), "int8", ("q_proj", "k_proj", "v_proj"), 0, "actor.q")
    with pytest.raises(UserError, match="rounds nothing"):
        round_inputs(model("qkv_proj"), "int8", ("proj", "other"), 0, "actor.q")
    experts = model("qkv_proj")
    experts.named_parameters = lambda: iter([("model.layers.0.mlp.experts.w13_weight", None)])
    with pytest.raises(UserError, match="use activations=none with a mixture"):
        round_inputs(experts, "int8", (), 0, "actor.q")
    round_inputs(model("qkv_proj"), "int8", (), 0, "actor.q")
