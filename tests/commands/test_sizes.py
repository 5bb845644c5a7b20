"""Sizes of models, by headers and settings, and what is refused because of them."""

import json
import math
import re

import pytest

from rlcore.commands import memory, model_checks
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
        (MIXTURE, ["actor.bf16.activations=fp8"], "use activations=none"),
        (MIXTURE, ["actor.bf16.num_gpus=1"], "Set actor.bf16.num_gpus=0"),
        (MIXTURE, ["teacher=previous"], "not proven with teacher.kind=previous"),
        (MIXTURE, ["algorithm=ppo", "critic=model"], "not proven with critic.kind=model"),
        (MIXTURE, ["bitwise=true", "schedule=on_policy"], "not proven with bitwise=true"),
        (MIXTURE, ["actor.bf16.speculate={path: x}"], "not proven with actor.bf16.speculate"),
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


SHOWN = {
    "experts": [
        {"engine": "eager", "mean |dlogp| replayed": 0.02},
        {"engine": "updated in place", "checksums": "131 equal", "update s": 0.4},
        {"engine": "updated in place", "as a fresh engine": "16/16"},
        # far, but not farther than the learner's own rounding explains
        {"mean |dlogp| replayed": 0.09, "learner's to float32, replayed": 0.06},
    ],
    "experts graphs": [{"mean |dlogp| replayed": 0.02}, {"mean |dlogp| replayed": 0.03}],
}


def check_file(tmp_path, parts, device="H100", version="0.32.0"):
    """Rows of the GPU check, after those of another machine."""
    rows = [{"part": "machine", "device": "cpu"}, {"part": "experts", "what": "failed: time"}]
    rows.append({"part": "machine", "device": device, "vllm": version})
    rows += [{"part": part} | row for part, own in parts.items() for row in own]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [f"model.gpu_check={path}", "actor.bf16.num_gpus=1"]


@pytest.fixture
def with_vllm(monkeypatch):
    monkeypatch.setattr(model_checks, "vllm_version", lambda: "0.32.0")


def test_the_gpu_check_admits_a_mixture_on_gpus(tmp_path, with_vllm):
    words = check_file(tmp_path, SHOWN)
    check_experts(load(["run_dir=x", *words]), MIXTURE)
    with pytest.raises(UserError, match="engines of one GPU"):
        check_experts(load(["run_dir=x", *words, "actor.bf16.tensor_parallel=2"]), MIXTURE)
    only = check_file(tmp_path, {"experts": SHOWN["experts"]})
    check_experts(load(["run_dir=x", *only, "actor.bf16.enforce_eager=true"]), MIXTURE)


@pytest.mark.parametrize(
    ("part", "rows", "says"),
    [
        ("experts graphs", [], "no rows of part experts graphs on a GPU with vLLM 0.32.0"),
        ("experts", [{"what": "failed: CUDA error"}], "part experts failed: CUDA error"),
        ("experts", SHOWN["experts"][:3], "are missing"),
        ("experts", [*SHOWN["experts"], {"mean |dlogp| replayed": 0.07}], "are 0.07 apart"),
        ("experts", [*SHOWN["experts"], {"mean |dlogp| replayed": math.nan}], "are nan apart"),
        ("experts", [*SHOWN["experts"], {"mean |dlogp| replayed": None}], "are None apart"),
        ("experts", [*SHOWN["experts"], {"as a fresh engine": None}], "as a fresh one"),
        ("experts", [*SHOWN["experts"], {"as a fresh engine": "3/16"}], "as a fresh one"),
        ("experts", [SHOWN["experts"][0]] * 2, "as a fresh one"),
    ],
)
def test_a_check_that_has_not_shown_it_does_not(tmp_path, with_vllm, part, rows, says):
    words = check_file(tmp_path, SHOWN | {part: rows})
    with pytest.raises(UserError, match=re.escape(says)):
        check_experts(load(["run_dir=x", *words]), MIXTURE)


def test_a_check_of_a_cpu_or_of_another_vllm_shows_nothing(tmp_path, with_vllm):
    for where in ({"device": "cpu"}, {"version": "0.26.0"}):
        words = check_file(tmp_path, SHOWN, **where)
        with pytest.raises(UserError, match=r"no rows of part experts on a GPU with vLLM 0\.32"):
            check_experts(load(["run_dir=x", *words]), MIXTURE)
    (tmp_path / "other").write_text("[1]\n")
    for name, says in (("none", "cannot be read"), ("other", "are not rows")):
        words = [f"model.gpu_check={tmp_path / name}", "actor.bf16.num_gpus=1"]
        with pytest.raises(UserError, match=says):
            check_experts(load(["run_dir=x", *words]), MIXTURE)


def test_dense_models_are_not():
    check_dense({"num_experts_per_tok": 2, "num_experts": 1, "n_head": 4}, whose="model.path=m")
    check_dense({"num_experts": None, "n_routed_experts": 0}, whose="model.path=m")
