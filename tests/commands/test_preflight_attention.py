"""What is refused before an evaluation starts."""

import json

import pytest

from rlcore.commands.model_checks import check_attention
from rlcore.config.compose import load
from rlcore.errors import UserError

RULE = {"block_size": 16, "blocks": 4, "share": None, "prompt": "sparse"}


def test_a_model_made_for_sparse_attention_is_evaluated_with_it_or_not_at_all(tmp_path):
    (tmp_path / "rlcore.json").write_text(json.dumps({"sparse": RULE}))

    def check(*overrides, path=tmp_path):
        check_attention(load(["run_dir=runs/x", f"model.path={path}", *overrides]))

    check("actor=sparse")
    check(path=tmp_path / "other")
    for dense in (
        [],
        ["actor=sparse", "actor.sparse.sparse.blocks=5"],
        ["actor=sparse", "evaluation.dense_actor=true"],
    ):
        said = r"model\.path=.* is made for sparse attention"
        with pytest.raises(UserError, match=said) as refusal:
            check(*dense)
        advice = str(refusal.value).partition("choose actor=sparse '")[2].removesuffix("'.")
        check("actor=sparse", advice)  # what it says to do is accepted


def test_a_folder_of_an_earlier_version_says_how_prompts_were_read(tmp_path):
    former = {k: v for k, v in RULE.items() if k != "prompt"} | {"sparse_prompt": False}
    (tmp_path / "rlcore.json").write_text(json.dumps({"sparse": former}))
    words = ["run_dir=x", f"model.path={tmp_path}", "actor=sparse"]
    check_attention(load([*words, "actor.sparse.sparse.prompt=dense"]))
    with pytest.raises(UserError, match="is made for sparse attention"):
        check_attention(load(words))
