"""An engine whose model is shared by two processes: the same numbers, the same arrival check, no
rank left behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from engine_helpers import build_model
from timing import wait_for_end, wait_until

from rlcore.weights.manifest import tensor_checksum
from rlcore.weights.stream import whole

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory):
    """Two attention heads a rank, and one KV head of which both ranks hold a copy."""
    return [build_model(tmp_path_factory.mktemp(f"m{seed}"), seed, kv_heads=1) for seed in (1, 2)]


@pytest.fixture(scope="module")
def pair(models, start):
    return start(models[0], tensor_parallel=2)


def children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def checksums(tensors):
    return {n: tensor_checksum(t) for n, t in tensors.items()}


def test_log_probs_and_checksums_are_the_model_s(pair, models, ask, finish):
    pair.add(ask(6))
    for t in finish(pair):
        np.testing.assert_allclose(t.logp_inf, models[0].sampled(t), atol=1e-5)
        np.testing.assert_allclose(
            t.topk_logp, -np.sort(-models[0].logp(t), axis=1)[:, :20], atol=1e-5
        )
    assert pair.checksums(pair.names()) == checksums(models[0].tensors)


def test_an_update_in_flight_reaches_every_rank(pair, models, ask, finish):
    pair.add(ask(6, max_new_tokens=40))
    for _ in range(8):
        pair.step()
    pair.update_weights(1, whole(models[1].tensors), "in_flight")
    assert pair.checksums(pair.names()) == checksums(models[1].tensors)
    crossed = [t for t in finish(pair) if set(t.token_version.tolist()) == {0, 1}]
    assert crossed
    for t in crossed:
        later = t.token_version == 1
        np.testing.assert_allclose(t.logp_inf[later], models[1].sampled(t)[later], atol=1e-5)
        np.testing.assert_allclose(t.logp_inf[~later], models[0].sampled(t)[~later], atol=1e-5)
    assert not list(Path("/dev/shm").glob("rlcore-weights-*"))


def test_patches_in_checkpoint_coordinates_reach_the_part_of_every_rank(pair, models):
    """vLLM's own loading of them, into the layers of a real model: what cluster.transport=nccl with
    cluster.full_weights_every relies on."""

    def patch(worker, patches) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader import checkpoint_weight_patch as loading

        made = [
            loading.CheckpointWeightPatch(name, shape, values.dtype, values, index)
            for name, shape, index, values in patches
        ]
        with set_current_vllm_config(worker.vllm_config):
            loading.load_checkpoint_weight_patches(worker.model_runner.model, made)

    pair.update_weights(1, whole(models[0].tensors), "abort")
    after = {n: t.clone() for n, t in models[0].tensors.items()}
    patches = []
    for name, tensor in after.items():
        if "layers.1.self_attn.k_proj" in name:  # the rest of a fused parameter is changed
            continue
        index = torch.arange(0, tensor.numel(), 7, dtype=torch.int32)
        flat = tensor.view(-1)
        flat[index.long()] = -flat[index.long()]
        patches.append((name, tuple(tensor.shape), index, flat[index.long()]))
    pair.core.rpc(patch, patches)
    assert pair.checksums(pair.names()) == checksums(after)


def test_what_one_rank_lost_is_seen(pair, models):
    def damage(worker, fragment: str) -> None:
        if worker.rank == 1:
            next(
                p for n, p in worker.model_runner.model.named_parameters() if fragment in n
            ).data.add_(1.0)

    expected = checksums(models[1].tensors)
    pair.update_weights(2, whole(models[1].tensors), "abort")
    for held_by_rank_1, seen in (
        ("layers.1.mlp.down_proj", ["mlp.down_proj"]),  # split over the ranks
        ("layers.1.input_layernorm", ["input_layernorm"]),  # a copy on both
        (
            "layers.1.self_attn.qkv_proj",
            ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        ),  # either
    ):
        pair.core.rpc(damage, held_by_rank_1)
        held = pair.checksums(pair.names())
        assert {n for n in held if held[n] != expected[n]} == {
            f"model.layers.1.{part}.weight" for part in seen
        }
        pair.update_weights(2, whole(models[1].tensors), "abort")
        assert pair.checksums(pair.names()) == expected


def test_a_killed_rank_ends_the_engine_instead_of_hanging_it(models, start, ask):
    before = children()
    engine = start(models[0], tensor_parallel=2)
    ranks = [p for p in children() - before if "Worker_TP" in " ".join(p.cmdline())]
    assert len(ranks) == 2
    engine.add(ask(4, max_new_tokens=100))
    engine.step()
    os.kill(ranks[1].pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="one of the engine's 2 ranks died"):
        wait_until(engine.step, 60, "the engine to end", every_s=0)
    wait_for_end(ranks, 30, "both ranks")
