"""The engine reads the export of a published layout: its log-probs are those of plain transformers,
and its answers end at the ids that the folder's generation_config.json names."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from engine_helpers import Model, requests
from published_layouts import LAYOUTS, build_layout
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlcore.learner.exporting import write_model
from rlcore.models.folder import read_weights
from rlcore.models.specs import TemplateSpec
from rlcore.models.text import encode_prompt, end_ids, load_tokenizer

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_engine_serves_the_export_of_a_published_layout(tmp_path, name, start, finish):
    source = build_layout(name, tmp_path / "source")
    write_model(tmp_path / "out", read_weights(source), str(source))
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    model = Model(tmp_path / "out", load_file(tmp_path / "out" / "model.safetensors"), hf)
    tokenizer = load_tokenizer(model.path)
    named = json.loads((source / "generation_config.json").read_text())["eos_token_id"]
    assert set(named if isinstance(named, list) else [named]) <= {*end_ids(tokenizer, model.path)}
    prompt = encode_prompt(tokenizer, "hello a", TemplateSpec())
    engine = start(model, dtype="float32")
    engine.add(requests(4, prompt=prompt, max_new_tokens=12))
    answers = finish(engine)
    assert len(answers) == 4
    for t in answers:
        np.testing.assert_allclose(t.logp_inf, model.sampled(t), atol=2e-4)
