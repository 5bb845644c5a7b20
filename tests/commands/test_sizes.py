"""Sizes of models, by headers and settings, and what is refused because of them."""

import json
import re

import pytest

from rlcore.commands import memory
from rlcore.commands.model_checks import check_dense, check_experts
from rlcore.config.compose import load
from rlcore.errors import UserError
from rlcore.models.fresh import build_char_tokenizer, build_fresh_model
from rlcore.models.specs import FreshModelSpec

ALPHABET = "0123456789= "
TOKENIZER = build_char_tokenizer(ALPHABET)


@pytest.mark.parametrize(
    "spec",
    [
        FreshModelSpec(),
        FreshModelSpec(hidden_size=96, layers=3, heads=3, kv_heads=1, vocab_size=64),
        FreshModelSpec(tie_embeddings=False, layers=1),
    ],
    ids=["default", "small", "untied"],
)
def test_parameters_are_those_of_the_model_that_is_made(tmp_path, spec):
    folder = build_fresh_model(tmp_path / "model", ALPHABET, spec, seed=0, max_len=64)
    assert memory.folder_parameters(str(folder)) == memory.fresh_parameters(spec, len(TOKENIZER))


def published(*words):
    return memory.published_bytes(load(["run_dir=x", *words]), TOKENIZER)


def test_a_publication_holds_every_set_of_weights():
    policy = published()
    assert published("actor.bf16.num_gpus=1") == policy // 2  # bfloat16
    assert published("actor=sparse", "learner.distill={}") == 2 * policy
    alone, beside = published("experiment=draft_frozen"), published("experiment=draft_cotrain")
    draft = load(["run_dir=x", "experiment=draft_cotrain"]).actor["draft"].draft_fresh
    assert beside - alone == 4 * memory.fresh_parameters(draft, len(TOKENIZER))


@pytest.mark.parametrize("heads", [2, 4])
def test_an_adapter_that_is_published_alone_is_all_that_is_sent(tmp_path, heads):
    lora = "learner.lora={rank:4,publish:adapter}"
    shape = ("model.fresh.kv_heads=2", f"model.fresh.heads={heads}")
    spec = load(["run_dir=x", *shape]).model.fresh
    folder = build_fresh_model(tmp_path / "model", ALPHABET, spec, seed=0, max_len=64)
    shapes = memory.read_shapes(folder)
    adapted = [s for n, s in shapes.items() if "_proj." in n]
    expected = 4 * sum(4 * (rows + columns) for rows, columns in adapted)
    assert published(lora, *shape) == expected
    assert published(lora, f"model.path={folder}") == expected
    assert {n: shapes[n] for n in memory.linear_shapes(spec)} == memory.linear_shapes(spec)
    sparse = published("actor=sparse", "learner.distill={lora:{rank:4,publish:adapter}}", *shape)
    assert sparse == published(*shape) + expected


def test_only_the_object_store_must_hold_it():
    def stored(*words):
        return memory.stored_bytes(load(["run_dir=x", *words]), TOKENIZER)

    assert stored() == published()
    assert stored("cluster.transport=disk") == stored("cluster.transport=gloo") == 0


@pytest.mark.parametrize(
    "config",
    [
        {"num_local_experts": 8, "num_experts_per_tok": 2},
        {"num_experts": 128, "num_experts_per_tok": 8},
        {"n_routed_experts": 256},
        {"text_config": {"num_local_experts": 16}},
        {"ffn_config": {"moe_num_experts": 16}},
    ],
    ids=json.dumps,
)
def test_drafts_that_are_mixtures_of_experts_are_refused(config):
    with pytest.raises(UserError, match=r"^model\.path=m is a mixture of experts \(.*=\d+\)"):
        check_dense(config, whose="model.path=m")


MIXTURE = {"model_type": "qwen3_moe", "num_experts": 4}


@pytest.mark.parametrize(
    ("model", "words", "says"),
    [
        ({"model_type": "mixtral", "num_local_experts": 8}, [], "of model_type=mixtral"),
        ({"num_experts": 8}, [], "of model_type=None"),
        (MIXTURE, ["learner.lora={rank: 4}"], "set learner.lora=null"),
        ({}, ["learner.ranks=2", "learner.expert_parallel=2"], "learner.expert_parallel=2"),
        (MIXTURE, ["actor=fp8"], "choose actor=bf16"),
        (MIXTURE, ["actor=sparse"], "choose actor=bf16"),
        (MIXTURE, ["actor.bf16.rounding=int8"], "with kind=bf16 and rounding=int8"),
        (MIXTURE, ["actor.bf16.num_gpus=1"], "Set actor.bf16.num_gpus=0"),
        (MIXTURE, ["teacher=previous"], "not proven with teacher.kind=previous"),
        (MIXTURE, ["algorithm=ppo", "critic=model"], "not proven with critic.kind=model"),
        (MIXTURE, ["bitwise=true", "schedule=on_policy"], "not proven with bitwise=true"),
    ],
)
def test_what_does_not_go_with_a_mixture_of_experts_is_refused(model, words, says):
    config = load(["run_dir=x", *words])
    with pytest.raises(UserError, match=re.escape(says)):
        check_experts(config, model)


def test_a_known_mixture_of_experts_is_accepted_as_the_policy():
    check_experts(load(["run_dir=x"]), MIXTURE)
    check_experts(load(["run_dir=x", "actor.bf16.tensor_parallel=2"]), MIXTURE)
    check_experts(load(["run_dir=x", "learner.lora={rank: 4}", "actor=fp8"]), {"num_experts": 1})


def test_dense_models_are_not():
    check_dense({"num_experts_per_tok": 2, "num_experts": 1, "n_head": 4}, whose="model.path=m")
    check_dense({"num_experts": None, "n_routed_experts": 0}, whose="model.path=m")
