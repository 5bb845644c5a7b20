"""The diffusion engine: seeds decide a response and nothing else does, log-probs are those of its
estimate, and weights change between two steps with proof of arrival."""

import numpy as np
import pytest
import torch
from masked_models import drawn, masked_engine, masked_requests, sharp_folder
from transformers import AutoModelForCausalLM

from rlcore.extras.diffusion.engine import Denoising
from rlcore.extras.diffusion.estimates import Estimate
from rlcore.models.folder import read_weights
from rlcore.models.specs import DiffusionSpec
from rlcore.rollout.request_book import CoreRequest
from rlcore.testing.records import make_sampling
from rlcore.weights.manifest import tensor_checksum
from rlcore.weights.rounding import round_tensor
from rlcore.weights.stream import whole

MASK, END, TURN_END = 99, 1, 4


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return sharp_folder(tmp_path_factory.mktemp("masked"))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return read_weights(sharp_folder(tmp_path_factory.mktemp("other"), seed=1))


def denoising(canvas=8, **spec):
    ends = (END, TURN_END)
    request = CoreRequest("r", [5, 6], 2, make_sampling(), max_tokens=canvas, seed=3, stop_ids=ends)
    return Denoising(request, DiffusionSpec(**spec), mask_id=MASK)


def test_blocks_are_denoised_from_the_left_two_most_confident_tokens_a_step():
    d, steps = denoising(block=4), []
    while d.finish is None:
        places = d.places()
        steps.append(places.tolist())
        assert len(d.uniforms()) == len(places)
        # the last position of a block is the most confident
        d.take(10 + places, places.astype(np.float32))
    assert steps == [[2, 3, 4, 5], [2, 3], [6, 7, 8, 9], [6, 7]]
    assert d.finish == "length" and d.response().tolist() == [12, 13, 14, 15, 16, 17, 18, 19]


def test_a_response_takes_half_as_many_steps_as_tokens_with_the_paper_s_settings():
    d, steps = denoising(canvas=64), 0
    while d.finish is None:
        places = d.places()
        d.take(np.full(len(places), 7), np.zeros(len(places)))
        steps += 1
    assert steps == 32


@pytest.mark.parametrize("end", [END, TURN_END])
def test_a_response_ends_at_its_first_end_id_once_the_block_is_whole(end):
    d = denoising(block=4)
    d.take(np.array([end, end, 7, 8]), np.array([0.0, 0.9, 0.0, 0.8]))
    assert d.finish is None and d.ids[2:6].tolist() == [MASK, end, MASK, 8]
    d.take(np.array([5, 6]), np.zeros(2))
    assert d.finish == "stop" and d.response().tolist() == [5, end]


def test_a_response_depends_on_its_seed_and_on_no_other_request(model):
    together = drawn(masked_engine(model), masked_requests(12))
    apart = drawn(masked_engine(model, max_num_seqs=1), masked_requests(12)[::-1])
    small = drawn(masked_engine(model, max_batched_tokens=64), masked_requests(12))
    for a, b, c in zip(together, apart, small):
        assert a.token_ids.tolist() == b.token_ids.tolist() == c.token_ids.tolist()
        np.testing.assert_allclose(a.logp_inf, b.logp_inf, atol=1e-5)
        np.testing.assert_allclose(a.logp_inf, c.logp_inf, atol=1e-5)
    assert len({tuple(t.sampled_ids) for t in together}) > 6


def test_log_probs_are_of_one_pass_over_the_masks_that_the_record_carries(model):
    lm = AutoModelForCausalLM.from_pretrained(model)
    hidden = 0
    for t in drawn(masked_engine(model), masked_requests(6, temperature=0.7)):
        estimate = Estimate.of_record(t)
        hidden += int(estimate.prompt_mask.sum())
        assert estimate.canvas == 10 and len(estimate.prompt_mask) == len(t.prompt_ids)
        inputs = torch.from_numpy(estimate.inputs(t.prompt_ids, 14))[None]
        with torch.no_grad():
            logp = (lm(inputs).logits[0, len(t.prompt_ids) :] / 0.7).log_softmax(-1)
        picked = logp[torch.arange(len(t.sampled_ids)), torch.from_numpy(t.sampled_ids).long()]
        np.testing.assert_allclose(t.logp_inf, picked.numpy(), atol=1e-5)
    assert hidden > 0


