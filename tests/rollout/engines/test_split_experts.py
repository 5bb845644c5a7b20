"""A mixture of experts that two processes share: each holds a part of every expert."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_helpers import ALPHABET, Model, drain, requests
from safetensors.torch import load_file

pytest.importorskip("vllm")

from tiny_mixture import tiny_mixture

from rlcore.rollout.specs import ActorSpec, EngineJob, start_engine
from rlcore.weights.manifest import tensor_checksum
from rlcore.weights.stream import whole

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def checksums(tensors):
    return {n: tensor_checksum(t) for n, t in tensors.items()}


def test_experts_are_split_loaded_and_checked_over_two_ranks(tmp_path):
    hf = tiny_mixture(tmp_path, ALPHABET, seed=3)
    model = Model(tmp_path, load_file(tmp_path / "model.safetensors"), hf)
    actor = ActorSpec(max_num_seqs=8, kv_cache_gib=0.05, tensor_parallel=2)
    llm = start_engine(EngineJob(actor, "bf16-0", str(tmp_path), 64, 20))
    try:
        assert llm.checksums(llm.names()) == checksums(model.tensors)
        moved = {n: t + 0.05 * torch.randn_like(t) for n, t in model.tensors.items()}
        for version, tensors in ((0, model.tensors), (1, moved)):
            llm.update_weights(version, whole(tensors), "in_flight")
            assert llm.checksums(llm.names()) == checksums(tensors)
            hf.load_state_dict(stacked(tensors, hf))
            llm.add(requests(3, group=version, max_new_tokens=8))
            for t in drain(llm):
                np.testing.assert_allclose(t.logp_inf, model.sampled(t), atol=1e-5)
    finally:
        llm.close()


def stacked(tensors, hf):
    """Published weights as transformers holds them."""
    out = {}
    for name, held in hf.state_dict().items():
        head, _, kind = name.rpartition(".")
        if kind not in ("gate_up_proj", "down_proj") or not head.endswith("experts"):
            out[name] = tensors.get(name, tensors["model.embed_tokens.weight"])
            continue
        parts = ("gate", "up") if kind == "gate_up_proj" else ("down",)
        out[name] = torch.stack(
            [
                torch.cat([tensors[f"{head}.{e}.{p}_proj.weight"] for p in parts])
                for e in range(len(held))
            ]
        )
    return out
