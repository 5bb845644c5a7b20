"""Tiny models with their plain transformers forwards, and requests to sample from them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlcore.models.fresh import build_fresh_model
from rlcore.models.specs import FreshModelSpec
from rlcore.rollout.specs import ActorSpec, EngineJob
from rlcore.serialization import dump_trajectory, load_trajectory
from rlcore.testing.records import make_sampling
from rlcore.types import Request, Trajectory
from rlcore.weights.adapters import AdapterShape

ALPHABET = "0123456789abcdefghijklmnop =+-"
SHAPE = dict(hidden_size=64, layers=2, heads=4, kv_heads=2, head_dim=32, intermediate_size=96)


@dataclass
class Model:
    """A model folder with its reference forward in float32."""

    path: Path
    tensors: dict[str, torch.Tensor]
    hf: Any

    def logp(self, t: Trajectory, temperature: float = 1.0) -> np.ndarray:
        """[S, V] float32: log-probs at every sampled position, from one plain forward."""
        ids = torch.tensor(t.token_ids[None].astype(np.int64))
        with torch.no_grad():
            logits = self.hf(ids).logits[0, len(t.prompt_ids) - 1 : -1]
        return (logits / temperature).log_softmax(-1).numpy()

    def sampled(self, t: Trajectory, temperature: float = 1.0) -> np.ndarray:
        """[S]: log-probs of the sampled tokens."""
        return self.logp(t, temperature)[np.arange(len(t.sampled_ids)), t.sampled_ids]


def build_model(folder: Path, seed: int, **changes: Any) -> Model:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    build_fresh_model(
        folder, ALPHABET, FreshModelSpec(**{**SHAPE, **changes}), seed=seed, max_len=512
    )
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    # fresh weights are nearly uniform: sharpen them so that models differ clearly
    with torch.no_grad():
        for p in hf.parameters():
            if p.ndim == 2:
                p.mul_(4.0)
    hf.save_pretrained(folder)
    return Model(folder, load_file(folder / "model.safetensors"), hf)


def make_job(
    model: Model,
    *,
    max_len: int = 256,
    logprobs_k: int = 20,
    adapter: AdapterShape | None = None,
    bitwise: bool = False,
    cpu_fast_paths: bool = True,
    **actor: Any,
) -> EngineJob:
    """The job of a small engine; `actor`: settings of `ActorSpec`."""
    settings = {"max_num_seqs": 16, "kv_cache_gib": 0.05, **actor}
    return EngineJob(
        ActorSpec(**settings),
        "bf16-0",
        str(model.path),
        max_len=max_len,
        logprobs_k=logprobs_k,
        adapter=adapter,
        bitwise=bitwise,
        cpu_fast_paths=cpu_fast_paths,
    )


def requests(
    count: int, *, group: int = 0, prompt: list[int] | None = None, seed: int = 100, **sampling: Any
) -> list[Request]:
    """`count` samples of different prompts (or of `prompt`), seeds seed, seed+1, ..."""
    spec = make_sampling(**{"max_new_tokens": 24, **sampling})
    own = [np.array([3 + i % 8, 7, 11, 5, 9 + i % 3], np.int32) for i in range(count)]
    prompts = own if prompt is None else [np.array(prompt, np.int32)] * count
    return [
        Request(group, i, f"t/train/{group}", prompts[i], spec, seed=seed + i) for i in range(count)
    ]


def model_logp(model: Model, t: Trajectory) -> np.ndarray:
    """[S]: log-probs of the sampled tokens of all turns, from one plain forward."""
    at = torch.tensor(np.flatnonzero(t.sampled))
    with torch.no_grad():
        logits = model.hf(torch.tensor(t.token_ids[None].astype(np.int64))).logits[0]
    return logits.log_softmax(-1)[at - 1, torch.tensor(t.sampled_ids).long()].numpy()


def drain(engine: Any) -> list[Trajectory]:
    """Step until nothing is left; trajectories by sample index, as they arrive where they are sent
    to."""
    done: list[Trajectory] = []
    for _ in range(5000):
        if not engine.unfinished():
            break
        done += engine.step()
    assert not engine.unfinished()
    sent = [load_trajectory(dump_trajectory(t)) for t in [*done, *engine.step()]]
    return sorted(sent, key=lambda t: (t.group_id, t.sample_index))
