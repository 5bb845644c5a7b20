"""A learner that rounds as its actors do: the pass of rounded weights, its gradient, and masters
that stay as they are."""

import math

import numpy as np
import pytest
import torch
from learner_helpers import on_ranks, small_model
from rounded_jobs import rounded_gradients, rounded_twice

from rlcore.corrections.numerics import ONE_RANK
from rlcore.errors import UserError
from rlcore.learner.parts.rounded import RoundedLayers
from rlcore.learner.policy import load_causal_lm
from rlcore.models.folder import read_weights
from rlcore.weights.rounding import round_weights
from rlcore.weights.specs import RoundingSpec

FORMATS = ("fp8", "int8", "int4", "int3", "mxfp4", "nvfp4")
SPECS = [RoundingSpec(rounding=kind) for kind in FORMATS]
SPECS += [RoundingSpec(rounding="fp8", scales=scales) for scales in ("channel", "block")]
SPECS += [RoundingSpec(rounding="int3", precise_layers=1)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("model"))


def _pass(lm):
    ids = torch.arange(24).view(3, 8) % 12
    logp = lm(ids).logits.log_softmax(-1)
    logp[..., 3].sum().backward()
    return logp.detach(), {n: p.grad for n, p in lm.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.rounding} {s.scales} {s.precise_layers}")
def test_the_pass_is_that_of_the_weights_an_actor_loads_and_the_gradient_goes_straight_through(
    model, spec
):
    plain = load_causal_lm(model, "float32", "sdpa")
    served = dict(plain.named_parameters())
    kept = (*spec.keep_high_precision, *((".layers.1.",) if spec.precise_layers else ()))
    rounded = round_weights(served, spec.model_copy(update={"keep_high_precision": kept}))
    lm = load_causal_lm(model, "float32", "sdpa")
    layers = RoundedLayers(lm, spec, model_path=model)
    with torch.no_grad():
        moved = [n for n, p in served.items() if not torch.equal(p, rounded[n])]
        error, size = (
            sum(float(t.double().square().sum()) for t in values)
            for values in ([served[n] - rounded[n] for n in moved], [served[n] for n in moved])
        )
        for name, p in served.items():
            p.copy_(rounded[name].detach())
    assert len(moved) == (7 if spec.precise_layers else 14)
    logp, gradients = _pass(lm)
    expected, of_rounded = _pass(plain)
    assert torch.equal(logp, expected)
    assert gradients.keys() == of_rounded.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, of_rounded[name], rtol=1e-6, atol=1e-7)
    measured = layers.metrics(ONE_RANK)["rounding/relative_error"]
    assert measured == pytest.approx(math.sqrt(error / size))
    for name, master in read_weights(model).items():  # what is trained and published
        assert torch.equal(dict(lm.named_parameters())[name], master)


def test_a_weight_that_only_the_actor_would_round_is_refused(tmp_path):
    path = small_model(tmp_path, tie=False)
    lm = load_causal_lm(path, "float32", "sdpa")
    spec = RoundingSpec(rounding="int4", keep_high_precision=("embed_tokens",))
    with pytest.raises(UserError, match=r"lm_head\.weight.*keep_high_precision"):
        RoundedLayers(lm, spec, model_path=path)


CASES = [("fp8", 0, {}), ("nvfp4", 0, {}), ("int3", 0, {})]


@pytest.mark.ranks
def test_zero_stages_round_whole_weights(model):
    """Also beside recomputed activations, a KL to the starting policy, which rounds alike, and
    passes that are kept."""
    reference = on_ranks(1, rounded_gradients, model, CASES)[0]
    beside = {
        1: {"activation_cache_mib": 1, "corrections": {"ais": {}}, "micro_batch_tokens": 30},
        2: {"gradient_checkpointing": True, "micro_batch_tokens": 30},
        3: {"kl_coef": 0.1, "micro_batch_tokens": 30},
    }
    cases = [(kind, stage, beside[stage]) for kind, _, _ in CASES for stage in beside]
    found = on_ranks(2, rounded_gradients, model, cases)[0]
    kept = on_ranks(1, rounded_gradients, model, [(k, 0, beside[1]) for k, _, _ in CASES])[0]
    for (kind, stage, _), (gradients, row) in zip(cases, found, strict=True):
        at = FORMATS_OF.index(kind)
        expected, its_row = kept[at] if stage == 1 else reference[at]
        for name, gradient in gradients.items():
            np.testing.assert_allclose(
                gradient, expected[name], atol=1e-5, err_msg=f"{kind} {stage}"
            )
        key = "rounding/relative_error"
        assert row[key] == pytest.approx(its_row[key]) and row[key] > 0.01
        if stage == 3:  # p_new is the starting policy, to the last bit that ZeRO leaves
            assert row["loss/kl"] == pytest.approx(0.0, abs=1e-9)


FORMATS_OF = [kind for kind, _, _ in CASES]


@pytest.mark.ranks
@pytest.mark.parametrize(("world", "stage"), [(1, 0), (2, 3)])
def test_a_rounded_run_resumes_to_the_bit_and_publishes_masters(model, tmp_path, world, stage):
    out = on_ranks(world, rounded_twice, model, "int3", stage, str(tmp_path / "state"))[0]
    assert out["again"] == out["rows"][1]
    for name, weight in out["weights"].items():
        np.testing.assert_array_equal(weight, out["weights again"][name], err_msg=name)
    master = {n: w.numpy() for n, w in read_weights(model).items()}
    for name, weight in out["started"].items():
        np.testing.assert_array_equal(weight, master[name], err_msg=name)
    name = "model.layers.0.mlp.up_proj.weight"
    assert 0 < np.abs(out["weights"][name] - master[name]).max() < 0.01
    assert len(np.unique(out["weights"][name])) > 100  # not on INT3's seven values
