"""A draft's start: some layers of a model, with its vocabulary."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlcore.errors import UserError
from rlcore.models.fresh import build_fresh_model, cut_model, spread
from rlcore.models.specs import FreshModelSpec


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    spec = FreshModelSpec(hidden_size=32, layers=5, heads=2, kv_heads=1, intermediate_size=32)
    folder = tmp_path_factory.mktemp("cut") / "whole"
    return build_fresh_model(folder, "0123456789", spec, seed=0, max_len=32)


def test_layers_are_spread_from_the_first_to_the_last():
    assert spread(30, 4) == [0, 10, 19, 29]
    assert spread(5, 4) == [0, 1, 3, 4] and spread(5, 1) == [0]


def test_a_cut_model_has_the_embeddings_and_the_chosen_layers(model, tmp_path):
    out = cut_model(model, tmp_path / "cut", 2)
    whole, cut = (
        AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32) for p in (model, out)
    )
    assert len(cut.model.layers) == 2
    assert torch.equal(cut.model.embed_tokens.weight, whole.model.embed_tokens.weight)
    assert torch.equal(cut.model.norm.weight, whole.model.norm.weight)
    for mine, theirs in zip(cut.model.layers, [whole.model.layers[0], whole.model.layers[4]]):
        for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(a, b)
    ids = AutoTokenizer.from_pretrained(out).encode("123")
    assert ids == AutoTokenizer.from_pretrained(model).encode("123")
    assert cut(torch.tensor([ids])).logits.shape[-1] == whole.config.vocab_size


@pytest.mark.parametrize("layers", [0, 5])
def test_a_number_of_layers_that_it_lacks_is_refused(model, tmp_path, layers):
    with pytest.raises(UserError, match="which has 5: give 1 to 4"):
        cut_model(model, tmp_path / "cut", layers)
