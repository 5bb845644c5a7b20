"""Models before a start: sizes by headers and settings, attention, warm-up, and refusals because of
them."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any, cast

import pytest

from rlcore.commands import memory, model_checks
from rlcore.commands.model_checks import check_attention, check_dense, check_experts
from rlcore.commands.preflight import prepare
from rlcore.commands.warm_up import keep, kept_model, starting_model
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


# What is refused before an evaluation starts.


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


# A model that runs share is whole wherever it is seen, and the first one stays.


def _folder(path: Path, text: str) -> Path:
    path.mkdir(parents=True)
    (path / "weights").write_text(text)
    return path


def test_a_model_of_a_run_beside_this_one_stays(tmp_path: Path) -> None:
    kept = tmp_path / "digits-1"
    keep(_folder(tmp_path / ".a" / "made", "first"), kept)
    keep(_folder(tmp_path / ".b" / "made", "second"), kept)
    assert (kept / "weights").read_text() == "first"


def test_other_failures_are_raised(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        keep(tmp_path / "missing", tmp_path / "digits-1")


def test_a_folder_of_models_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    kept = f"model.warmup.cache_dir={tmp_path}/file/warm"
    config = load(["experiment=quickstart", f"run_dir={tmp_path}/x", kept])
    with pytest.raises(
        UserError, match=r"cache_dir=.*file/warm cannot be written: Not a directory"
    ):
        starting_model(config, cast(Any, None), print)


def test_a_warm_up_in_float64_is_another_model_than_one_in_float32(tmp_path: Path) -> None:
    words = ["experiment=quickstart", f"run_dir={tmp_path / 'run'}"]
    words += ["model.warmup.steps=2", "model.warmup.batch_size=4"]
    words += [f"model.warmup.cache_dir={tmp_path / 'kept'}"]
    exact = load([*words, "model.warmup.precision=float64"])
    noted: list[str] = []
    made = Path(starting_model(exact, prepare(exact), noted.append))
    assert kept_model(exact) == str(made) and kept_model(load(words)) is None
    assert any("worked answers in float64" in line for line in noted)
    assert {"model.safetensors", "tokenizer.json"} <= {file.name for file in made.iterdir()}
