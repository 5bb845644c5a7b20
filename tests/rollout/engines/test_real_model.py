"""A real pretrained model in the engine: its log-probs are those of plain transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_helpers import Model, requests
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlcore.models.specs import TemplateSpec
from rlcore.models.text import encode_prompt, load_tokenizer

pytestmark = pytest.mark.engine


@pytest.mark.slow
def test_sampled_tokens_have_the_log_probs_of_the_plain_model(smollm2, start, finish):
    hf = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    model = Model(smollm2, load_file(smollm2 / "model.safetensors"), hf)
    tokenizer = load_tokenizer(smollm2)
    question = "Name three colours and a number above nine."
    prompt = encode_prompt(tokenizer, question, TemplateSpec())
    engine = start(model, dtype="float32", kv_cache_gib=0.25)
    engine.add(requests(4, prompt=prompt, max_new_tokens=32, temperature=0.8))
    for t in finish(engine):
        np.testing.assert_allclose(t.logp_inf, model.sampled(t, 0.8), atol=2e-4)
        whole = model.logp(t, 0.8)
        best = np.sort(whole, axis=1)[:, ::-1][:, : t.topk_logp.shape[1]]
        np.testing.assert_allclose(np.sort(t.topk_logp, 1)[:, ::-1], best, atol=2e-4)
