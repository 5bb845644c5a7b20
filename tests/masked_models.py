"""A small masked-diffusion model, engines on it, and requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rlcore.interfaces import RolloutEngine
from rlcore.models.fresh import build_fresh_model
from rlcore.models.specs import DiffusionSpec, FreshModelSpec
from rlcore.rollout.specs import ActorSpec, EngineJob, start_engine
from rlcore.testing.records import make_sampling
from rlcore.types import Request, Trajectory

ALPHABET = "0123456789="
SHAPE = FreshModelSpec(
    hidden_size=32, layers=2, heads=2, kv_heads=1, head_dim=16, intermediate_size=48
)


def sharp_folder(folder: Path, seed: int = 0, *, tie: bool = False) -> str:
    """A model whose distributions are far from flat."""
    import torch
    from transformers import AutoModelForCausalLM

    import rlcore.extras.diffusion.llada  # noqa: F401  # registers the architecture

    spec = SHAPE.model_copy(update={"tie_embeddings": tie})
    build_fresh_model(folder, ALPHABET, spec, seed=seed, max_len=64, masked=True)
    lm = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for p in lm.parameters():
            if p.ndim == 2:
                p.mul_(4.0)
    lm.save_pretrained(folder)
    return str(folder)


def masked_engine(model: str, *, block: int = 4, **actor: Any) -> RolloutEngine:
    spec = ActorSpec(**{"engine": "diffusion", "max_num_seqs": 8, **actor})
    diffusion = DiffusionSpec(block=block, prompt_masking=0.4)
    job = EngineJob(spec, "bf16-0", model, max_len=64, logprobs_k=0, diffusion=diffusion)
    return start_engine(job)


def masked_requests(count: int, **sampling: Any) -> list[Request]:
    """Prompts of 3 to 6 tokens, seeds 100, 101, ..."""
    spec = make_sampling(**{"max_new_tokens": 10, "logprobs_k": 0, **sampling})
    prompts = [np.arange(3, 6 + i % 4, dtype=np.int32) for i in range(count)]
    return [Request(0, i, "digits/train/0", prompts[i], spec, seed=100 + i) for i in range(count)]


def drawn(engine: RolloutEngine, requests: list[Request]) -> list[Trajectory]:
    """By sample index."""
    engine.add(requests)
    done = []
    while engine.unfinished():
        done += engine.step()
    return sorted(done, key=lambda t: t.sample_index)
