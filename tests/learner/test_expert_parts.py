"""Which models' experts are divided among ranks, and what a rank holds of them."""

import pytest
import torch
from learner_helpers import small_model
from tiny_mixture import tiny_mixture

from rlcore.errors import UserError
from rlcore.learner.engines.model_parallel import ExpertParts, autoep_config, check_experts
from rlcore.learner.policy import load_causal_lm


@pytest.fixture
def mixture(tmp_path):
    return tiny_mixture(tmp_path, "0123", seed=0)


def test_the_experts_say_which_numbers_of_ranks_there_may_be(mixture):
    check_experts(mixture, 4)
    with pytest.raises(UserError, match=r"expert_parallel=3 .*4 experts.*of: 1, 2, 4\."):
        check_experts(mixture, 3)


def test_other_models_are_refused(mixture, tmp_path):
    dense = load_causal_lm(small_model(tmp_path / "dense"), "float32", "sdpa")
    with pytest.raises(UserError, match=r"expert_parallel=2 .*qwen3_moe, not qwen3"):
        check_experts(dense, 2)
    mixture.model.layers[1].mlp = dense.model.layers[1].mlp
    with pytest.raises(UserError, match=r"expert_parallel=2 .*layers without experts"):
        check_experts(mixture, 2)


def test_the_router_does_as_the_model_does(mixture):
    mixture.config.norm_topk_prob = False
    given = autoep_config(mixture, 2)
    assert (given["route_norm"], given["top_k"], given["autoep_size"]) == (False, 2, 2)


def test_what_a_rank_holds_of_stacked_experts():
    parts = ExpertParts.__new__(ExpertParts)
    parts.count, parts.index, parts._pieces = 2, 1, {}
    held = {
        "mlp.router.gate.weight": torch.nn.Parameter(torch.ones(4, 3)),
        **{f"mlp.experts.{w}": torch.nn.Parameter(torch.ones(2, 2, 3)) for w in ("w1", "w3")},
        "mlp.experts.w2": torch.nn.Parameter(torch.ones(2, 3, 2)),
    }
    held = {f"l.{name}": p for name, p in held.items()}
    both, down = (parts._under(f"l.mlp.experts.{n}", held) for n in ("gate_up_proj", "down_proj"))
    router = parts._under("l.mlp.gate.weight", held)
    assert router is held["l.mlp.router.gate.weight"]
    assert parts.shape(both) == (4, 4, 3) and parts.shape(down) == (4, 3, 2)
    whole = torch.arange(48.0).view(4, 4, 3)
    (gate, gates), (up, ups) = parts.own(both, whole)
    assert gate is held["l.mlp.experts.w1"] and up is held["l.mlp.experts.w3"]
    assert torch.equal(gates, whole[2:, :2]) and torch.equal(ups, whole[2:, 2:])
    parts._divided = {gate, up, held["l.mlp.experts.w2"]}
    pairs = [(gate, torch.ones(12)), (router, torch.ones(12))]
    assert parts.squares(iter(pairs), all_held=True).item() == 12 + 12 / 2
    assert parts.squares(iter(pairs), all_held=False).item() == 24
