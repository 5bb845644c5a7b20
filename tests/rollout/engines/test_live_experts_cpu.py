"""Experts computed from weights that can be replaced in place, against transformers' own."""

import pytest
import torch
from tiny_mixture import tiny_mixture

pytestmark = pytest.mark.engine


def test_the_mixture_is_that_of_transformers(tmp_path):
    from rlcore.rollout.engines.vllm.experts_cpu import mixed

    block = tiny_mixture(tmp_path, "0123456789", seed=2).model.layers[0].mlp
    x = torch.randn(7, 64)
    _, weights, chosen = block.gate(x)
    found = mixed(x, block.experts.gate_up_proj, block.experts.down_proj, weights, chosen)
    assert torch.allclose(found, block.experts(x, chosen, weights), atol=1e-6)
    assert len(chosen.unique()) > 2
