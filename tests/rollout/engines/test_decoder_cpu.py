from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from engine_helpers import ALPHABET

pytest.importorskip("vllm")

from rlcore.models.text import load_tokenizer
from rlcore.rollout.engines.vllm.cpu.decoder import PlainDecoder
from rlcore.weights.stream import whole

pytestmark = pytest.mark.engine


@pytest.fixture
def compared(monkeypatch):
    """Runs every step by vLLM's modules too: for each, whether both gave the same bits."""
    same = []

    def run(decoder, input_ids, positions, *args, **kwargs):
        expected = decoder._forward(input_ids, positions, *args, **kwargs)
        found = plain(decoder, input_ids, positions, *args, **kwargs)
        same.append(torch.equal(found, expected))
        return found

    plain = PlainDecoder.run
    monkeypatch.setattr(PlainDecoder, "run", run)
    return same


def test_layers_run_plainly_give_the_bits_of_the_modules(
    engine, model_b, ask, finish, monkeypatch, compared
):
    assert engine.core.by_modules is None
    monkeypatch.setattr(engine.core, "_quick", None)  # quick steps call the layers themselves
    # one position each, several, and more than one block of the cache
    for group, length in enumerate((1, 7, 150)):
        prompt = [5 + i % 20 for i in range(length)]
        engine.add(ask(2, group=group, prompt=prompt, max_new_tokens=5))
    done = [t for _ in range(3) for t in engine.step()]
    # weights are read where updates write them
    engine.update_weights(1, whole(model_b.tensors), "in_flight")
    done += finish(engine)
    assert len(done) == 6
    assert len(compared) > 4
    assert all(compared)


@pytest.fixture
def llama(tmp_path):
    """Another architecture: no norms of queries and keys, a head of its own."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from rlcore.models.fresh import build_fresh_model
    from rlcore.models.specs import FreshModelSpec

    build_fresh_model(tmp_path, ALPHABET, FreshModelSpec(), seed=0, max_len=64)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(load_tokenizer(str(tmp_path))),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    return SimpleNamespace(path=tmp_path)


@pytest.mark.slow
def test_another_architecture_runs_plainly_too(start, llama, ask, finish, compared):
    engine = start(llama, max_len=64)
    assert engine.core.by_modules is None
    engine.core._quick = None
    engine.add(ask(3, prompt=[5, 6, 7], max_new_tokens=6))
    assert len(finish(engine)) == 3
    assert all(compared)
    assert len(compared) > 5


def runner(**changes):
    usual = dict(lora_config=None, model=SimpleNamespace(), _model_forward=None)
    return SimpleNamespace(**{**usual, **changes})


def test_other_models_stay_as_they_are():
    assert PlainDecoder(runner()).reason == "SimpleNamespace is not known"
    assert "adapters" in str(PlainDecoder(runner(lora_config=object())).reason)
    assert "second runner" in str(PlainDecoder(runner(req_states=None)).reason)
