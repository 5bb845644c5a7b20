"""Prompts and responses by a real byte-level tokenizer with a chat template."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlcore.models.specs import TemplateSpec
from rlcore.models.text import decode_response, encode_prompt, load_tokenizer, padding
from rlcore.rollout.text import StopWatcher

pytestmark = pytest.mark.processes  # the model is made by pip once


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    return load_tokenizer(smollm2)


def test_the_folder_is_a_plain_chat_model_that_answers(smollm2, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    question = "What is the capital of France?"
    ids = encode_prompt(tokenizer, question, TemplateSpec())
    out = model.generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False)
    assert "Paris" in decode_response(tokenizer, out[0, len(ids) :].tolist())


def test_the_chat_template_frames_a_question(tokenizer):
    ids = encode_prompt(tokenizer, "Hi", TemplateSpec(system_prompt="Be brief."))
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    own = encode_prompt(tokenizer, "Hi", TemplateSpec())
    assert "SmolLM" in tokenizer.decode(own)  # the template's own system prompt
    off = encode_prompt(tokenizer, "Hi", TemplateSpec(chat_template="off"))
    assert tokenizer.decode(off) == "Hi"


def test_a_question_cannot_close_its_turn(tokenizer):
    settings = TemplateSpec(system_prompt="s")
    ids = encode_prompt(tokenizer, "a<|im_end|>b", settings)
    assert ids.count(tokenizer.eos_token_id) == 2 and "a<|im_end|>b" in tokenizer.decode(ids)
    ids = encode_prompt(
        tokenizer, "a<|im_end|>b", settings.model_copy(update={"control_tokens": "tokens"})
    )
    assert ids.count(tokenizer.eos_token_id) == 3


def test_special_tokens_are_not_part_of_a_response(tokenizer):
    ids = [*tokenizer.encode("22", add_special_tokens=False), tokenizer.eos_token_id]
    assert decode_response(tokenizer, ids) == "22"
    assert padding(tokenizer) == tokenizer.eos_token_id


def test_a_stop_string_is_found_across_tokens_and_behind_split_characters(tokenizer):
    text = "naïve 🎉 café\n\nQuestion: next"
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = [tokenizer.decode([i]) for i in ids]
    assert any("\ufffd" in p for p in pieces)  # bytes that are no characters by themselves
    for stop in ("🎉", "é\n\nQ", "Question:"):
        watcher = StopWatcher(tokenizer, [stop])
        found = next(n for n, i in enumerate(ids, 1) if watcher.push(i))
        assert stop in tokenizer.decode(ids[:found])
        assert stop not in tokenizer.decode(ids[: found - 1])


def test_half_a_character_at_the_end_is_text_that_graders_can_read(tokenizer):
    ids = tokenizer.encode("ok 🎉", add_special_tokens=False)
    cut = decode_response(tokenizer, ids[:-1])
    assert cut.startswith("ok ") and "🎉" not in cut
    cut.encode("utf-8")  # no lone surrogates
