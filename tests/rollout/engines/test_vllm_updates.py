"""Weight updates between two decode steps: what samples which token, and that nothing of the old
weights stays."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from engine_helpers import build_model

from rlcore.types import PRECISE_LAYERS
from rlcore.weights.manifest import make_manifest, verify_checksums
from rlcore.weights.rounding import is_rounded, precise_patterns, round_weights
from rlcore.weights.specs import RoundingSpec
from rlcore.weights.stream import whole

pytestmark = pytest.mark.engine

# longer than a cache block of 128: the prefix cache is really in play
LONG = [3 + i % 20 for i in range(140)]


def check_spans(trajectories, old, new, *, kept: bool = False) -> int:
    """Each token's log-prob is that of the version it carries, and of no other. Returns tokens
    after a switch."""
    after = 0
    for t in trajectories:
        versions, a, b = t.token_version, old.sampled(t), new.sampled(t)
        assert (np.diff(versions) >= 0).all()
        first, second = versions == 0, versions == 1
        np.testing.assert_allclose(t.logp_inf[first], a[first], atol=1e-5)
        if not kept:
            np.testing.assert_allclose(t.logp_inf[second], b[second], atol=1e-5)
        after += int(second.sum())
    joined = np.concatenate([np.abs(old.sampled(t) - new.sampled(t)) for t in trajectories])
    assert np.median(joined) > 1e-2  # the two models are told apart by these numbers
    return after


def start_and_step(engine, requests, steps):
    engine.add(requests)
    done = []
    for _ in range(steps):
        done += engine.step()
    return done


@pytest.mark.parametrize("mode", ["in_flight", "abort"])
@pytest.mark.parametrize("prompt", [None, LONG], ids=["short", "cached-prefix"])
def test_tokens_match_the_version_they_carry(engine, model_a, model_b, ask, finish, mode, prompt):
    done = start_and_step(engine, ask(24, prompt=prompt, max_new_tokens=60), 9)  # 16 run, 8 wait
    engine.update_weights(1, whole(model_b.tensors), mode)
    trajectories = [*done, *finish(engine)]
    assert len(trajectories) == 24 and all(len(t.sampled_ids) <= 60 for t in trajectories)
    assert check_spans(trajectories, model_a, model_b) > 100
    spanning = [t for t in trajectories if len(set(t.token_version)) == 2]
    assert len(spanning) > 4 and all((t.token_version == 0).sum() <= 9 for t in spanning)
    assert any(set(t.token_version) == {1} for t in trajectories)
    full = model_b.logp(spanning[0])[spanning[0].token_version == 1]
    topk = spanning[0].topk_logp[spanning[0].token_version == 1]
    np.testing.assert_allclose(topk, -np.sort(-full, 1)[:, :20], atol=1e-5)


@pytest.mark.parametrize("mode", ["in_flight", "abort", "finish"])
def test_requests_that_wait_for_older_ones_are_the_newer_version_s(
    engine, model_a, model_b, ask, mode
):
    done = start_and_step(engine, ask(8, max_new_tokens=60), 5)
    engine.update_weights(1, whole(model_b.tensors), mode)
    engine.hold_newer(0)
    engine.add(ask(8, group=1, max_new_tokens=60))
    while engine.unfinished():
        new = engine.step()
        if {t.group_id for t in new} == {1}:
            assert {t.sample_index for t in done if t.group_id == 0} == set(range(8))
        done += new
    engine.hold_newer(math.inf)
    assert len(done) == 16
    check_spans(done, model_a, model_b)
    assert all(set(t.token_version) == {1} for t in done if t.group_id == 1)


@pytest.mark.parametrize("mode", ["in_flight", "abort", "finish"])
def test_an_update_in_flight_is_reproducible(engine, model_a, model_b, ask, finish, mode):
    runs = []
    for _ in range(2):
        engine.update_weights(0, whole(model_a.tensors), "in_flight")
        done = start_and_step(engine, ask(20, max_new_tokens=40), 6)
        engine.update_weights(1, whole(model_b.tensors), mode)
        done = sorted([*done, *finish(engine)], key=lambda t: t.sample_index)
        runs.append([(t.sampled_ids.tolist(), t.token_version.tolist()) for t in done])
    assert runs[0] == runs[1]


def test_an_engine_that_slept_goes_on_under_the_new_weights(engine, model_a, model_b, ask, finish):
    """Its keys and values are gone; requests that ran keep their tokens."""
    done = start_and_step(engine, ask(24, prompt=LONG, max_new_tokens=60), 9)
    freed = engine.sleep()
    assert freed >= 0.04 * 2**30  # all of kv_cache_gib=0.05, in whole blocks
    assert engine.unfinished() + len(done) == 24 and engine.running() == 0
    assert engine.cut([]) == []
    engine.wake("weights")
    engine.update_weights(1, whole(model_b.tensors), "finish")
    engine.wake("all")
    trajectories = [*done, *finish(engine)]
    assert len(trajectories) == 24
    assert check_spans(trajectories, model_a, model_b) > 100
    again = engine.sleep()
    engine.wake("all")
    assert again == freed


def test_a_resubmitted_request_does_not_repeat_its_earlier_draws(engine, model_a, ask, finish):
    engine.add(ask(12, max_new_tokens=40))
    untouched = finish(engine)
    done = start_and_step(engine, ask(12, max_new_tokens=40), 5)
    # the same weights: only the draws can differ
    engine.update_weights(1, whole(model_a.tensors), "abort")
    again = sorted([*done, *finish(engine)], key=lambda t: t.sample_index)
    assert all(
        a.sampled_ids[:5].tolist() == w.sampled_ids[:5].tolist() for a, w in zip(again, untouched)
    )
    assert any(a.sampled_ids.tolist() != w.sampled_ids.tolist() for a, w in zip(again, untouched))


def test_finish_gives_every_trajectory_one_version(engine, model_a, model_b, ask, finish):
    done = start_and_step(engine, ask(24, max_new_tokens=30), 4)
    engine.update_weights(1, whole(model_b.tensors), "finish")
    engine.add(ask(2, group=1))
    trajectories = [*done, *finish(engine)]
    assert len(trajectories) == 26 and all(len(set(t.token_version)) == 1 for t in trajectories)
    check_spans(trajectories, model_a, model_b)
    by_version = {v: [t for t in trajectories if t.token_version[0] == v] for v in (0, 1)}
    assert len(by_version[0]) >= 16 and len(by_version[1]) >= 2


def test_what_waits_during_a_drain_enters_in_order_afterwards(engine, model_b, ask, finish):
    done = start_and_step(engine, ask(4), 2)
    engine.begin_drain()
    engine.add(ask(2, group=1))
    while not engine.drained():
        done += engine.step()
    assert len(done) == 4 and engine.unfinished() == 2 and engine.step() == []
    engine.abort(["train:1:0"])
    engine.update_weights(1, whole(model_b.tensors), "finish")
    (last,) = finish(engine)
    assert last.request_id == "train:1:1" and set(last.token_version) == {1}


def test_an_updated_engine_equals_a_fresh_one(engine, start, model_b, ask, finish):
    engine.update_weights(1, whole(model_b.tensors), "in_flight")
    fresh = start(model_b)
    for e in (engine, fresh):
        e.add(ask(8, max_new_tokens=40))
    for updated, own in zip(finish(engine), finish(fresh)):
        assert updated.sampled_ids.tolist() == own.sampled_ids.tolist()
        assert np.array_equal(updated.logp_inf, own.logp_inf)
    assert engine.checksums(engine.names()) == fresh.checksums(fresh.names())


def test_keep_leaves_old_keys_and_values_to_running_requests_only(
    start, model_a, model_b, ask, finish
):
    engine = start(model_a, kv_on_update="keep")
    done = start_and_step(engine, ask(32, prompt=LONG, max_new_tokens=40), 6)  # some still wait
    engine.update_weights(1, whole(model_b.tensors), "in_flight")
    engine.add(
        ask(4, group=1, prompt=LONG, max_new_tokens=20)
    )  # the prompt is cached under the old weights
    trajectories = [*done, *finish(engine)]
    assert check_spans(trajectories, model_a, model_b, kept=True) > 50
    spanning = [t for t in trajectories if len(set(t.token_version)) == 2]
    stale = max(
        np.abs(t.logp_inf - model_b.sampled(t))[t.token_version == 1].max() for t in spanning
    )
    assert stale > 1e-2  # neither policy: that is what keeping means
    # the first one after the switch too: none that the old weights sampled carries the new version
    first = [
        np.abs(t.logp_inf - model_a.sampled(t))[(t.token_version == 1).argmax()] for t in spanning
    ]
    assert np.median(first) > 1e-2
    fresh = [t for t in trajectories if set(t.token_version) == {1}]
    assert len(fresh) >= 8
    for t in fresh:
        np.testing.assert_allclose(t.logp_inf, model_b.sampled(t), atol=1e-5)


def test_checksums_cover_every_tensor_and_catch_one_altered(engine, model_a, model_b):
    manifest = make_manifest(1, model_b.tensors, full=True, seed=0)
    engine.update_weights(1, whole(model_b.tensors), "in_flight")
    verify_checksums(manifest, engine.checksums(manifest.names))
    for name in (
        "model.layers.1.self_attn.k_proj.weight",
        "model.norm.weight",
        "model.embed_tokens.weight",
    ):
        altered = {n: t.clone() for n, t in model_b.tensors.items()}
        altered[name].view(-1)[-1] += 1e-3
        engine.update_weights(2, whole(altered), "in_flight")
        held = engine.checksums(manifest.names)
        assert [n for n in manifest.names if held[n] != manifest.checksums[n]] == [name]
        with pytest.raises(RuntimeError, match=name):
            verify_checksums(manifest, held)


def test_a_set_that_is_not_the_models_leaves_the_old_weights(engine, model_a, model_b, ask, finish):
    lost = {n: t for n, t in model_b.tensors.items() if "k_proj" not in n}
    longer = {**model_b.tensors, "model.norm.weight": torch.ones(65)}
    extra = {**model_b.tensors, "model.layers.9.norm.weight": torch.ones(4)}
    for wrong, words in (
        (lost, "k_proj.weight is missing"),
        (longer, "model.norm.weight"),
        (extra, "layers.9"),
    ):
        with pytest.raises(ValueError, match=words):
            engine.update_weights(1, whole(wrong), "abort")
    assert engine.version == 0
    engine.add(ask(2))
    for t in finish(engine):
        np.testing.assert_allclose(t.logp_inf, model_a.sampled(t), atol=1e-5)


def test_untied_embeddings_are_checked_on_their_own(start, tmp_path, ask, finish):
    a, b = (
        build_model(tmp_path / name, seed=seed, tie_embeddings=False)
        for name, seed in (("a", 3), ("b", 4))
    )
    assert "lm_head.weight" in a.tensors
    engine = start(a)
    engine.update_weights(1, whole(b.tensors), "in_flight")
    verify_checksums(
        make_manifest(1, b.tensors, full=True, seed=0), engine.checksums(engine.names())
    )
    engine.add(ask(2))
    for t in finish(engine):
        np.testing.assert_allclose(t.logp_inf, b.sampled(t), atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "scales"), [("fp8", "tensor"), ("int4", "channel"), ("int3", "tensor")]
)
def test_rounding_is_applied_to_every_set_of_weights(
    start, model_a, model_b, ask, finish, kind, scales
):
    engine = start(model_a, kind="fp8", rounding=kind, scales=scales)
    # from version 2 on a publication keeps the last layer precise
    for version, model, precise in ((0, model_a, None), (1, model_b, None), (2, model_b, 1)):
        if version:
            stream = replace(whole(model.tensors), precise_layers=precise)
            engine.update_weights(version, stream, "in_flight")
        kept = ("lm_head", "embed_tokens", *precise_patterns(model.tensors, precise or 0))
        spec = RoundingSpec(rounding=kind, scales=scales, keep_high_precision=kept)
        rounded = round_weights(model.tensors, spec)
        shapes = {n: (t.shape, t.dtype) for n, t in model.tensors.items()}
        assert {n: (t.shape, t.dtype) for n, t in rounded.items()} == shapes
        with torch.no_grad():
            reference = {n: p.clone() for n, p in model.hf.named_parameters()}
            model.hf.load_state_dict(rounded, strict=False)
        engine.add(ask(6))
        trajectories = finish(engine)
        assert {t.actor_kind for t in trajectories} == {f"{kind}_emulated"}
        named = [t.extras.get(PRECISE_LAYERS) for t in trajectories]
        assert all((n is None) if precise is None else n.tolist() == [[2, 1]] for n in named)
        at_rounded = [model.sampled(t) for t in trajectories]
        with torch.no_grad():
            model.hf.load_state_dict(reference, strict=False)
        for t, want in zip(trajectories, at_rounded):
            np.testing.assert_allclose(t.logp_inf, want, atol=1e-5)
        assert max(np.abs(t.logp_inf - model.sampled(t)).max() for t in trajectories) > 1e-3
        manifest = make_manifest(version, model.tensors, full=True, seed=0)
        if version:  # it holds exactly the rounding of what was published
            verify_checksums(manifest, engine.checksums(manifest.names))
    assert any(is_rounded(n, t, spec.keep_high_precision) for n, t in model_b.tensors.items())


def test_logit_noise_is_in_the_log_probs(start, model_a, ask, finish):
    engine = start(model_a, logit_noise=0.5, logprobs_k=64)
    together = ask(6, logprobs_k=64)
    engine.add(together)
    trajectories = finish(engine)
    for t in trajectories:
        np.testing.assert_allclose(np.exp(t.topk_logp).sum(1), 1.0, atol=1e-5)
        noise = t.topk_logp[:, : t.topk_ids.max() + 1] - np.take_along_axis(
            model_a.logp(t), t.topk_ids[:, : t.topk_ids.max() + 1], 1
        )
        assert 0.3 < noise.std() < 0.7
    engine.add(together[3:4])
    (alone,) = finish(engine)
    assert alone.sampled_ids.tolist() == trajectories[3].sampled_ids.tolist()
    np.testing.assert_allclose(alone.logp_inf, trajectories[3].logp_inf, atol=1e-5)


@pytest.mark.parametrize("min_p", [0.0, 0.4])
def test_a_floor_of_probabilities_is_exact_and_min_p_cuts_it(start, model_a, ask, finish, min_p):
    floor, temperature = 0.02, 0.7
    engine = start(model_a, probability_floor=floor)
    engine.add(ask(6, temperature=temperature, min_p=min_p))
    moved = []
    for t in finish(engine):
        p = np.exp(model_a.logp(t, temperature))
        q = (p + floor) / (1 + p.shape[1] * floor)
        q[q < min_p * q.max(1, keepdims=True)] = 0
        own = (q / q.sum(1, keepdims=True))[np.arange(len(q)), t.sampled_ids]
        np.testing.assert_allclose(t.logp_inf, np.log(own), atol=1e-5)
        moved.append(np.abs(t.logp_inf - model_a.sampled(t, temperature)).max())
    assert max(moved) > 1e-2


def test_temperature_scale_is_in_the_log_probs(start, model_a, ask, finish):
    engine = start(model_a, temperature_scale=1.5)
    engine.add(ask(4, temperature=0.8))
    for t in finish(engine):
        np.testing.assert_allclose(t.logp_inf, model_a.sampled(t, 1.2), atol=1e-5)
        assert np.abs(t.logp_inf - model_a.sampled(t, 0.8)).max() > 1e-2


def test_a_cache_too_small_for_all_preempts_and_changes_no_log_prob(
    start, model_a, model_b, ask, finish
):
    engine = start(model_a, kv_cache_gib=15 * 128 * 1024 / 2**30)  # 15 blocks of 128 tokens
    for mode in ("in_flight", "abort", "finish"):
        engine.update_weights(0, whole(model_a.tensors), "in_flight")
        # 12 sequences that soon need 24 blocks
        engine.add(ask(12, prompt=LONG[:125], max_new_tokens=120))
        done, preempted = [], False
        for step in range(400):
            if step == 12:
                engine.update_weights(1, whole(model_b.tensors), mode)
            before = engine.running()
            finished = engine.step()
            preempted |= engine.running() < before - len(finished)
            done += finished
        assert preempted and len(done) == 12
        check_spans(done, model_a, model_b)
