"""Which files of a folder are its model's weights."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from rlcore.errors import UserError
from rlcore.models.folder import INDEX_FILE, read_config, read_shapes, read_weights, weight_files


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 8}))
    # the same weights under the names of another program, as some folders have them
    save_file({"tok_embeddings.weight": torch.ones(8, 2)}, tmp_path / "consolidated.safetensors")
    save_file({"lora_A": torch.ones(2)}, tmp_path / "adapter_model.safetensors")
    return tmp_path


def save_shards(folder):
    shards = {"model-00001-of-00002.safetensors": "a", "model-00002-of-00002.safetensors": "b"}
    for file, name in shards.items():
        save_file({name: torch.ones(3)}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, name in shards.items()}}
    (folder / INDEX_FILE).write_text(json.dumps(index))
    return list(shards)


def test_one_file_beside_strays(folder):
    save_file({"model.embed_tokens.weight": torch.ones(8, 2)}, folder / "model.safetensors")
    assert [f.name for f in weight_files(folder)] == ["model.safetensors"]
    assert read_shapes(folder) == {"model.embed_tokens.weight": (8, 2)}
    assert list(read_weights(folder)) == ["model.embed_tokens.weight"]


def test_the_files_of_an_index_beside_strays(folder):
    shards = save_shards(folder)
    assert [f.name for f in weight_files(folder)] == shards
    assert read_shapes(folder) == {"a": (3,), "b": (3,)}
    assert set(read_weights(folder)) == {"a", "b"}


def test_strays_alone_are_no_model(folder):
    with pytest.raises(UserError, match=r"draft=.* holds no \.safetensors file of weights"):
        weight_files(folder, key="draft")


def test_an_incomplete_or_damaged_set_of_files_is_named(folder):
    missing = save_shards(folder)[1]
    (folder / missing).unlink()
    with pytest.raises(UserError, match=f"lacks {missing}"):
        weight_files(folder)
    (folder / INDEX_FILE).write_text("{}")
    with pytest.raises(UserError, match="unreadable"):
        weight_files(folder)


def test_a_tied_head_is_read_once(folder):
    (folder / "config.json").write_text(json.dumps({"vocab_size": 8, "tie_word_embeddings": True}))
    save_file({"lm_head.weight": torch.ones(8, 2)}, folder / "model.safetensors")
    assert read_shapes(folder) == {} and read_weights(folder) == {}


def test_a_folder_without_a_vocabulary_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"model\.path=.* holds no config\.json: "):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"with a vocab_size \(KeyError\)"):
        read_config(tmp_path)
