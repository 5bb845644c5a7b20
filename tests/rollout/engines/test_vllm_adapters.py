"""An adapter published by itself: vLLM computes with it over its own base weights what it would
compute with the merged weights, version by version."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from engine_helpers import Model, build_model
from test_vllm_updates import LONG, check_spans, start_and_step

from rlcore.weights.adapters import AdapterShape, adapter_shapes
from rlcore.weights.manifest import ArrivalError, make_manifest, verify_checksums
from rlcore.weights.stream import announced, in_buckets, whole

pytestmark = pytest.mark.engine

# a rank that vLLM has no buffers for, parts of both fused layers, and whole ones
ADAPTER = AdapterShape(12, ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj"))


def make_factors(model: Model, seed: int, adapter: AdapterShape = ADAPTER):
    """Random factors of every adapted layer, as they are published."""
    gen = torch.Generator().manual_seed(seed)
    shapes = adapter_shapes({n: tuple(t.shape) for n, t in model.tensors.items()}, adapter)
    assert len(shapes) == 2 * 2 * len(adapter.targets)  # two layers
    return {n: 0.2 * torch.randn(shape, generator=gen) for n, shape in shapes.items()}


def merged(model: Model, factors) -> Model:
    """The model with the adapter merged into its weights."""
    tensors = dict(model.tensors)
    for name in factors:
        if name.endswith(".lora_A.weight"):
            b = factors[name.replace("lora_A", "lora_B")]
            target = name.replace(".lora_A", "")
            tensors[target] = tensors[target] + b @ factors[name]
    hf = copy.deepcopy(model.hf)
    hf.load_state_dict(tensors, strict=False)
    return Model(model.path, tensors, hf)


def publish(engine, version, tensors, mode="in_flight", bucket=4096):
    """In buckets, with every checksum compared."""
    manifest = make_manifest(version, tensors, full=True, seed=0)
    stream = announced(manifest, in_buckets(tensors.items(), bucket))
    engine.update_weights(version, stream, mode)
    verify_checksums(manifest, engine.checksums(manifest.checksums))


@pytest.fixture(scope="module")
def adapted(start, model_a):
    return start(model_a, adapter=ADAPTER)


def test_every_version_is_that_of_the_merged_publication(adapted, engine, model_a, ask, finish):
    adapted.add(ask(4))
    for t in finish(adapted):  # nothing was published yet
        np.testing.assert_allclose(t.logp_inf, model_a.sampled(t), atol=1e-5)
    for version in (1, 2, 3):
        factors = make_factors(model_a, version)
        expected = merged(model_a, factors)
        publish(adapted, version, factors)
        engine.update_weights(version, whole(expected.tensors), "in_flight")
        for e in (adapted, engine):
            e.add(ask(8, max_new_tokens=30))
        for mine, other in zip(finish(adapted), finish(engine), strict=True):
            assert mine.sampled_ids.tolist() == other.sampled_ids.tolist()
            np.testing.assert_allclose(mine.logp_inf, other.logp_inf, atol=1e-5)
            np.testing.assert_allclose(mine.logp_inf, expected.sampled(mine), atol=1e-5)


@pytest.mark.parametrize("mode", ["in_flight", "abort", "finish"])
@pytest.mark.parametrize("prompt", [None, LONG], ids=["short", "cached-prefix"])
def test_tokens_match_the_version_they_carry(adapted, model_a, ask, finish, mode, prompt):
    old, new = make_factors(model_a, 4), make_factors(model_a, 5)
    publish(adapted, 0, old)
    done = start_and_step(adapted, ask(24, prompt=prompt, max_new_tokens=60), 9)
    publish(adapted, 1, new, mode)
    trajectories = [*done, *finish(adapted)]
    assert len(trajectories) == 24
    assert check_spans(trajectories, merged(model_a, old), merged(model_a, new)) > 40


def test_keep_leaves_old_keys_and_values_to_running_requests_only(start, model_a, ask, finish):
    engine = start(model_a, adapter=ADAPTER, kv_on_update="keep")
    old, new = make_factors(model_a, 4), make_factors(model_a, 5)
    before, after = merged(model_a, old), merged(model_a, new)
    publish(engine, 0, old)
    done = start_and_step(engine, ask(32, prompt=LONG, max_new_tokens=40), 6)
    publish(engine, 1, new)
    # the prompt is cached under the old adapter, which is of the same name
    engine.add(ask(4, group=1, prompt=LONG, max_new_tokens=20))
    trajectories = [*done, *finish(engine)]
    assert check_spans(trajectories, before, after, kept=True) > 50
    spanning = [t for t in trajectories if len(set(t.token_version)) == 2]
    stale = [np.abs(t.logp_inf - after.sampled(t))[t.token_version == 1].max() for t in spanning]
    assert max(stale) > 1e-2  # neither policy
    fresh = [t for t in trajectories if set(t.token_version) == {1}]
    assert len(fresh) >= 4
    for t in fresh:
        np.testing.assert_allclose(t.logp_inf, after.sampled(t), atol=1e-5)


def test_a_factor_that_was_lost_is_seen(adapted, model_a):
    def damage(worker) -> None:
        layers = worker.model_runner.lora_manager._adapter_manager.modules
        layers["model.layers.1.self_attn.qkv_proj"].lora_b_stacked[2][0, 0, 3, 5] += 1.0

    factors = make_factors(model_a, 6)
    publish(adapted, 1, factors)
    adapted.core.rpc(damage)
    manifest = make_manifest(1, factors, full=True, seed=0)
    with pytest.raises(ArrivalError, match=r"layers\.1\.self_attn\.v_proj\.lora_B"):
        verify_checksums(manifest, adapted.checksums(manifest.checksums))


def test_a_set_that_is_not_the_adapter_s_is_refused(adapted, model_a):
    factors = make_factors(model_a, 7)
    publish(adapted, 1, factors)
    held = adapted.checksums(factors)
    short = dict(list(make_factors(model_a, 8).items())[:-1])
    for tensors in (short, model_a.tensors):
        with pytest.raises(ValueError, match="lora_"):
            adapted.update_weights(2, whole(tensors), "in_flight")
    assert adapted.checksums(factors) == held


def test_base_weights_may_come_with_the_adapter(adapted, model_a, model_b, ask, finish):
    """DistillSparse: the policy and its sparse copy's adapter."""
    factors = make_factors(model_b, 9)
    publish(adapted, 1, model_b.tensors | factors)
    expected = merged(model_b, factors)
    adapted.add(ask(4))
    for t in finish(adapted):
        np.testing.assert_allclose(t.logp_inf, expected.sampled(t), atol=1e-5)
    publish(adapted, 2, model_a.tensors | make_factors(model_a, 4))  # as other tests expect it


