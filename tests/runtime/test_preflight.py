"""What is refused, and what is made, before any process is started: plain calls of `prepare`."""

from pathlib import Path

import pytest

from rlcore.config.compose import load
from rlcore.errors import UserError
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


def _file(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1 2", "answer": "#### 3"}\n')
    return rows


def _splits(rows, *, train=True, heldout=True):
    named = [f"task.args.train_path={rows if train else 'null'}"]
    return ["task=gsm8k", *named, *([f"task.args.heldout_path={rows}"] if heldout else [])]


OFF = ("evaluation.every=0", "evaluation.at_start=false")


@pytest.mark.parametrize(
    ("splits", "words", "how", "said"),
    [
        ({"train": False}, (), {}, ["task.name=gsm8k", "to train on", "task.args.train_path"]),
        ({"train": False}, (), {"evaluates": False}, ["task.name=gsm8k", "to train on"]),
        ({"heldout": False}, (), {}, ["task.name=gsm8k", "task.args.heldout_path", *OFF]),
        ({"heldout": False}, OFF[:1], {}, ["task.args.heldout_path"]),
        ({"heldout": False}, OFF[1:], {}, ["task.args.heldout_path"]),
        ({"heldout": False}, OFF, {"trains": False}, ["task.args.heldout_path"]),
    ],
)
def test_an_empty_split_that_would_be_read_is_refused(model, tmp_path, splits, words, how, said):
    with pytest.raises(UserError) as caught:
        prepared(model, *_splits(_file(tmp_path), **splits), *words, **how)
    assert not [part for part in said if part not in str(caught.value)], caught.value


def test_an_empty_split_that_nobody_reads_is_not_asked_for(model, tmp_path):
    rows = _file(tmp_path)
    assert prepared(model, *_splits(rows, heldout=False), *OFF).eval_prompts == {}
    assert list(prepared(model, *_splits(rows, train=False), trains=False).eval_prompts) == ["gsm8k"]
    prepared(model, *_splits(rows, heldout=False), evaluates=False)


def test_an_evaluation_task_is_refused_under_its_own_key(model, tmp_path):
    extra = f"evaluation.tasks.more={{name: gsm8k, args: {{train_path: {_file(tmp_path)}}}}}"
    with pytest.raises(UserError, match=r"evaluation\.tasks\.more\.args\.heldout_path"):
        prepared(model, extra)
    with pytest.raises(UserError, match=r"evaluation\.tasks\.more\.args\.digits"):
        prepared(model, "evaluation.tasks.more={name: arithmetic, args: {digits: 3}}")
