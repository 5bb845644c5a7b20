"""Compute threads that follow the load of the machine's cores."""

import os
import struct
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel

from rlcore.cores import cores, quota
from rlcore.learner.cpu.spare_cores import Claims, SpareCores, Usage, threads_for, usage
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
    assert usage({0, 12}, path=stat).idle_s == pytest.approx(500 / ticks)
    assert usage(os.sched_getaffinity(0)).idle_s > 0  # this machine's


def version_2(root, path, text, used_us):
    (root / path).mkdir(parents=True, exist_ok=True)
    (root / path / "cpu.max").write_text(text)
    (root / path / "cpu.stat").write_text(f"usage_usec {used_us}\nuser_usec 1\n")
    return "0::/pods/one\n"


def version_1(root, path, text, used_us):
    allowed, period = text.split()
    for name in ("cpu", "cpuacct"):
        (root / name / path).mkdir(parents=True, exist_ok=True)
    (root / "cpu" / path / "cpu.cfs_quota_us").write_text(allowed.replace("max", "-1"))
    (root / "cpu" / path / "cpu.cfs_period_us").write_text(period)
    (root / "cpuacct" / path / "cpuacct.usage").write_text(f"{used_us}000")
    return "5:cpuacct:/pods/one\n4:cpu:/pods/one\n0::/\n"


@pytest.mark.parametrize("write", [version_2, version_1])
def test_the_smallest_quota_of_all_groups_counts(write, tmp_path):
    own = tmp_path / "own"
    own.write_text(write(tmp_path, "pods/one", "max 100000", 7))
    assert quota(tmp_path, own) is None and quota(tmp_path, tmp_path / "none") is None
    write(tmp_path, "pods/one", "250000 100000", 3_000_000)
    write(tmp_path, "pods", "150000 100000", 5_000_000)  # of the group around it
    found = quota(tmp_path, own)
    assert (found.cores, found.used_s()) == (1.5, 5.0)
    # inside a container, which sees its own group as the root
    write(tmp_path, ".", "100000 100000", 2_000_000)
    assert quota(tmp_path, own).cores == 1.0


def test_a_quota_bounds_the_cores_and_what_is_idle(tmp_path, monkeypatch):
    own = tmp_path / "own"
    own.write_text(version_2(tmp_path, ".", "230000 100000", 1_000_000))
    limit = quota(tmp_path, own)
    monkeypatch.setattr("rlcore.cores.quota", lambda: limit)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert cores() == 2
    (tmp_path / "stat").write_text("".join(f"cpu{i} 1 2 3 400 5\n" for i in range(8)))
    before = usage(range(8), limit, tmp_path / "stat")
    now = Usage(before.at_s + 1, before.own_s + 1, before.idle_s + 6, before.unused_s + 0.2)
    assert threads_for(before, now, fewest=1, most=8) == 1  # others use the rest of the quota
    now = Usage(before.at_s + 1, before.own_s + 1, before.idle_s + 6, before.unused_s + 1.0)
    assert threads_for(before, now, fewest=1, most=8) == 2


def test_idle_cores_are_claimed_by_one_process(tmp_path):
    one, other = Claims(tmp_path / "claims"), Claims(tmp_path / "claims")
    seen_idle = time.monotonic()
    assert one.claim(seen_idle) and not other.claim(seen_idle)
    assert other.claim(time.monotonic())  # it has measured anew since


def test_a_claim_of_another_boot_does_not_count(tmp_path):
    (tmp_path / "claims").write_bytes(struct.pack("d", time.monotonic() + 1e6))
    assert Claims(tmp_path / "claims").claim(time.monotonic())


def test_two_ranks_do_not_both_take_the_only_idle_core(tmp_path, monkeypatch):
    """Three cores, the engine's idle: one rank has two threads from then on, the other one."""
    monkeypatch.setattr("rlcore.learner.cpu.spare_cores.WINDOW_S", 0.0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    monkeypatch.setattr("rlcore.cores.quota", lambda: None)
    threads, own, idle, last = {"a": 1, "b": 1}, {"a": 0.0, "b": 0.0}, [0.0], [time.monotonic()]
    rank = ["a"]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[rank[0]])
    monkeypatch.setattr(torch, "set_num_threads", lambda n: threads.update({rank[0]: n}))

    def read():
        now = time.monotonic()
        passed, last[0] = now - last[0], now
        running = sum(threads.values())
        for name in threads:
            own[name] += passed * threads[name] * min(1, 3 / running)
        idle[0] += passed * max(0, 3 - running)
        return Usage(now, own[rank[0]], idle[0])

    spare = {name: SpareCores(1, 8, read=read, claims=Claims(tmp_path / "c")) for name in threads}
    found = set()
    for look in range(40):
        rank[0] = "ab"[look % 2]
        spare[rank[0]].follow()
        found.add(sum(threads.values()))
    assert found == {3} and sorted(threads.values()) == [1, 2]


@pytest.mark.parametrize(("wait_s", "threads"), [(0.0, 2), (0.02, 2), (0.5, 1)])
def test_a_process_that_waits_for_data_takes_no_idle_core(wait_s, threads, tmp_path, monkeypatch):
    """A second of work on one core, then a wait, and again; the other core is always idle."""
    monkeypatch.setattr("rlcore.learner.cpu.spare_cores.WINDOW_S", 0.0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr("rlcore.cores.quota", lambda: None)
    present, clock = [1], {"at": 0.0, "own": 0.0}
    monkeypatch.setattr(torch, "get_num_threads", lambda: present[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda n: present.__setitem__(0, n))

    def read():
        return Usage(clock["at"], clock["own"], clock["at"])

    spare, found = SpareCores(1, 8, read=read, claims=Claims(tmp_path / "c")), []
    for _ in range(60):
        clock["at"] += wait_s
        for _ in range(10):
            clock["at"] += 0.1
            clock["own"] += 0.1
            spare.follow()
            found.append(present[0])
    assert set(found[-100:]) == {threads}


def test_every_layer_looks_forward_and_backward(tmp_path, monkeypatch):
    monkeypatch.setattr("rlcore.learner.cpu.spare_cores.WINDOW_S", 0.0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    free = {"cores": 0.0, "looks": 0}

    def read():
        free["looks"] += 1
        at = 0.1 * free["looks"]
        return Usage(at, at, at * free["cores"])  # this rank always uses one core

    set_to = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: set_to[-1] if set_to else 1)
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    build_fresh_model(tmp_path / "m", "0123456789=", FreshModelSpec(layers=3), seed=0, max_len=32)
    lm = load_causal_lm(tmp_path / "m", "float32", "sdpa")
    spare = SpareCores(1, 8, read=read, claims=Claims(tmp_path / "claims"))
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