def test_every_rank_of_an_engine_has_its_part(start, tmp_path, ask, finish):
    model = build_model(tmp_path, seed=3, kv_heads=1)
    pair = start(model, adapter=ADAPTER, tensor_parallel=2)
    for version in (1, 2):
        factors = make_factors(model, version)
        publish(pair, version, factors)
        pair.add(ask(6))
        for t in finish(pair):
            np.testing.assert_allclose(t.logp_inf, merged(model, factors).sampled(t), atol=1e-5)


def test_sparse_actors_attend_by_their_rule_with_an_adapter(start, model_a, ask, finish):
    sparse = {"block_size": 16, "blocks": 2}
    settings = {"kind": "sparse", "sparse": sparse, "max_len": 512}
    factors = make_factors(model_a, 10)
    expected = merged(model_a, factors)
    engines = [start(model_a, adapter=ADAPTER, **settings), start(model_a, **settings)]
    publish(engines[0], 1, factors)
    publish(engines[1], 1, expected.tensors)
    for e in engines:
        e.add(ask(4, prompt=LONG, max_new_tokens=40))
    for mine, other in zip(finish(engines[0]), finish(engines[1]), strict=True):
        assert mine.sampled_ids.tolist() == other.sampled_ids.tolist()
        np.testing.assert_allclose(mine.logp_inf, other.logp_inf, atol=1e-5)
        assert np.abs(mine.logp_inf - expected.sampled(mine)).max() > 1e-3  # sparse indeed
