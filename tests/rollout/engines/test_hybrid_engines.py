"""Engines of a hybrid model on a CPU: states under load, through updates and sleep, with errors on
purpose, rounded weights, and of a teacher."""

from __future__ import annotations

import gc
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from engine_helpers import Model, drain, make_job, requests
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from benchmarks.models.model_families import FAMILIES, write_folder
from rlcore.rollout.specs import start_engine, start_teacher
from rlcore.seeding import derive_seed
from rlcore.testing.records import make_trajectory
from rlcore.weights.rounding import round_weights
from rlcore.weights.specs import RoundingSpec
from rlcore.weights.stream import whole

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

# Nats. transformers' float32 differs from float64 by 7e-6 at the median, by more than 1e-4 at one
# position in seventy, and by 2.5e-3 at the worst of 6400: where a norm divides by almost nothing. A
# wrong state differs by more than 0.1 at every later position.
MOST, WORST = 1e-4, 1e-2
POSITIONS = 512


# blocks of a cache in which five requests meet and do not fit, by family
BLOCKS = {
    "qwen3_5": 14.5,
    "qwen3_next": 14.5,
    "lfm2": 14.5,
    "granite hybrid": 8.5,
    "falcon_h1": 8.5,
}


@pytest.fixture(scope="module", params=list(BLOCKS))
def name(request):
    return request.param


@pytest.fixture(scope="module")
def old(name, tmp_path_factory):
    family = FAMILIES[name]
    folder = tmp_path_factory.mktemp("old")
    longer = family.settings | {"max_position_embeddings": POSITIONS}
    write_folder(replace(family, settings=longer), folder)
    return model_in(folder)


@pytest.fixture(scope="module")
def new(old, tmp_path_factory):
    """A model of the family with other weights."""
    folder = tmp_path_factory.mktemp("new")
    lm = AutoModelForCausalLM.from_pretrained(old.path, dtype=torch.float32)
    torch.manual_seed(2)
    with torch.no_grad():
        for p in lm.parameters():
            p.add_(0.1 * p.std(correction=0) * torch.randn_like(p))
    lm.save_pretrained(folder)
    return model_in(folder)


def model_in(folder):
    lm = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return Model(folder, load_file(folder / "model.safetensors"), lm.eval())


@pytest.fixture
def start(old):
    """Starts an engine of the old model, which lives as long as the test."""
    engines = []

    def make(**changes):
        engines.append(start_engine(make_job(old, max_len=POSITIONS, **changes)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
    gc.collect()


def mixed(count):
    """Requests whose prompts and answers differ in length."""
    made = []
    for i in range(count):
        prompt = [3 + (7 * i + j) % 40 for j in range(2 + 23 * i % 140)]
        (one,) = requests(1, prompt=prompt, seed=i, max_new_tokens=30 + 37 * i % 150)
        made.append(replace(one, sample_index=i))
    return made


def apart(trajectories, old, new):
    """Differences of all tokens to the policies that they name."""
    expected = [
        np.where(t.token_version == 0, old.sampled(t), new.sampled(t)) for t in trajectories
    ]
    return np.abs(np.concatenate([t.logp_inf for t in trajectories]) - np.concatenate(expected))


def require_rounding(differences):
    assert np.quantile(differences, 0.95) < MOST and differences.max() < WORST


def test_states_under_load(start, name, old, new):
    """More requests than seats and than the cache holds, an update, and sleep in the middle."""
    roomy = start(max_num_seqs=5)
    cache = roomy.core._llm.vllm_config.cache_config
    engine = start(max_num_seqs=5, kv_cache_gib=BLOCKS[name] * 0.05 / cache.num_gpu_blocks)
    for mode in ("in_flight", "abort"):
        engine.update_weights(0, whole(old.tensors), "in_flight")
        engine.add(mixed(18))
        done, preempted, steps = [], 0, 0
        while engine.unfinished():
            if steps == 60:
                engine.update_weights(1, whole(new.tensors), mode)
            if steps == 90:
                assert engine.sleep() > 0
                engine.wake("all")
            before = engine.running()
            finished = engine.step()
            preempted += engine.running() < before - len(finished)
            done += finished
            steps += 1
            assert steps < 5000
        assert preempted and len(done) == 18
        assert {v for t in done for v in t.token_version} == {0, 1}
        assert sum(len(set(t.token_version)) == 2 for t in done) > 2
        require_rounding(apart(done, old, new))
        # the two models are told apart by these numbers
        assert apart(done, new, old).max() > 0.1


def test_errors_on_purpose_are_in_the_log_probs(start, old):
    """Noise of logits and a temperature that is off: processors that no layer knows of."""
    engine = start(logit_noise=0.5, temperature_scale=1.5, logprobs_k=64)
    asked = requests(6, logprobs_k=64, temperature=0.8)
    engine.add(asked)
    for t, request in zip(drain(engine), asked):
        ids = torch.tensor(t.token_ids[None].astype(np.int64))
        with torch.no_grad():
            logits = old.hf(ids).logits[0, len(t.prompt_ids) - 1 : -1]
        for i, row in enumerate(logits):
            generator = torch.Generator().manual_seed(
                derive_seed(request.seed, "rollout/logit_noise", i)
            )
            row += 0.5 * torch.randn(len(row), generator=generator)
        expected = (logits / 1.2).log_softmax(-1).numpy()
        at = np.arange(len(expected)), t.sampled_ids
        require_rounding(np.abs(t.logp_inf - expected[at]))


@pytest.mark.parametrize(("kind", "scales"), [("fp8", "tensor"), ("int8", "channel")])
def test_every_set_of_weights_is_rounded(start, old, new, tmp_path, kind, scales):
    engine = start(kind="fp8", rounding=kind, scales=scales)
    spec = RoundingSpec(
        rounding=kind, scales=scales, keep_high_precision=("lm_head", "embed_tokens")
    )
    for version, model in enumerate((old, new)):
        if version:
            engine.update_weights(version, whole(model.tensors), "in_flight")
        engine.add(requests(6))
        sampled = drain(engine)
        shutil.copy(model.path / "config.json", tmp_path)
        save_file(
            round_weights(model.tensors, spec), tmp_path / "model.safetensors", {"format": "pt"}
        )
        at_rounded = model_in(tmp_path)
        require_rounding(apart(sampled, at_rounded, at_rounded))
        assert apart(sampled, model, model).max() > 10 * MOST


def test_a_teacher_scores_tokens_that_it_did_not_sample(old):
    engine = start_teacher(make_job(old, logprobs_k=5, max_len=POSITIONS, max_num_seqs=1))
    answers = [tuple(3 + (5 * i + j) % 40 for i in range(n)) for j, n in enumerate((4, 90, 300))]
    given = [make_trajectory(0, j, turns=[((3, 4, 5), a)]) for j, a in enumerate(answers)]
    for t, answer in zip(given, engine.score([(t.token_ids, t.sampled) for t in given])):
        expected = old.logp(t)
        require_rounding(np.abs(answer[2] - old.sampled(t)))
        require_rounding(np.abs(np.take_along_axis(expected, answer[0], 1) - answer[1]))
