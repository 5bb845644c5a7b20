"""Compute threads that follow the load of the machine's cores."""

import os

import numpy as np
import pytest
import thread_jobs as jobs
import torch
from hypothesis import given
from hypothesis import strategies as st
from learner_helpers import on_ranks, small_model
from transformers import GPT2Config, GPT2LMHeadModel

from rlcore.learner.cpu_speed import SpareCores, Usage, threads_for, usage
from rlcore.learner.policy import load_causal_lm
from rlcore.models.fresh import build_fresh_model
from rlcore.models.specs import FreshModelSpec

START = Usage(10.0, 5.0, 100.0)


def after(passed, own, idle):
    return Usage(START.at_s + passed, START.own_s + own, START.idle_s + idle)


@pytest.mark.parametrize(
    ("own", "idle", "threads"),
    [
        (0.1, 0.0, 1),  # the engine has the other core
        (0.1, 0.1, 2),  # it pauses
        (0.2, 0.0, 2),  # it still does, and the rank has taken its core
        (0.1, 0.0, 1),  # it goes on
        (0.1, 0.05, 1),  # it pauses for half of the time
        (0.1, 0.7, 4),  # of eight cores, no more than asked for
    ],
)
def test_a_rank_takes_what_others_leave_and_gives_it_back(own, idle, threads):
    assert threads_for(START, after(0.1, own, idle), fewest=1, most=4) == threads


@given(st.floats(0, 8), st.floats(0, 8), st.integers(1, 4), st.integers(0, 4))
def test_threads_stay_within_their_bounds_and_the_free_cores(own, idle, fewest, more):
    got = threads_for(START, after(0.1, 0.1 * own, 0.1 * idle), fewest=fewest, most=fewest + more)
    assert fewest <= got <= fewest + more
    assert got == fewest or got <= own + idle + 0.31


def test_usage_is_of_the_given_cores(tmp_path):
    stat = tmp_path / "stat"
    stat.write_text("cpu 1 2 3 999 5\ncpu0 1 2 3 400 5\ncpu1 1 2 3 200 5\ncpu12 1 2 3 100 5\n")
    ticks = os.sysconf("SC_CLK_TCK")
    assert usage({0, 12}, stat).idle_s == pytest.approx(500 / ticks)
    assert usage(os.sched_getaffinity(0)).idle_s > 0  # this machine's


def test_every_layer_looks_forward_and_backward(tmp_path, monkeypatch):
    monkeypatch.setattr("rlcore.learner.cpu_speed.WINDOW_S", 0.0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    free = {"cores": 0.0, "looks": 0}

    def read():
        free["looks"] += 1
        at = 0.1 * free["looks"]
        return Usage(at, at, at * free["cores"])  # this rank always uses one core

    set_to = []
    build_fresh_model(tmp_path / "m", "0123456789=", FreshModelSpec(layers=3), seed=0, max_len=32)
    lm = load_causal_lm(tmp_path / "m", "float32", "sdpa")
    spare = SpareCores(1, 8, read=read, set_threads=set_to.append)
    spare.attach(lm)
    logits = lm(input_ids=torch.tensor([[3, 4, 5]])).logits
    assert free["looks"] == 1 + 3 and set_to == []
    free["cores"] = 1.0
    logits.sum().backward()
    assert free["looks"] == 1 + 3 + 3 and set_to[0] == 2 and max(set_to) == 2


@pytest.mark.parametrize("kind", ["qwen3", "gpt2", "llada"])
def test_the_layers_of_an_architecture_are_found_whatever_their_name(kind, tmp_path):
    if kind == "gpt2":
        lm = GPT2LMHeadModel(GPT2Config(n_layer=3, n_embd=32, n_head=2, vocab_size=32))
    else:
        spec, masked = FreshModelSpec(layers=3), kind == "llada"
        build_fresh_model(tmp_path / "m", "012", spec, seed=0, max_len=32, masked=masked)
        lm = load_causal_lm(tmp_path / "m", "float32", "sdpa")
    SpareCores(1, 2).attach(lm)
    hooked = [name for name, module in lm.named_modules() if module._forward_pre_hooks]
    assert [name.rsplit(".", 1)[1] for name in hooked] == ["0", "1", "2"]


@pytest.mark.ranks
def test_threads_that_change_within_a_step_change_no_gradient(tmp_path):
    for name, found in on_ranks(1, jobs.threads_that_change, small_model(tmp_path / "m"))[
        0
    ].items():
        plain, row, gradients, its_row, threads = found
        assert set(threads) == {1, 3}, name
        assert plain.keys() == gradients.keys()
        apart, norm = (
            sum(float((g.astype(np.float64) ** 2).sum()) for g in tensors) ** 0.5
            for tensors in ([g - plain[n] for n, g in gradients.items()], plain.values())
        )
        limit = 1e-2 if name == "bfloat16" else 1e-5
        assert norm > 1e-3 and apart / norm < limit, name
        assert its_row == pytest.approx(row, rel=limit, abs=limit), name
