"""What the engine samples and reports, against a plain transformers forward of the same weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rlcore.errors import UserError
from rlcore.models import build_fresh_model, load_tokenizer
from rlcore.rollout.checks import check_length, check_vocabulary
from rlcore.rollout.model_folder import read_config
from rlcore.rollout.quantization import quantization_options
from rlcore.rollout.stop_text import cut_at_stop


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_equal_a_plain_forward(engine, model_a, ask, finish, temperature):
    engine.add(ask(8, temperature=temperature))
    for t in finish(engine):
        full = model_a.logp(t, temperature)
        assert t.logp_inf.dtype == np.float32 and t.topk_ids.dtype == np.int32
        np.testing.assert_allclose(t.logp_inf, model_a.sampled(t, temperature), atol=1e-5)
        np.testing.assert_allclose(t.topk_logp, -np.sort(-full, axis=1)[:, :20], atol=1e-5)
        np.testing.assert_allclose(np.take_along_axis(full, t.topk_ids, 1), t.topk_logp, atol=1e-5)
        assert (t.token_version == 0).all() and t.actor_kind == "bf16" and t.score_status == "pending"


def test_temperature_is_the_one_asked_for(engine, model_a, ask, finish):
    engine.add(ask(4, temperature=0.7))
    t = finish(engine)[0]
    assert np.abs(t.logp_inf - model_a.sampled(t, 1.0)).max() > 1e-2


def test_same_seed_gives_the_same_tokens_in_any_batch(engine, ask, finish):
    engine.add(ask(8))
    together = finish(engine)
    for request, t in zip(ask(8), together):
        engine.add([request])
        (alone,) = finish(engine)
        assert alone.response_ids.tolist() == t.response_ids.tolist()
    engine.add(ask(8, seed=900))
    assert [t.response_ids.tolist() for t in finish(engine)] != [t.response_ids.tolist() for t in together]


def test_greedy_takes_the_most_probable_token(engine, model_a, ask, finish):
    engine.add(ask(2, temperature=0.0))
    for t in finish(engine):
        assert t.response_ids.tolist() == model_a.logp(t).argmax(1).tolist()


def test_truncated_sampling_reports_the_renormalised_distribution(engine, model_a, ask, finish):
    engine.add(ask(4, top_k=3))
    for t in finish(engine):
        assert (t.topk_ids[:, 3:] == -1).all() and np.isneginf(t.topk_logp[:, 3:]).all()
        np.testing.assert_allclose(np.exp(t.topk_logp[:, :3]).sum(1), 1.0, atol=1e-5)
        assert (t.topk_ids[:, :3] == t.response_ids[:, None]).any(1).all()


def test_min_p_keeps_only_the_safe_set(engine, model_a, ask, finish):
    engine.add(ask(4, min_p=0.2))
    for t in finish(engine):
        full = model_a.logp(t)
        safe = full >= full.max(1, keepdims=True) + np.log(0.2)
        constrained = np.where(safe, full, -np.inf)
        constrained -= np.log(np.exp(constrained).sum(1, keepdims=True))
        np.testing.assert_allclose(t.logp_inf, constrained[np.arange(len(full)), t.response_ids], atol=1e-5)


def test_requests_of_one_batch_may_ask_for_different_k(engine, model_a, ask, finish):
    engine.add([*ask(2, group=0, logprobs_k=-1), *ask(2, group=1, logprobs_k=0), *ask(2, group=2, logprobs_k=5)])
    none, _, zero, _, five, _ = finish(engine)
    assert np.isnan(none.logp_inf).all() and none.topk_ids.shape == (len(none.response_ids), 0)
    np.testing.assert_allclose(zero.logp_inf, model_a.sampled(zero), atol=1e-5)
    assert zero.topk_ids.shape[1] == 0 and five.topk_ids.shape[1] == 5


def test_eos_ends_a_response_and_belongs_to_it(engine, model_a, ask, finish):
    eos = load_tokenizer(model_a.path).eos_token_id
    engine.add(ask(16, max_new_tokens=200))
    stopped = [t for t in finish(engine) if t.finish_reason == "stop"]
    assert len(stopped) > 3
    for t in stopped:
        assert t.response_ids[-1] == eos and eos not in t.response_ids[:-1]


def test_length_limits(engine, ask, finish):
    engine.add(ask(16, max_new_tokens=7))
    lengths = [(len(t.response_ids), t.finish_reason) for t in finish(engine)]
    assert (7, "length") in lengths and all(n < 7 or r in ("length", "stop") for n, r in lengths)
    engine.add(ask(16, prompt=[5] * 250, max_new_tokens=100))  # model.max_len is 256
    cut = [t for t in finish(engine) if t.finish_reason == "length"]
    assert cut and all(len(t.response_ids) == 6 for t in cut)


def test_stop_string_ends_where_it_is_spelled_and_keeps_its_tokens(engine, model_a, ask, finish):
    tokenizer = load_tokenizer(model_a.path)
    engine.add(ask(8))
    free = finish(engine)
    texts = [tokenizer.decode(t.response_ids, skip_special_tokens=True) for t in free]
    stop = next(text[i : i + 2] for text in texts if len(text) > 8 for i in (4,))
    engine.add(ask(8, stop=(stop,)))
    stopped = finish(engine)
    assert any(stop in text for text in texts)
    for before, text, t in zip(free, texts, stopped):
        assert t.response_ids.tolist() == before.response_ids[: len(t.response_ids)].tolist()
        got = tokenizer.decode(t.response_ids, skip_special_tokens=True)
        if stop in text:
            assert got.endswith(stop) and got.find(stop) == len(got) - 2 and t.finish_reason == "stop"
            assert cut_at_stop(got, (stop,)) == text[: text.find(stop)]
        else:
            assert got == text and cut_at_stop(got, (stop,)) == text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt": [5] * 256}, "model.max_len=256"),
        ({"prompt": [999]}, "prompt token ids"),
        ({"logprobs_k": 21}, "rollout.logprobs_k=21 is above the 20"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_with_its_whole_list(engine, ask, changes, words):
    bad = ask(1, group=7, **changes)
    with pytest.raises(ValueError, match=words):
        engine.add([*ask(3), *bad])
    assert engine.unfinished() == 0


def test_a_request_id_is_unique_among_unfinished_requests(engine, ask, finish):
    engine.add(ask(2))
    with pytest.raises(ValueError, match="unique"):
        engine.add(ask(1))
    finish(engine)
    engine.add(ask(1))
    assert len(finish(engine)) == 1


def test_aborted_requests_leave_nothing_behind(engine, ask, finish):
    engine.add(ask(4))
    engine.abort(["train:0:1", "unknown"])
    done = engine.step()
    engine.abort(["train:0:3"])
    assert [t.sample_index for t in sorted([*done, *finish(engine)], key=lambda t: t.sample_index)] == [0, 2]


def test_k_of_the_whole_vocabulary_and_beyond_is_padded(start, model_a, ask, finish):
    vocab = read_config(model_a.path)["vocab_size"]
    engine = start(model_a, logprobs_k=50)
    assert vocab < 50
    engine.add(ask(2, logprobs_k=50))
    for t in finish(engine):
        assert t.topk_ids.shape[1] == 50 and (t.topk_ids[:, vocab:] == -1).all()
        np.testing.assert_allclose(np.exp(t.topk_logp).sum(1), 1.0, atol=1e-5)


@pytest.mark.parametrize("scales", ["tensor", "channel", "block"])
def test_vllm_knows_the_quantisation_that_is_asked_of_it_on_gpus(scales):
    from vllm.config.quantization import resolve_quantization_config
    from vllm.model_executor.layers.linear import QKVParallelLinear
    from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig

    config = OnlineQuantizationConfig(
        resolve_quantization_config(**quantization_options("fp8", scales, ["lm_head", "layers.0."]))
    )
    config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    kept, quantised = (
        config.resolve_quant_method_cls(QKVParallelLinear, f"model.layers.{i}.self_attn.qkv_proj") for i in (0, 1)
    )
    assert kept is None
    assert scales in quantised[1]


def test_what_cannot_work_is_refused_before_an_engine_starts(model_a, tmp_path: Path, start):
    config = read_config(model_a.path)
    with pytest.raises(UserError, match=r"model\.max_len=513"):
        check_length(config, 513)
    shape = dict(seed=0, hidden_size=32, layers=1, heads=1, kv_heads=1, head_dim=32, intermediate_size=32, max_len=64)
    other = build_fresh_model(tmp_path / "other", "xyz", **shape)
    with pytest.raises(UserError, match="another vocabulary"):
        check_vocabulary(other, model_a.path)
    check_vocabulary(model_a.path, model_a.path)
    load_tokenizer(model_a.path).save_pretrained(other)  # a tokenizer of more tokens than the model has
    with pytest.raises(UserError, match="belong together"):
        check_vocabulary(other, None)
    with pytest.raises(UserError, match=r"actor\.rounding=fp8"):
        start(model_a, quantization="fp8")
    with pytest.raises(UserError, match="tensor_parallel=3"):
        start(model_a, tensor_parallel=3)
    with pytest.raises(UserError, match="max_batched_tokens=100"):
        start(model_a, max_batched_tokens=100)
    with pytest.raises(UserError, match=r"config\.json"):
        read_config(tmp_path)
