"""Which layers are divided among ranks, and the models that are refused."""

from types import SimpleNamespace

import pytest
import torch
from learner_helpers import small_model
from tiny_mixture import tiny_mixture

from rlcore.errors import UserError
from rlcore.learner.engines.model_parallel import TensorParts, check_layers
from rlcore.learner.policy import load_causal_lm


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    sizes = {"heads": 4, "kv_heads": 2, "intermediate_size": 64}
    return load_causal_lm(small_model(tmp_path_factory.mktemp("m"), **sizes), "float32", "sdpa")


def test_heads_and_widths_say_which_numbers_of_ranks_there_may_be(lm):
    check_layers(lm, 2)
    with pytest.raises(UserError, match=r"tensor_parallel=4 .*4 heads, 2 key heads.*of: 1, 2\."):
        check_layers(lm, 4)


def _renamed(lm, old, new):
    named = [(n.replace(old, new), p) for n, p in lm.named_parameters()]
    return SimpleNamespace(config=lm.config, named_parameters=lambda: named)


@pytest.mark.parametrize(
    ("old", "new"),
    [("up_proj", "gate_up_proj"), ("q_norm", "sinks"), ("mlp.down_proj", "mlp.experts.down")],
)
def test_a_layer_that_is_not_known_is_named(lm, old, new):
    name = next(n for n, _ in lm.named_parameters() if old in n).replace(old, new)
    with pytest.raises(UserError, match="how to divide " + name.replace(".", r"\.")):
        check_layers(_renamed(lm, old, new), 2)


def test_experts_and_norms_over_all_heads_are_refused(lm, tmp_path):
    with pytest.raises(UserError, match=r"tensor_parallel=2 .*mlp\.(experts|gate)"):
        check_layers(tiny_mixture(tmp_path, "0123", seed=0), 2)
    wide = [(n, torch.ones(64) if "q_norm" in n else p) for n, p in lm.named_parameters()]
    with pytest.raises(UserError, match=r"how to divide .*q_norm"):
        check_layers(SimpleNamespace(config=lm.config, named_parameters=lambda: wide), 2)


def test_parts_of_a_matrix_are_of_its_outputs_or_inputs():
    parts = TensorParts.__new__(TensorParts)
    rows, columns, norm = (torch.nn.Parameter(torch.ones(2, 3)) for _ in range(3))
    parts.count, parts.index, parts._dims = 2, 1, {rows: 0, columns: 1}
    assert parts.shape(rows) == (4, 3) and parts.shape(columns) == (2, 6)
    assert parts.shape(norm) == (2, 3)
    whole = torch.arange(12.0)
    (its, own), *_ = parts.own(rows, whole.view(4, 3))
    assert its is rows and own.tolist() == [[6, 7, 8], [9, 10, 11]]
    assert parts.own(columns, whole.view(2, 6))[0][1].tolist() == [[3, 4, 5], [9, 10, 11]]
    squares = parts.squares(iter([(rows, rows * 2), (norm, norm)]), all_held=True)
    assert squares.item() == 4 * 6 + 6 / 2
