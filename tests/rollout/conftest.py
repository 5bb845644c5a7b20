"""Two tiny models of one architecture, their plain transformers forwards, and engines started as seldom as possible."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlcore.models import build_fresh_model
from rlcore.types import Request, SamplingSpec, Trajectory

ALPHABET = "0123456789abcdefghijklmnop =+-"


@dataclass
class Model:
    """A model folder with its reference forward in float32."""

    path: Path
    tensors: dict[str, torch.Tensor]
    hf: Any

    def logp(self, t: Trajectory, temperature: float = 1.0) -> np.ndarray:
        """[T, V] float32: log-probs at every response position, from one plain forward."""
        ids = torch.tensor(np.concatenate([t.prompt_ids, t.response_ids])[None].astype(np.int64))
        with torch.no_grad():
            logits = self.hf(ids).logits[0, len(t.prompt_ids) - 1 : -1]
        return (logits / temperature).log_softmax(-1).numpy()

    def sampled(self, t: Trajectory, temperature: float = 1.0) -> np.ndarray:
        """[T]: log-probs of the sampled tokens."""
        return self.logp(t, temperature)[np.arange(len(t.response_ids)), t.response_ids]


def build_model(folder: Path, seed: int, **changes: Any) -> Model:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    shape = dict(hidden_size=64, layers=2, heads=4, kv_heads=2, head_dim=32, intermediate_size=96, max_len=512)
    build_fresh_model(folder, ALPHABET, seed=seed, **{**shape, **changes})
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():  # fresh weights are nearly uniform: sharpen them so that models differ clearly
        for p in hf.parameters():
            if p.ndim == 2:
                p.mul_(4.0)
    hf.save_pretrained(folder)
    return Model(folder, load_file(folder / "model.safetensors"), hf)


@pytest.fixture(scope="session")
def model_a(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return build_model(tmp_path_factory.mktemp("a"), seed=1)


@pytest.fixture(scope="session")
def model_b(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return build_model(tmp_path_factory.mktemp("b"), seed=2)


@pytest.fixture(scope="session")
def start() -> Iterator[Callable[..., Any]]:
    """Starts engines; they live until the session ends."""
    from rlcore.rollout.vllm_engine import VllmEngine

    engines = []

    def make(model: Model, **changes: Any) -> VllmEngine:
        settings: dict[str, Any] = dict(max_len=256, max_num_seqs=16, kv_cache_gib=0.05, logprobs_k=20)
        engine = VllmEngine(model_path=str(model.path), actor_id="actor-0", **{**settings, **changes})
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(scope="session")
def shared_engine(start: Callable[..., Any], model_a: Model) -> Any:
    return start(model_a)


@pytest.fixture
def engine(shared_engine: Any, model_a: Model) -> Any:
    """The shared engine on model A's weights as version 0, with nothing queued."""
    shared_engine.abort([*shared_engine._book.active])
    shared_engine.end_drain()
    shared_engine.update_weights(0, model_a.tensors, "in_flight")
    return shared_engine


def requests(
    count: int, *, group: int = 0, prompt: list[int] | None = None, seed: int = 100, **sampling: Any
) -> list[Request]:
    """`count` samples of different prompts (or of `prompt`), seeds seed, seed+1, ..."""
    spec = SamplingSpec(**{"max_new_tokens": 24, "logprobs_k": 20, **sampling})
    own = [np.array([3 + i % 8, 7, 11, 5, 9 + i % 3], np.int32) for i in range(count)]
    prompts = own if prompt is None else [np.array(prompt, np.int32)] * count
    return [Request(group, i, f"t/train/{group}", prompts[i], spec, seed=seed + i) for i in range(count)]


def drain(engine: Any) -> list[Trajectory]:
    """Step until nothing is left; trajectories by sample index."""
    done: list[Trajectory] = []
    for _ in range(5000):
        if not engine.unfinished():
            break
        done += engine.step()
    assert not engine.unfinished()
    return sorted(done + engine.step(), key=lambda t: (t.group_id, t.sample_index))


@pytest.fixture
def build() -> Callable[..., Model]:
    return build_model


@pytest.fixture
def ask() -> Callable[..., list[Request]]:
    return requests


@pytest.fixture
def finish() -> Callable[[Any], list[Trajectory]]:
    return drain
