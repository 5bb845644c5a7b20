"""An export holds the files of the model's folder that training does not change, byte for byte, so
that whatever loads the published model loads the export."""

import json
import os
import subprocess
import sys
from pathlib import Path

import distill_jobs
import pytest
import torch
from learner_helpers import make_groups, make_job, on_ranks
from lora_jobs import LORA
from published_layouts import LAYOUTS, build_layout
from rank_jobs import learner, share
from safetensors.torch import load_file, save_file
from timing import deadline
from transformers import AutoModelForCausalLM

from rlcore.learner.exporting import export_stored, write_model
from rlcore.models.carried import carried_files, complete_tokenizer, copy_files
from rlcore.models.folder import read_dtypes, read_weights
from rlcore.models.specs import TemplateSpec
from rlcore.models.text import encode_prompt, load_tokenizer

ASKED = [{"role": "user", "content": "hello <|im_end|> a é"}]
OLD = ("transformers==4.56.2", "tokenizers==0.22.1", "huggingface_hub==0.36.0")
# prints what transformers 4.56 makes of each folder, one JSON line each
READ_BY_OLD = """
import json, sys
import torch, transformers
assert transformers.__version__.startswith("4.56")
from transformers import AutoModelForCausalLM, AutoTokenizer
for folder in sys.argv[1:]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    lm = AutoModelForCausalLM.from_pretrained(folder)
    asked = [{"role": "user", "content": "hello a \\u00e9"}]
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True)
    with torch.no_grad():
        logits = lm(torch.tensor([ids])).logits[0, -1]
    named = {name: str(value) for name, value in tokenizer.special_tokens_map.items()}
    ends = lm.generation_config.eos_token_id
    print(json.dumps([ids, tokenizer.chat_template, named, ends, logits.tolist()]))
"""


def _exported(source: Path, out: Path) -> Path:
    write_model(out, read_weights(source), str(source))
    return out


def _same_files(source: Path, out: Path) -> None:
    carried = list(carried_files(source))
    names = {path.name for path in carried}
    assert "generation_config.json" in names and {"tokenizer.json", "tokenizer.model"} & names
    for path in carried:
        assert (out / path).read_bytes() == (source / path).read_bytes(), path


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_export_is_the_published_folder_with_other_weights(tmp_path, name):
    source = build_layout(name, tmp_path / "source")
    out = _exported(source, tmp_path / "out")
    _same_files(source, out)
    own = {"config.json", "model.safetensors"}
    files = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert files == own | {str(path) for path in carried_files(source)}
    before, after = (json.loads((f / "config.json").read_text()) for f in (source, out))
    assert after == {
        **before,
        **({"attention_dropout": 0.0} if "attention_dropout" in before else {}),
    }
    assert set(read_dtypes(out).values()) == {"BF16"}


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_export_reads_and_answers_as_the_published_folder(tmp_path, name):
    source = build_layout(name, tmp_path / "source")
    out = _exported(source, tmp_path / "out")
    theirs, ours = (load_tokenizer(folder) for folder in (source, out))
    assert ours.get_chat_template() == theirs.get_chat_template()
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.added_tokens_decoder == theirs.added_tokens_decoder
    ids = [encode_prompt(tokenizer, ASKED, TemplateSpec()) for tokenizer in (theirs, ours)]
    assert ids[0] == ids[1] and len(ids[0]) > 8
    models = (AutoModelForCausalLM.from_pretrained(f).eval() for f in (source, out))
    with torch.no_grad():
        logits = [lm(torch.tensor([ids[0]])).logits for lm in models]
    assert torch.equal(*logits)


def test_weights_of_other_formats_and_of_other_models_are_not_carried(tmp_path):
    source = build_layout("llama3", tmp_path / "source")
    (source / "adapter").mkdir()
    (source / "adapter" / "adapter_config.json").write_text("{}")
    (source / "adapter" / "adapter_model.safetensors").write_bytes(b"")
    (source / "learner").mkdir()
    for name in ("learner/state.safetensors", "learner/index.json", "pytorch_model.bin", "q.gguf"):
        (source / name).write_bytes(b"")
    (source / "rlcore.json").write_text("{}")
    (source / "training_args.json").write_text("{}")
    found = {str(path) for path in carried_files(source)}
    assert {"training_args.json", "original/params.json", "original/tokenizer.model"} <= found
    odd = ("adapter", "learner", "q.gguf", "pytorch", "rlcore.json", "config.json", ".cache")
    assert not [path for path in found if path.startswith(odd)]
    assert not [path for path in found if path.endswith((".pth", ".index.json"))]


def test_links_of_a_hub_s_cache_are_exported_as_the_files_behind_them(tmp_path):
    build_layout("llama3", tmp_path / "blobs")
    (tmp_path / "blobs" / "code").mkdir()
    (tmp_path / "blobs" / "code" / "own.py").write_text("x = 1")
    source = tmp_path / "snapshots" / "abc"
    source.mkdir(parents=True)
    for path in (tmp_path / "blobs").iterdir():
        (source / path.name).symlink_to(f"../../blobs/{path.name}")
    (source / "lost.json").symlink_to("../../blobs/lost.json")
    (source / "self").symlink_to(".")
    out = _exported(source, tmp_path / "out")
    _same_files(source, out)
    assert (out / "code" / "own.py").read_text() == "x = 1"
    assert not any(path.is_symlink() for path in out.rglob("*"))
    assert not (out / "self").exists() and not (out / "lost.json").exists()


