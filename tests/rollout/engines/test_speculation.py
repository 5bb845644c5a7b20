"""Speculation: another model's proposals change neither the distribution of an actor's tokens nor
the log-probs in its records."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from engine_helpers import drain
from test_vllm_updates import LONG, check_spans, start_and_step

from rlcore.rollout.specs import SpeculateSpec
from rlcore.weights.stream import whole

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def proposer(model_a, tmp_path_factory) -> str:
    """The model with noise on its weights: some of its proposals are right."""
    folder = tmp_path_factory.mktemp("proposer")
    torch.manual_seed(0)
    hf = copy.deepcopy(model_a.hf)
    with torch.no_grad():
        for p in hf.parameters():
            p.add_(0.2 * p.std() * torch.randn_like(p) if p.ndim == 2 else 0.0)
    hf.save_pretrained(folder)
    from rlcore.models.text import load_tokenizer

    load_tokenizer(str(model_a.path)).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def speculating(start, model_a, proposer):
    return start(model_a, speculate=SpeculateSpec(path=proposer, tokens=3), max_num_seqs=128)


@pytest.fixture
def spec(speculating, model_a):
    """That engine on model A's weights as version 0."""
    assert not speculating.unfinished()
    speculating.update_weights(0, whole(model_a.tensors), "in_flight")
    return speculating


def counted(engine, asked):
    """Trajectories by sample, proposed tokens and accepted ones."""
    engine.add(asked)
    done, proposed, accepted = [], 0, 0
    while engine.unfinished():
        done += engine.step()
        load = engine.load_of_step()
        proposed, accepted = proposed + load.proposed, accepted + load.accepted
    return sorted(done, key=lambda t: (t.group_id, t.sample_index)), proposed, accepted


def test_greedy_tokens_and_log_probs_are_those_without_proposals(spec, engine, ask):
    settings = {"temperature": 0.0, "max_new_tokens": 40}
    mine, proposed, accepted = counted(spec, ask(12, **settings))
    plain, none, _ = counted(engine, ask(12, **settings))
    assert none == 0
    for t, other in zip(mine, plain, strict=True):
        assert t.sampled_ids.tolist() == other.sampled_ids.tolist()
        assert t.finish_reason == other.finish_reason
        np.testing.assert_allclose(t.logp_inf, other.logp_inf, atol=1e-5)
        np.testing.assert_allclose(t.topk_logp, other.topk_logp, atol=1e-5)
    assert 0.1 * proposed < accepted < 0.9 * proposed


def test_sampled_log_probs_are_the_model_s_at_every_setting(spec, model_a, ask):
    settings = [{}, {"temperature": 0.7}, {"top_p": 0.5}, {"top_k": 4, "temperature": 1.3}]
    asked = [
        r
        for i, changes in enumerate(settings)
        for r in ask(4, group=i, seed=100 * i, max_new_tokens=24, **changes)
    ]
    spec.add(asked)
    for t in drain(spec):
        own = settings[t.group_id]
        rows = model_a.logp(t, own.get("temperature", 1.0))
        if t.group_id < 2:
            top = -np.sort(-rows, 1)[:, :20]
            np.testing.assert_allclose(t.topk_logp, top, atol=1e-5)
        else:
            kept = np.zeros_like(rows, bool)
            np.put_along_axis(kept, np.maximum(t.topk_ids, 0), t.topk_ids >= 0, 1)
            assert kept.sum(1).max() < 20
            rows = np.where(kept, rows, -np.inf)
            rows -= np.logaddexp.reduce(rows, axis=1, keepdims=True)
        at = rows[np.arange(len(t.sampled_ids)), t.sampled_ids]
        np.testing.assert_allclose(t.logp_inf, at, atol=1e-5)


def test_tokens_are_distributed_as_the_model_s(spec, model_a, ask):
    """Given what came before it, each token's indicator minus its probability has mean 0."""
    prompt = [5, 9, 11, 4]
    done, proposed, accepted = counted(
        spec, ask(800, prompt=prompt, max_new_tokens=5, logprobs_k=0, temperature=0.5)
    )
    assert proposed > accepted > 250
    excess, variance = 0.0, 0.0
    for t in done:
        p = np.exp(model_a.logp(t, 0.5))
        drawn = np.eye(p.shape[1])[t.sampled_ids]
        excess, variance = excess + (drawn - p).sum(0), variance + (p * (1 - p)).sum(0)
    often = variance > 20
    z = excess[often] / np.sqrt(variance[often])
    assert often.sum() > 10 and np.abs(z).max() < 4.5, z


