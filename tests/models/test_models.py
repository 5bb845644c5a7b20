from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils.logging import enable_progress_bar

from rlcore.errors import UserError
from rlcore.models.fresh import build_char_tokenizer, build_fresh_model
from rlcore.models.specs import FreshModelSpec, TemplateSpec
from rlcore.models.text import decode_response, encode_prompt, load_tokenizer, padding

SPEC = FreshModelSpec(
    hidden_size=32, layers=1, heads=2, kv_heads=1, head_dim=16, intermediate_size=64, vocab_size=40
)


def test_a_character_tokenizer_round_trips_its_alphabet_and_nothing_else():
    tokenizer = build_char_tokenizer("ab =\n1")
    ids = tokenizer.encode("a1 =\nb", add_special_tokens=False)
    assert len(ids) == 6 and len(set(ids)) == 6
    assert decode_response(tokenizer, [*ids, tokenizer.eos_token_id]) == "a1 =\nb"
    assert tokenizer.encode("z", add_special_tokens=False) == [tokenizer.unk_token_id]


def test_a_fresh_model_depends_on_its_seed_alone(tmp_path):
    def weights(name, seed):
        folder = build_fresh_model(tmp_path / name, "0123", SPEC, seed=seed, max_len=64)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()

    a, b, c = weights("a", 1), weights("b", 1), weights("c", 2)
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert not torch.equal(a["model.embed_tokens.weight"], c["model.embed_tokens.weight"])
    assert a["model.embed_tokens.weight"].shape[0] == 40


def test_a_fresh_model_is_written_without_a_bar(tmp_path, capfd):
    enable_progress_bar()
    build_fresh_model(tmp_path, "0123", SPEC, seed=1, max_len=64)
    assert "Writing" not in capfd.readouterr().err


def test_a_vocabulary_too_small_for_the_alphabet_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"model\.fresh\.vocab_size=5"):
        build_fresh_model(tmp_path, "0123456789", FreshModelSpec(vocab_size=5), seed=0, max_len=64)


def test_a_tokenizers_chat_template_is_used(tmp_path):
    tokenizer = build_char_tokenizer("<>|usertyma:? 12+\n")
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<a>{% endif %}"
    )
    tokenizer.save_pretrained(tmp_path)
    kept = load_tokenizer(tmp_path)

    def text(chat_template, system_prompt):
        ids = encode_prompt(
            kept, "1+1?", TemplateSpec(chat_template=chat_template, system_prompt=system_prompt)
        )
        return decode_response(kept, ids)

    assert text("auto", "my") == "<system>my<user>1+1?<a>"
    assert text("auto", None) == "<user>1+1?<a>"
    assert text("off", None) == "1+1?"
    assert text("off", "my") == "my\n1+1?"


def test_a_tokenizer_of_characters_is_read_without_auto_tokenizer(tmp_path, monkeypatch):
    """To the same end, but without the import of torch."""
    build_char_tokenizer("01+").save_pretrained(tmp_path / "chars")
    words = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "words")
    asked = []

    def auto(path, **words):
        asked.append(Path(path).name)
        return found(path, **words)

    found = AutoTokenizer.from_pretrained
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", auto)
    light, usual = load_tokenizer(tmp_path / "chars"), found(tmp_path / "chars")
    assert asked == [] and type(light) is type(usual)
    assert light.get_vocab() == usual.get_vocab() and light.special_tokens_map
    assert light.special_tokens_map == usual.special_tokens_map
    assert light.decode(light.encode("1+0")) == usual.decode(usual.encode("1+0")) == "1+0"
    load_tokenizer(tmp_path / "words")
    assert asked == ["words"]


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(UserError, match="is not a folder"):
        load_tokenizer(tmp_path / "none")
    with pytest.raises(UserError, match=r"model\.path=.* holds no readable tokenizer"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_without_a_pad_token_pads():
    tokenizer = build_char_tokenizer("ab")
    assert padding(tokenizer) == tokenizer.pad_token_id
    tokenizer.pad_token = None
    assert padding(tokenizer) == tokenizer.eos_token_id is not None
    tokenizer.eos_token = None
    assert padding(tokenizer) == 0
