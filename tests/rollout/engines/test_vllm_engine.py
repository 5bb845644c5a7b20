"""What the engine samples and reports, against a plain transformers forward of the same weights."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from engine_helpers import make_job
from safetensors.torch import save_file

from rlcore.errors import UserError
from rlcore.learner.batch import build_batch
from rlcore.learner.lm_head import HeadSpec
from rlcore.learner.packing import pack
from rlcore.learner.policy import Policy, load_causal_lm
from rlcore.models.folder import read_config
from rlcore.models.text import load_tokenizer
from rlcore.rollout.engines.vllm.arguments import quantization_options
from rlcore.rollout.specs import ActorSpec, start_engine
from rlcore.rollout.text import read_answer
from rlcore.testing.records import make_group
from rlcore.types import TokenScores
from rlcore.weights.manifest import tensor_checksum

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_equal_a_plain_forward(engine, model_a, ask, finish, temperature):
    engine.add(ask(8, temperature=temperature))
    for t in finish(engine):
        full = model_a.logp(t, temperature)
        assert t.logp_inf.dtype == np.float32 and t.topk_ids.dtype == np.int32
        np.testing.assert_allclose(t.logp_inf, model_a.sampled(t, temperature), atol=1e-5)
        np.testing.assert_allclose(t.topk_logp, -np.sort(-full, axis=1)[:, :20], atol=1e-5)
        np.testing.assert_allclose(np.take_along_axis(full, t.topk_ids, 1), t.topk_logp, atol=1e-5)
        assert (t.token_version == 0).all() and t.actor_kind == "bf16" and t.actor_id == "bf16-0"


def test_an_engine_imports_nothing_that_renders_messages(engine):
    renderer = engine.core._llm.renderer
    assert type(renderer).__name__ == "TokensOnly"  # vLLM's own is imported by its name
    with pytest.raises(RuntimeError, match="token ids"):
        renderer.render_messages([], None)


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
        assert alone.sampled_ids.tolist() == t.sampled_ids.tolist()
    engine.add(ask(8, seed=900))
    assert [t.sampled_ids.tolist() for t in finish(engine)] != [
        t.sampled_ids.tolist() for t in together
    ]


def test_greedy_takes_the_most_probable_token(engine, model_a, ask, finish):
    engine.add(ask(2, temperature=0.0))
    for t in finish(engine):
        assert t.sampled_ids.tolist() == model_a.logp(t).argmax(1).tolist()


def test_of_the_generation_config_every_end_id_is_read_and_nothing_else(
    engine, model_a, start, ask, finish, tmp_path
):
    engine.add(ask(1, temperature=0.0))
    whole = finish(engine)[0].sampled_ids.tolist()
    end = whole[3]
    folder = shutil.copytree(model_a.path, tmp_path / "model")
    sampling = {"do_sample": True, "top_p": 0.1, "top_k": 1, "temperature": 0.3, "min_p": 0.5}
    sampling |= {"repetition_penalty": 2.0, "max_new_tokens": 2, "eos_token_id": [1, end]}
    (folder / "generation_config.json").write_text(json.dumps(sampling))
    other = start(replace(model_a, path=folder))
    other.add(ask(1, temperature=0.0))
    (answer,) = finish(other)
    assert answer.sampled_ids.tolist() == whole[: whole.index(end) + 1]
    assert answer.finish_reason == "stop"
    for one in (engine, other):
        one.add(ask(4))
    for plain, found in zip(finish(engine), finish(other), strict=True):
        count = len(found.sampled_ids)  # it may have met its further end
        assert found.sampled_ids.tolist() == plain.sampled_ids[:count].tolist()
        np.testing.assert_allclose(found.logp_inf, plain.logp_inf[:count], atol=1e-5)
        assert np.isfinite(found.topk_logp).all()  # nothing was cut off


def test_truncated_sampling_reports_the_renormalised_distribution(engine, model_a, ask, finish):
    engine.add(ask(4, top_k=3))
    for t in finish(engine):
        assert (t.topk_ids[:, 3:] == -1).all() and np.isneginf(t.topk_logp[:, 3:]).all()
        np.testing.assert_allclose(np.exp(t.topk_logp[:, :3]).sum(1), 1.0, atol=1e-5)
        assert (t.topk_ids[:, :3] == t.sampled_ids[:, None]).any(1).all()


@pytest.mark.parametrize("cut", [{"top_p": 0.6}, {"top_k": 7}, {"min_p": 0.4, "top_p": 0.95}])
def test_the_learner_conditioned_on_the_kept_sets_agrees_with_truncated_sampling(
    engine, model_a, ask, finish, cut
):
    engine.add(ask(8, temperature=0.8, **cut))
    group = make_group(finish(engine), [0.0] * 8)
    batch = build_batch([group], with_topk=True, device=torch.device("cpu"), kept_sets=True)
    policy = Policy(load_causal_lm(model_a.path, "float32", "sdpa"))
    difference, mass = [], []
    for mb in pack(batch.episodes, 200, "sorted"):
        ids = mb.flat(batch.sent.topk_ids_inf)
        with torch.no_grad():
            scores = TokenScores(*policy(mb, ids, HeadSpec(0.8, 64, kept_sets=True))[1:])
        difference.append(scores.logp - mb.flat(batch.sent.logp_inf))
        mass.append(scores.coverage)
    d = torch.cat(difference).double()
    assert batch.unstored == 0 and len(d) > 50
    assert (torch.expm1(d) - d).mean() < 1e-6 and d.abs().max() < 2e-5
    assert torch.cat(mass).mean() < 0.97  # what was cut off matters


def test_min_p_keeps_only_the_safe_set(engine, model_a, ask, finish):
    engine.add(ask(4, min_p=0.2))
    for t in finish(engine):
        full = model_a.logp(t)
        safe = full >= full.max(1, keepdims=True) + np.log(0.2)
        constrained = np.where(safe, full, -np.inf)
        constrained -= np.log(np.exp(constrained).sum(1, keepdims=True))
        np.testing.assert_allclose(
            t.logp_inf, constrained[np.arange(len(full)), t.sampled_ids], atol=1e-5
        )


def test_requests_of_one_batch_may_ask_for_different_k(engine, model_a, ask, finish):
    engine.add(
        [
            *ask(2, group=0, logprobs_k=-1),
            *ask(2, group=1, logprobs_k=0),
            *ask(2, group=2, logprobs_k=5),
        ]
    )
    none, _, zero, _, five, _ = finish(engine)
    assert np.isnan(none.logp_inf).all() and none.topk_ids.shape == (len(none.sampled_ids), 0)
    np.testing.assert_allclose(zero.logp_inf, model_a.sampled(zero), atol=1e-5)
    assert zero.topk_ids.shape[1] == 0 and five.topk_ids.shape[1] == 5


def test_eos_ends_a_response_and_belongs_to_it(engine, model_a, ask, finish):
    eos = load_tokenizer(model_a.path).eos_token_id
    engine.add(ask(16, max_new_tokens=200))
    stopped = [t for t in finish(engine) if t.finish_reason == "stop"]
    assert len(stopped) > 3
    for t in stopped:
        assert t.sampled_ids[-1] == eos and eos not in t.sampled_ids[:-1]


def test_length_limits(engine, ask, finish):
    engine.add(ask(16, max_new_tokens=7))
    lengths = [(len(t.sampled_ids), t.finish_reason) for t in finish(engine)]
    assert (7, "length") in lengths and all(n < 7 or r in ("length", "stop") for n, r in lengths)
    engine.add(ask(16, prompt=[5] * 250, max_new_tokens=100))  # model.max_len is 256
    cut = [t for t in finish(engine) if t.finish_reason == "length"]
    assert cut and all(len(t.sampled_ids) == 6 for t in cut)


def test_stop_string_ends_where_it_is_spelled_and_keeps_its_tokens(engine, model_a, ask, finish):
    tokenizer = load_tokenizer(model_a.path)

    def text_of(t, stop=()):
        return read_answer(
            t, lambda ids: tokenizer.decode(ids, skip_special_tokens=True), stop
        ).text

    engine.add(ask(8))
    free = finish(engine)
    texts = [text_of(t) for t in free]
    stop = next(text[i : i + 2] for text in texts if len(text) > 8 for i in (4,))
    engine.add(ask(8, stop=(stop,)))
    stopped = finish(engine)
    assert any(stop in text for text in texts)
    for before, text, t in zip(free, texts, stopped):
        assert t.sampled_ids.tolist() == before.sampled_ids[: len(t.sampled_ids)].tolist()
        got = text_of(t)
        if stop in text:
            assert got.endswith(stop) and got.find(stop) == len(got) - 2
            assert t.finish_reason == "stop"
            assert text_of(t, (stop,)) == text[: text.find(stop)]
        else:
            assert got == text and text_of(t, (stop,)) == text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt": [5] * 256}, "model.max_len=256"),
        ({"prompt": [999]}, "prompt token ids"),
        ({"logprobs_k": 21}, "rollout.logprobs_k=21 is above the 20"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_with_its_whole_list(
    engine, ask, changes, words
):
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
    assert [
        t.sample_index for t in sorted([*done, *finish(engine)], key=lambda t: t.sample_index)
    ] == [0, 2]


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

    actor = ActorSpec(
        kind="fp8", num_gpus=1, scales=scales, keep_high_precision=("lm_head", "layers.0.")
    )
    config = OnlineQuantizationConfig(resolve_quantization_config(**quantization_options(actor)))
    config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    kept, quantised = (
        config.resolve_quant_method_cls(QKVParallelLinear, f"model.layers.{i}.self_attn.qkv_proj")
        for i in (0, 1)
    )
    assert kept is None
    assert scales in quantised[1]


def test_a_stray_file_in_the_folder_changes_nothing(model_a, start, tmp_path):
    shutil.copytree(model_a.path, tmp_path / "m")
    save_file({"tok_embeddings.weight": torch.ones(2)}, tmp_path / "m/consolidated.safetensors")
    engine = start(replace(model_a, path=tmp_path / "m"))
    own = {n: tensor_checksum(t) for n, t in model_a.tensors.items()}
    assert engine.checksums(engine.names()) == own


def test_an_engine_that_cannot_work_here_says_so_before_it_starts(model_a, start):
    with pytest.raises(UserError, match=r"model\.max_len=513"):
        start(model_a, max_len=513)
    with pytest.raises(UserError, match=r"actor\.bf16\.tensor_parallel=3"):
        start(model_a, tensor_parallel=3)
    with pytest.raises(UserError, match=r"actor\.bf16\.num_gpus=1 .*the CPU: use 0"):
        start(model_a, kind="fp8", num_gpus=1)
    with pytest.raises(UserError, match=r"actor\.bf16\.engine=sglang .*vllm"):
        start_engine(make_job(model_a, engine="sglang"))
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        start(model_a, max_batched_tokens=100)
