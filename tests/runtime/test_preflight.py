"""What is refused, and what is made, before any process is started: plain calls of `prepare`."""

from pathlib import Path

import pytest

from rlcore.config.compose import load
from rlcore.models import build_char_tokenizer, build_fresh_model
from rlcore.runtime import preflight
from rlcore.runtime.preflight import prepare

ALPHABET = "0123456789= "
SHAPE = dict(hidden_size=32, layers=1, heads=4, kv_heads=2, head_dim=8, intermediate_size=32, max_len=64)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_fresh_model(tmp_path_factory.mktemp("models") / "policy", ALPHABET, seed=0, **SHAPE)


def prepared(model, *words, **how):
    base = ["run_dir=x", "model=path", f"model.path={model}", "model.max_len=64", "rollout.max_new_tokens=32"]
    return prepare(load([*base, "rollout.logprobs_k=4", *words]), **how)


def test_a_model_whose_tokenizer_has_no_pad_token_has_a_padding(tmp_path):
    folder = build_fresh_model(tmp_path / "unpadded", ALPHABET, seed=0, **SHAPE)
    tokenizer = build_char_tokenizer(ALPHABET)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)
    made = prepared(folder)
    assert made.tokenizer.pad_token_id is None
    assert made.pad_id == made.tokenizer.eos_token_id


def test_nobody_asks_the_tokenizer_for_its_pad_token_directly():
    """It may be None, which only shows in the first micro-batch."""
    sources = Path(preflight.__file__).parent.rglob("*.py")
    assert not [str(p) for p in sources if "pad_token_id" in p.read_text()]