def test_seeds_decide_the_tokens_of_a_request_whatever_runs_beside_it(spec, ask):
    together, *_ = counted(spec, ask(16))
    alone = [counted(spec, [r])[0][0] for r in ask(16)[:4]]
    greedy = counted(spec, [*ask(4), *ask(4, group=1, temperature=0.0)])[0]
    for t, other in zip(alone, together, strict=False):
        assert t.sampled_ids.tolist() == other.sampled_ids.tolist()
    beside = [t for t in greedy if t.group_id == 0]
    for t, other in zip(beside, together, strict=False):
        assert t.sampled_ids.tolist() == other.sampled_ids.tolist()


@pytest.mark.parametrize("mode", ["in_flight", "abort", "finish"])
def test_tokens_match_the_version_they_carry(spec, model_a, model_b, ask, mode):
    done = start_and_step(spec, ask(24, prompt=LONG, max_new_tokens=60), 5)
    spec.update_weights(1, whole(model_b.tensors), mode)
    after = check_spans([*done, *drain(spec)], model_a, model_b)
    assert (after == 0) == (mode == "finish")


def test_answers_end_at_the_stop_string_or_the_length_as_without_proposals(
    spec, engine, model_a, ask
):
    """A step may give tokens beyond the end."""
    for settings in ({"stop": ("0", "b", "=", "n")}, {"max_new_tokens": 5}):
        asked = {"temperature": 0.0, "max_new_tokens": 40} | settings
        mine, *_ = counted(spec, ask(12, **asked))
        plain, *_ = counted(engine, ask(12, **asked))
        assert {len(t.sampled_ids) for t in mine} != {40}
        for t, other in zip(mine, plain, strict=True):
            assert t.sampled_ids.tolist() == other.sampled_ids.tolist()
            assert t.finish_reason == other.finish_reason


def test_answers_may_fill_the_context(spec, model_a, ask):
    """The last proposals would be beyond it."""
    (t,), *_ = counted(spec, ask(1, prompt=[9] * 240, max_new_tokens=16, temperature=0.0))
    assert len(t.sampled_ids) <= 16
    np.testing.assert_allclose(t.logp_inf, model_a.sampled(t), atol=1e-5)


@pytest.mark.slow
def test_a_rounded_policy_accepts_by_its_rounded_weights(start, model_a, proposer, ask):
    settings = {"kind": "fp8", "rounding": "fp8"}
    engines = [
        start(model_a, **settings, **more)
        for more in ({}, {"speculate": SpeculateSpec(path=proposer, tokens=2)})
    ]
    plain, mine = (counted(e, ask(8, temperature=0.0, max_new_tokens=40)) for e in engines)
    assert mine[2] > 0
    for t, other in zip(mine[0], plain[0], strict=True):
        assert t.sampled_ids.tolist() == other.sampled_ids.tolist()
        assert t.actor_kind == "fp8_emulated"
        np.testing.assert_allclose(t.logp_inf, other.logp_inf, atol=1e-5)
        assert np.abs(t.logp_inf - model_a.sampled(t)).max() > 1e-3


@pytest.mark.slow
def test_the_policy_itself_proposes_what_it_accepts_also_where_requests_are_preempted(
    start, model_a, ask
):
    own = SpeculateSpec(path=str(model_a.path), tokens=3)
    engine = start(model_a, speculate=own, kv_cache_gib=0.0012)  # three blocks of 128 tokens
    _, proposed, accepted = counted(engine, ask(8, temperature=0.0, max_new_tokens=40))
    assert accepted > 0.95 * proposed > 0
    scheduler = engine.core._core.engine_core.scheduler
    preempt, preempted = scheduler._preempt_request, []

    def counting(*args, **kwargs):
        preempted.append(args)
        return preempt(*args, **kwargs)

    scheduler._preempt_request = counting
    done, *_ = counted(engine, ask(16, prompt=[5, 9, 11, 4] * 30 + [7], max_new_tokens=100))
    assert len(preempted) > 3
    for t in done:
        np.testing.assert_allclose(t.logp_inf, model_a.sampled(t), atol=1e-5)