def test_a_greedy_response_has_no_log_probs_and_no_chance(model):
    greedy = {"temperature": 0.0, "logprobs_k": -1}
    one, two = (drawn(masked_engine(model), masked_requests(3, **greedy)) for _ in range(2))
    assert [t.token_ids.tolist() for t in one] == [t.token_ids.tolist() for t in two]
    assert all(np.isnan(t.logp_inf).all() for t in one)
    assert all(14 not in t.sampled_ids for t in one)


def test_draws_follow_the_distribution(model):
    engine = masked_engine(model)
    lm = AutoModelForCausalLM.from_pretrained(model)
    states = torch.randn(1, 32).expand(20_000, -1) * 0.3
    uniforms = np.random.default_rng(0).random(20_000)
    tokens, sure = engine.core._model.candidates(states, np.full(20_000, 0.5), uniforms)
    logits = states[0] @ lm.get_output_embeddings().weight.detach().t()
    logits[14] = -torch.inf
    found = np.bincount(tokens, minlength=15) / 20_000
    np.testing.assert_allclose(found, (logits / 0.5).softmax(-1).numpy(), atol=0.015)
    np.testing.assert_allclose(sure, logits.softmax(-1).numpy()[tokens], atol=1e-5)


@pytest.mark.parametrize("how", ["finish", "abort"])
def test_a_response_is_of_one_version(model, other, how):
    engine = masked_engine(model)
    engine.add(masked_requests(3))
    first = engine.step()
    assert not first and engine.running() == 3
    engine.update_weights(4, whole(other), how)
    done = []
    while engine.unfinished():
        done += engine.step()
    versions = {v for t in done for v in t.token_version.tolist()}
    assert versions == ({0} if how == "finish" else {4})
    # begun anew, a response is what it would have been
    fresh = masked_engine(model)
    if how == "abort":
        fresh.update_weights(4, whole(other), "finish")
    again = drawn(fresh, masked_requests(3))
    for t, same in zip(sorted(done, key=lambda t: t.sample_index), again):
        assert t.token_ids.tolist() == same.token_ids.tolist()


def test_a_response_never_changes_versions_in_flight(model, other):
    engine = masked_engine(model)
    engine.add(masked_requests(1))
    engine.step()
    with pytest.raises(ValueError, match="in_flight"):
        engine.update_weights(1, whole(other), "in_flight")


@pytest.mark.parametrize("rounding", ["none", "fp8", "int4", "int3"])
def test_weights_arrive_rounded_and_proven(model, other, rounding):
    engine = masked_engine(model, kind="fp8" if rounding != "none" else "bf16", rounding=rounding)
    engine.update_weights(1, whole(other), "finish")
    proofs = engine.checksums(other)
    assert proofs == {n: tensor_checksum(t) for n, t in other.items()}
    held = engine._weights._weights
    name = "model.transformer.blocks.1.ff_out.weight"
    expected = round_tensor(other[name], rounding, "tensor")
    assert torch.equal(held[name], expected)
    for kept in ("model.transformer.wte.weight", "model.transformer.ff_out.weight"):
        assert torch.equal(held[kept], other[kept])
    held[name][0, 0] += 1
    assert engine.checksums([name])[name] != proofs[name]


def test_weights_of_another_model_are_refused_and_change_nothing(model, other):
    engine = masked_engine(model)
    before = engine.checksums(other)
    short = {n: t for n, t in other.items() if "ln_f" not in n}
    with pytest.raises(ValueError, match=r"ln_f\.weight is missing"):
        engine.update_weights(1, whole(short), "finish")
    assert engine.checksums(other) == before and engine.version == 0


@pytest.mark.parametrize("sampling", [{"top_p": 0.9}, {"logprobs_k": 5}, {"stop": ("=",)}])
def test_what_has_no_meaning_here_is_refused(model, sampling):
    with pytest.raises(ValueError):
        masked_engine(model).add(masked_requests(1, **sampling))


def test_cut_requests_begin_anew_elsewhere(model):
    engine = masked_engine(model)
    engine.add(masked_requests(2))
    engine.step()
    cut = engine.cut(["train:0:0"])
    assert [len(t.logp_inf) for t in cut] == [0]
    elsewhere = masked_engine(model)
    elsewhere.add(masked_requests(1), cut)
    (t,) = drawn(elsewhere, [])
    assert (
        t.token_ids.tolist()
        == drawn(masked_engine(model), masked_requests(1))[0].token_ids.tolist()
    )
