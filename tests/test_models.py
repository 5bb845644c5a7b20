import pytest
import torch
from transformers import AutoModelForCausalLM

from rlcore.errors import UserError
from rlcore.models import (
    build_char_tokenizer,
    build_fresh_model,
    decode_response,
    encode_prompt,
    load_tokenizer,
    padding,
)

ARCHITECTURE = dict(
    hidden_size=32, layers=1, heads=2, kv_heads=1, head_dim=16, intermediate_size=64, max_len=64, tie_embeddings=True
)


def test_a_character_tokenizer_round_trips_its_alphabet_and_nothing_else():
    tokenizer = build_char_tokenizer("ab =\n1")
    ids = tokenizer.encode("a1 =\nb", add_special_tokens=False)
    assert len(ids) == 6 and len(set(ids)) == 6
    assert decode_response(tokenizer, [*ids, tokenizer.eos_token_id]) == "a1 =\nb"
    assert tokenizer.encode("z", add_special_tokens=False) == [tokenizer.unk_token_id]


def test_a_fresh_model_depends_on_its_seed_alone(tmp_path):
    def weights(name, seed):
        folder = build_fresh_model(tmp_path / name, "0123", seed=seed, vocab_size=40, **ARCHITECTURE)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()

    a, b, c = weights("a", 1), weights("b", 1), weights("c", 2)
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert not torch.equal(a["model.embed_tokens.weight"], c["model.embed_tokens.weight"])
    assert a["model.embed_tokens.weight"].shape[0] == 40


def test_a_vocabulary_too_small_for_the_alphabet_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"model\.fresh\.vocab_size=5"):
        build_fresh_model(tmp_path, "0123456789", seed=0, vocab_size=5, **ARCHITECTURE)


def test_a_chat_template_is_used_where_there_is_one(tmp_path):
    tokenizer = build_char_tokenizer("<>|usertyma:? 12+")
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<a>{% endif %}"
    )
    tokenizer.save_pretrained(tmp_path)
    kept = load_tokenizer(tmp_path)
    asked = decode_response(kept, encode_prompt(kept, "1+1?", system_prompt="my"))
    assert asked == "<system>my<user>1+1?<a>"
    assert decode_response(kept, encode_prompt(kept, "1+1?")) == "<user>1+1?<a>"
    assert decode_response(kept, encode_prompt(kept, "1+1?", chat_template="off")) == "1+1?"


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(UserError, match="is not a folder"):
        load_tokenizer(tmp_path / "none")
    with pytest.raises(UserError, match=r"model\.path=.* holds no readable tokenizer"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_without_a_pad_token_pads_all_the_same():
    tokenizer = build_char_tokenizer("ab")
    assert padding(tokenizer) == tokenizer.pad_token_id
    tokenizer.pad_token = None
    assert padding(tokenizer) == tokenizer.eos_token_id is not None
    tokenizer.eos_token = None
    assert padding(tokenizer) == 0