def test_an_export_inside_its_source_does_not_hold_itself(tmp_path):
    source = build_layout("qwen2.5", tmp_path / "source")
    out = _exported(source, source / "exports" / "one")
    copy_files(source, out)
    assert not (out / "exports").exists()


def test_each_weight_keeps_its_format_unless_another_is_asked_for(tmp_path):
    source = build_layout("qwen3", tmp_path / "source")
    weights = read_weights(source)
    norm = "model.norm.weight"
    write_model(tmp_path / "mixed", {**weights, norm: weights[norm].float()}, str(source))
    assert set(read_dtypes(tmp_path / "mixed").values()) == {"BF16"}
    (source / "model.safetensors.index.json").unlink()
    save_file({**weights, norm: weights[norm].float()}, source / "model.safetensors")
    wide = {name: weight.float() for name, weight in weights.items()}
    write_model(tmp_path / "kept", {**wide, "extra.weight": torch.ones(2)}, str(source))
    kept = read_dtypes(tmp_path / "kept")
    assert kept[norm] == "F32" and {d for n, d in kept.items() if n != norm} == {"BF16"}
    write_model(tmp_path / "asked", wide, str(source), "float16")
    assert set(read_dtypes(tmp_path / "asked").values()) == {"F16"}
    assert json.loads((tmp_path / "asked" / "config.json").read_text())["torch_dtype"] == "float16"


def test_a_draft_without_a_tokenizer_gets_that_of_its_model(tmp_path):
    source = build_layout("gemma3", tmp_path / "source")
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "config.json").write_text("{}")
    complete_tokenizer(tmp_path / "draft", source)
    assert len(load_tokenizer(source)) == len(load_tokenizer(tmp_path / "draft"))
    assert not (tmp_path / "draft" / "LICENSE").exists()
    (tmp_path / "draft" / "tokenizer.json").write_text("its own")
    complete_tokenizer(tmp_path / "draft", source)
    assert (tmp_path / "draft" / "tokenizer.json").read_text() == "its own"


JOBS = {
    "qwen2.5": {"lora": LORA, "dtype": "float32"},
    "qwen3": {"sparse": distill_jobs.RULE, "distill": distill_jobs.distill("k3")},
    "llama3": {"dtype": "bfloat16", "zero_stage": 2},
    "gemma3": {"dtype": "float32"},
    "smollm2": {"dtype": "float32"},
}


def _train_and_save(rank, world, port, folder):
    for name, options in JOBS.items():
        one = learner(rank, world, port, f"{folder}/{name}/source", **options)
        one.begin_phase([share(make_groups(3), rank, world)])
        one.train_step(0)
        one.save(Path(folder) / name / "state")
        one.export(Path(folder) / name / "ranks")


@pytest.mark.ranks
def test_trained_layouts_are_exported_with_all_files_and_the_format_of_the_source(tmp_path):
    for name in JOBS:
        build_layout(name, tmp_path / name / "source")
    on_ranks(1, _train_and_save, str(tmp_path))
    for name, options in JOBS.items():
        folder = tmp_path / name
        job = make_job(str(folder / "source"), **options)
        export_stored(job, folder / "state", folder / "files")
        export_stored(job, folder / "state", folder / "wide", "float32")
        parts = ["", "sparse"] if "sparse" in options else [""]
        for out in (folder / side / part for side in ("files", "ranks") for part in parts):
            _same_files(folder / "source", out)
            assert set(read_dtypes(out).values()) == {"BF16"}, out
        theirs, ours, wide = (
            load_file(folder / side / "model.safetensors") for side in ("ranks", "files", "wide")
        )
        assert ours.keys() == theirs.keys() == read_dtypes(folder / "source").keys()
        assert all(torch.equal(theirs[n], ours[n]) for n in ours), name
        assert all(torch.equal(wide[n].bfloat16(), ours[n]) for n in ours), name
        assert any(not torch.equal(wide[n], ours[n].float()) for n in ours), name


@pytest.fixture(scope="module")
def old_transformers(tmp_path_factory):
    """A folder with transformers 4.56 and what it cannot share with this environment; it is kept
    in RLCORE_OLD_TRANSFORMERS, where that is set."""
    kept = os.environ.get("RLCORE_OLD_TRANSFORMERS")
    folder = Path(kept) if kept else tmp_path_factory.mktemp("old")
    if not (folder / "transformers").is_dir():
        words = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
        try:
            subprocess.run([*words, *OLD], check=True, timeout=deadline(300.0), capture_output=True)
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"{OLD[0]} cannot be installed beside this environment: {error}")
    return folder


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_transformers_4_reads_exports_as_it_reads_the_published_folders(tmp_path, old_transformers):
    folders = []
    for name in LAYOUTS:
        source = build_layout(name, tmp_path / name / "source")
        folders += [source, _exported(source, tmp_path / name / "out")]
    done = subprocess.run(
        [sys.executable, "-c", READ_BY_OLD, *map(str, folders)],
        env={**os.environ, "PYTHONPATH": str(old_transformers), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=deadline(300.0),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    read = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(read) == 2 * len(LAYOUTS)
    for name, theirs, ours in zip(LAYOUTS, read[::2], read[1::2]):
        assert ours == theirs, name
