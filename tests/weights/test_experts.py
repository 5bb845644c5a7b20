"""Names of a mixture of experts' weights, between transformers, folders and vLLM."""

import pytest
import torch
from tiny_mixture import tiny_mixture

from rlcore.models.folder import read_weights
from rlcore.weights.experts import as_held, engine_place, in_engine, single_shapes, singles


def test_stacked_weights_come_apart_into_those_of_the_folder(tmp_path):
    lm = tiny_mixture(tmp_path, "0123456789", seed=1)
    found = {n: t for name, p in lm.named_parameters() for n, t in singles(name, p.detach())}
    written = read_weights(tmp_path)
    assert found.keys() == written.keys()
    assert all(torch.equal(found[n], written[n]) for n in written)
    assert sum(".experts." in n for n in found) == 2 * 4 * 3  # layers, experts, matrices


def test_shapes_are_those_of_the_parts():
    stacked = torch.randn(3, 10, 4)
    for name in ("m.layers.0.mlp.experts.gate_up_proj", "m.layers.0.mlp.experts.down_proj"):
        shapes = single_shapes(name, tuple(stacked.shape))
        assert shapes == {n: tuple(t.shape) for n, t in singles(name, stacked)}
    assert single_shapes("m.layers.0.mlp.gate_up_proj.weight", (8, 4)) == {
        "m.layers.0.mlp.gate_up_proj.weight": (8, 4)
    }


def test_every_expert_has_a_place_of_its_own_in_the_engine():
    layer = "m.layers.0.mlp.experts"
    w13, w2 = torch.randn(3, 10, 4), torch.randn(3, 4, 5)
    held = {f"{layer}.routed_experts.w13_weight": w13, f"{layer}.routed_experts.w2_weight": w2}
    for stacked, source in (("gate_up_proj", w13), ("down_proj", w2)):
        for name, expected in singles(f"{layer}.{stacked}", source):
            place = engine_place(name)
            assert place is not None
            assert torch.equal(in_engine(place, held[place.parameter]), expected)


@pytest.mark.parametrize(
    "name", ["m.layers.0.mlp.gate_proj.weight", "m.layers.0.mlp.gate.weight", "lm_head.weight"]
)
def test_other_weights_have_none(name):
    assert engine_place(name) is None


def test_what_a_loader_reports_is_named_as_it_is_held():
    held = "model.layers.0.mlp.experts.routed_experts.w13_weight"
    for reported in (held, held.replace(".routed_experts", "")):
        assert as_held(reported) == held
    for other in ("model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.gate.weight"):
        assert as_held(other) == other
