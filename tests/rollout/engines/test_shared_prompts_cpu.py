from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from rlcore.rollout.engines.vllm.cpu.decoder import norm_kernels
from rlcore.rollout.engines.vllm.cpu.shared_prompts import Positions, SharedPrompts
from rlcore.weights.stream import whole

pytestmark = pytest.mark.engine


def test_a_prefix_that_requests_share_is_kept_once():
    tokens = np.array([5, 9, 4, 5, 9, 7, 5, 9, 4], np.int32)
    found = Positions.of(tokens, [0, 3, 6, 9], [(), (), ()])
    assert found.kept.tolist() == [0, 1, 2, 5]
    assert found.of_each.tolist() == [0, 1, 2, 0, 1, 3, 0, 1, 2]


def test_equal_tokens_after_other_ones_are_other_positions():
    tokens = np.array([9, 4, 9, 4, 9, 4], np.int32)
    found = Positions.of(tokens, [0, 2, 4, 6], [(3,), (8,), (3,)])
    assert found.of_each.tolist() == [0, 1, 2, 3, 0, 1]


@pytest.fixture
def kept(monkeypatch):
    """(distinct, all) positions of every step that was looked at."""
    seen = []

    def of(*args):
        found = plain(*args)
        seen.append((len(found.kept), len(found.of_each)))
        return found

    plain = Positions.of
    monkeypatch.setattr(Positions, "of", of)
    return seen


def test_shared_prompts_give_the_log_probs_of_a_plain_forward(engine, model_a, ask, finish, kept):
    assert engine.core.unshared is None
    # each begins as the one before; the third fills a block of the prefix cache, which the others
    # of its group begin behind
    prompts = [[5, 6, 7, 8], [5, 6, 7, 8, 9, 10], [5 + i % 20 for i in range(150)]]
    for group, prompt in enumerate(prompts):
        engine.add(ask(4, group=group, prompt=prompt, max_new_tokens=6))
    done = finish(engine)
    assert kept[0] == (150 + 22, 4 * (4 + 6) + 150 + 3 * 22)
    assert len(done) == 12
    for t in done:
        assert np.allclose(t.logp_inf, model_a.sampled(t), atol=2e-5)


def test_what_runs_is_computed_again_under_new_weights(engine, model_a, model_b, ask, finish, kept):
    engine.add(ask(4, prompt=[5, 6, 7, 8], max_new_tokens=8))
    done = [t for _ in range(3) for t in engine.step()]
    kept.clear()
    engine.update_weights(1, whole(model_b.tensors), "in_flight")
    done += finish(engine)
    distinct, positions = kept[0]
    assert distinct < positions
    assert any((t.token_version == 1).any() for t in done)
    for t in done:
        after = t.token_version == 1
        assert np.allclose(t.logp_inf[after], model_b.sampled(t)[after], atol=2e-5)


def runner(**changes):
    usual = dict(enable_prefix_caching=True, block_size=128)
    return SimpleNamespace(
        cache_config=SimpleNamespace(**{**usual, **changes}),
        compilation_config=SimpleNamespace(static_forward_context={"experts": object()}),
        lora_config=None,
        uses_mrope=False,
        _model_forward=None,
    )


def test_other_runners_stay_as_they_are():
    assert SharedPrompts(runner(enable_prefix_caching=False)).reason == "prefix caching is off"
    assert "second runner" in str(SharedPrompts(SimpleNamespace(req_states=None)).reason)
    assert "experts is not" in str(SharedPrompts(runner()).reason)


@pytest.mark.parametrize("shape", [(5, 64), (5, 4, 32), (3, 24)])
def test_norm_kernels_equal_torch(shape):
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    torch.manual_seed(0)
    with set_current_vllm_config(VllmConfig()), norm_kernels():
        norm = RMSNorm(shape[-1])
    norm.weight.data.uniform_(0.5, 1.5)
    # a part of a wider row, as queries are
    x, residual = torch.randn(*shape[:-1], 2 * shape[-1])[..., : shape[-1]], torch.randn(shape)
    expected = norm.forward_native(x.clone())
    assert torch.allclose(norm(x), expected, atol=1e-6)
    both = norm.forward_native(x.clone(), residual.clone())
    found = norm(x.clone().contiguous(), residual.clone())
    assert all(torch.allclose(a, b, atol=2e-6) for a, b in zip(found, both, strict=True))
