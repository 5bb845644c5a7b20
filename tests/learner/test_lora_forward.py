"""The forward of an adapted layer: PEFT's in float32, through the published weight in bfloat16."""

import copy

import pytest
import torch
from learner_helpers import small_model
from torch.nn import functional as F

from rlcore.learner.lora import adapted_layers, add_adapters, factors, merged
from rlcore.learner.policy import load_causal_lm
from rlcore.learner.specs import LoraSpec

SPEC = LoraSpec(rank=4, alpha=8.0, targets=("q_proj",))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("model"))


def _layer(model, dtype):
    """One adapted layer with an update far below the rounding of its weight."""
    lm = load_causal_lm(model, dtype, "sdpa")
    add_adapters(lm, SPEC, seed=1, key="learner.lora")
    layer = next(iter(adapted_layers(lm).values()))
    with torch.no_grad():
        factors(layer)[1].normal_(std=1e-3, generator=torch.Generator().manual_seed(2))
    return layer


def test_bfloat16_multiplies_by_the_published_weight(model):
    layer = _layer(model, "bfloat16")
    x = torch.randn(7, 66).bfloat16()
    weight = layer.get_base_layer().weight
    assert torch.equal(layer(x), F.linear(x, merged(weight, layer)))
    assert not torch.equal(layer(x), type(layer).forward(layer, x))  # PEFT's own


def test_float32_is_peft_s(model):
    layer = _layer(model, "float32")
    x = torch.randn(7, 66)
    assert torch.equal(layer(x), type(layer).forward(layer, x))


def test_the_gradient_in_bfloat16_is_that_of_the_unrounded_sum(model):
    layer = _layer(model, "bfloat16")
    exact = copy.deepcopy(layer).float()
    x = torch.randn(2, 7, 66).bfloat16().requires_grad_()
    y = x.detach().float().requires_grad_()
    g = torch.randn(2, 7, 32)
    mine = torch.autograd.grad((layer(x) * g).sum(), [x, *factors(layer)])
    plain = (type(exact).forward(exact, y) * g).sum()
    for a, b in zip(mine, torch.autograd.grad(plain, [y, *factors(exact)])):
        assert float((a - b).norm() / b.norm()) < 0.02
