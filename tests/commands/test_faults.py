"""Whole runs that lose processes or nodes, gain and lose actors, or go on with another number of
ranks.

These are a selection; `make faults` causes every fault and prints the outcome. Those marked slow
have parts that cheaper tests hold: tests/cluster stops and kills actors' processes, tests/rollout
the ranks of an engine, and tests/learner opens checkpoints at other numbers of ranks.
"""

import contextlib
import json
import signal
from collections import Counter

import psutil
import pytest
import ray
from conftest import left_over, rows
from ray.cluster_utils import Cluster

from rlcore.cli import main

FAST = (
    "cluster.heartbeat_s=1",
    "cluster.hang_timeout_s=20",
    "checkpoint.every=3",
    "schedule.steps=10000",
    "logging.console=plain",
    "logging.report=false",
    "evaluation.every=1000",
)


def processes(run, word):
    found = []
    for process in run.descendants():
        with contextlib.suppress(psutil.NoSuchProcess):  # ended, or a zombie
            found += [process] if word in " ".join(process.cmdline()) else []
    return found


def whole_files(folder):
    """What is in a folder, without files that are being written anew."""
    return {path for path in folder.iterdir() if not path.name.endswith(".partial")}


def open_to_others(run):
    """(process, address) of the run's listening sockets that can be reached from elsewhere."""
    listening = {
        (p.name(), c.laddr.ip)
        for p in [psutil.Process(run.process.pid), *run.descendants()]
        for c in p.net_connections(kind="inet")
        if c.status == psutil.CONN_LISTEN
    }
    assert listening
    return {
        (name, ip) for name, ip in listening if ip not in ("127.0.0.1", "::1", "::ffff:127.0.0.1")
    }


def books(run_dir):
    """(admitted, consumed) by the newest checkpoint, after recounting every group that its ledger
    names."""
    newest = sorted((run_dir / "checkpoints").glob("step_*"))[-1]
    ledger = json.loads(json.loads((newest / "buffer" / "state.json").read_text())["state"])[
        "ledger"
    ]
    gone = Counter(g for g, _ in ledger["recent"])
    assert set(gone.values()) <= {1} and not set(gone) & set(ledger["live"])
    assert sorted([*gone, *ledger["live"]]) == list(range(ledger["admitted"]))
    assert all(how.startswith("consumed") for _, how in ledger["recent"])
    return ledger["admitted"], ledger["consumed"]


@pytest.mark.slow
@pytest.mark.cluster
def test_a_lost_buffer_and_then_everything_cost_steps_and_no_group(installed, small, tmp_path):
    run_dir = tmp_path / "run"
    run = installed("train", *small, *FAST, f"run_dir={run_dir}")
    run.wait_for(lambda: len(rows(run_dir)) >= 5, what="five steps")
    processes(run, "BufferActor")[0].kill()
    run.wait_for(lambda: "continuing from step_" in run.text, what="the recovery")
    at = len(rows(run_dir))
    run.wait_for(lambda: len(rows(run_dir)) >= at + 5, what="further steps")
    assert (
        "the replay buffer died" in run.text
        and "recovery 1 of cluster.max_recoveries=3" in run.text
    )
    run.kill()  # all of its processes
    run.wait()

    resumed = installed("train", f"run_dir={run_dir}", "resume=auto")
    resumed.wait_for(lambda: "continuing from step_" in resumed.text, what="the run to continue")
    at = len(rows(run_dir))
    resumed.wait_for(lambda: len(rows(run_dir)) >= at + 3, what="further steps")
    family = resumed.descendants()
    resumed.process.send_signal(signal.SIGTERM)
    assert resumed.wait() == 130, resumed.text[-3000:]
    found = rows(run_dir)
    assert [r["step"] for r in found] == list(range(1, len(found) + 1))
    assert max(r["staleness/max"] for r in found) <= 1
    assert books(run_dir)[1] == len(found) * 8
    assert not left_over(family)


@pytest.mark.engine
@pytest.mark.ranks
def test_a_lost_learner_costs_the_steps_since_its_checkpoint_and_a_second_command_none(
    command, small, tmp_path
):
    run_dir = tmp_path / "run"
    by_time = [word for word in FAST if not word.startswith("checkpoint.")]
    run = command("train", *small, *by_time, f"run_dir={run_dir}", "checkpoint.every_s=2")
    run.wait_for(lambda: list((run_dir / "checkpoints").glob("step_*")), what="a checkpoint")
    run.wait_for(lambda: len(rows(run_dir)) >= 5, what="five steps")
    processes(run, "LearnerActor")[0].kill()
    run.wait_for(lambda: "continuing from step_" in run.text, what="the recovery")
    # a scheduler's requeue, while the run goes on: it is refused and changes nothing
    written, files = (run_dir / "metrics.jsonl").stat().st_ino, whole_files(run_dir)
    second = command("train", f"run_dir={run_dir}", "resume=auto")
    assert second.wait() == 2
    assert f"run_dir={run_dir} is in use by rlcore train" in second.text
    assert (run_dir / "metrics.jsonl").stat().st_ino == written
    assert whole_files(run_dir) == files
    at = len(rows(run_dir))
    run.wait_for(lambda: len(rows(run_dir)) >= at + 3, what="further steps")
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 130, run.text[-3000:]
    assert "recovery 1 of cluster.max_recoveries=3" in run.text
    found = rows(run_dir)
    assert [r["step"] for r in found] == list(range(1, len(found) + 1))
    assert books(run_dir)[1] == len(found) * 8
    assert found[-1]["checkpoint/interval_s"] >= 2
    assert not (run_dir / "owner.json").exists()  # the next command need not wait
    logged = [json.loads(line) for line in (run_dir / "log.jsonl").read_text().splitlines()]
    assert any("continuing from step_" in entry["text"] for entry in logged)


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.ranks
def test_steps_go_on_while_one_of_three_actors_is_stopped(command, small, tmp_path):
    run_dir = tmp_path / "run"
    words = ("actor.bf16.count=3", "cluster.num_cpus=4", "cluster.hang_timeout_s=120")
    run = command("train", *small, *FAST, f"run_dir={run_dir}", *words)
    run.wait_for(lambda: len(rows(run_dir)) >= 3, what="three steps")
    stopped = processes(run, "RolloutActor")[0]
    stopped.send_signal(signal.SIGSTOP)
    try:
        run.wait_for(lambda: "has not answered for" in run.text, what="the suspicion")
        at = len(rows(run_dir))
        # before its deadline, so that nothing was replaced
        run.wait_for(lambda: len(rows(run_dir)) >= at + 5, what="steps without the stopped actor")
        assert rows(run_dir)[-1]["rollout/replacements"] == 0
        assert rows(run_dir)[-1]["rollout/in_rotation"] == 2
    finally:
        stopped.send_signal(signal.SIGCONT)
    run.wait_for(lambda: "answers again" in run.text, what="the end of the suspicion")
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 130, run.text[-3000:]
    assert books(run_dir)[1] == len(rows(run_dir)) * 8


SLOW = """
import time
from rlcore.rollout.engines.vllm.engine import VllmEngine

class Slow(VllmEngine):
    def __init__(self, job):
        super().__init__(job)
        if job.actor_id.endswith("-0"):
            step = self.core.step
            self.core.step = lambda: (time.sleep(1.0), step())[1]
"""


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.ranks
def test_answers_of_a_slow_actor_go_on_at_another_with_the_tokens_they_have(
    command, small, tmp_path
):
    run_dir, engine = tmp_path / "run", tmp_path / "slow.py"
    engine.write_text(SLOW)
    words = ("actor.bf16.count=2", "cluster.num_cpus=3", "rollout.request_timeout_s=2")
    own = f"actor.bf16.engine={engine}:Slow"
    run = command("train", *small, *FAST, f"run_dir={run_dir}", *words, own)
    run.wait_for(
        lambda: any(r["rollout/migrated_requests"] for r in rows(run_dir)),
        what="a request that moved",
    )
    at = len(rows(run_dir))
    run.wait_for(lambda: len(rows(run_dir)) >= at + 4, what="further steps")
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 130, run.text[-3000:]
    assert "other actors go on with them" in run.text
    found = rows(run_dir)
    assert books(run_dir)[1] == len(found) * 8
    assert found[-1]["rollout/replacements"] == found[-1]["buffer/duplicates"] == 0
    # the log-probs are those of the tokens, before the move and after it
    assert all(r["mismatch/abs_dlogp_mean"] < 1e-4 for r in found if r["staleness/max"] == 0)


@pytest.mark.slow
@pytest.mark.cluster
def test_an_engine_over_two_ranks_loses_one_and_is_replaced(installed, small, tmp_path):
    run_dir = tmp_path / "run"
    run = installed("train", *small, *FAST, f"run_dir={run_dir}", "actor.bf16.tensor_parallel=2")
    run.wait_for(lambda: len(rows(run_dir)) >= 3, what="three steps")
    run.wait_for(
        lambda: len(processes(run, "Worker_TP")) == 2, seconds=20, what="both ranks to be seen"
    )
    ranks = processes(run, "Worker_TP")
    assert not open_to_others(run)
    ranks[1].kill()
    run.wait_for(lambda: "is in the rotation" in run.text, what="a replacement")
    at = len(rows(run_dir))
    run.wait_for(lambda: len(rows(run_dir)) >= at + 3, what="further steps")
    run.wait_for(
        lambda: len(processes(run, "Worker_TP")) == 2,
        seconds=20,
        what="both ranks to be seen again",
    )
    family = run.descendants()
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 130, run.text[-3000:]
    found = rows(run_dir)
    assert books(run_dir)[1] == len(found) * 8
    assert all(r["mismatch/abs_dlogp_mean"] < 1e-4 for r in found if r["staleness/max"] == 0)
    assert not left_over([*family, *ranks])


@pytest.mark.slow
@pytest.mark.cluster
def test_actors_come_and_go_and_nothing_is_open_to_others(installed, small, tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "HF_TOKEN"):
        monkeypatch.setenv(name, "hush" * 10)
    run_dir = tmp_path / "run"
    run = installed("train", *small, *FAST, f"run_dir={run_dir}", "cluster.num_cpus=3")
    run.wait_for(lambda: len(rows(run_dir)) >= 2, what="two steps")
    assert not open_to_others(run)
    assert main(["scale", f"run_dir={run_dir}", "actor.bf16.count=2"]) == 0
    at = len(rows(run_dir))
    run.wait_for(lambda: "bf16-1 is in the rotation" in run.text, what="the second actor")
    assert len(rows(run_dir)) > at, "learning stood still while an actor was added"
    assert main(["scale", f"run_dir={run_dir}", "actor.bf16.count=1"]) == 0
    run.wait_for(lambda: "bf16-1 is removed" in run.text, what="its removal")
    at = len(rows(run_dir))
    run.wait_for(lambda: len(rows(run_dir)) >= at + 3, what="further steps")
    run.wait_for(
        lambda: len(processes(run, "RolloutActor")) == 1,
        what="the end of the removed actor's process",
    )
    assert main(["scale", f"run_dir={run_dir}", "actor.fp8.count=1"]) == 2  # it ends nothing
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 130, run.text[-3000:]
    books(run_dir)
    secret = b"hush" * 10
    assert not [
        f for f in (*run_dir.rglob("*"), run.log) if f.is_file() and secret in f.read_bytes()
    ]


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.ranks
def test_a_checkpoint_of_two_zero2_ranks_opens_at_one_and_is_exported(command, small, tmp_path):
    run_dir, out = tmp_path / "run", tmp_path / "model"
    words = (*small, *FAST, f"run_dir={run_dir}", "cluster.num_cpus=3", "learner.zero_stage=2")
    first = command("train", *words, "learner.ranks=2", "schedule.steps=4")
    assert first.wait() == 0, first.text[-3000:]
    second = command(
        "train", f"run_dir={run_dir}", "resume=auto", "learner.ranks=1", "schedule.steps=6"
    )
    assert second.wait() == 0, second.text[-3000:]
    assert [r["step"] for r in rows(run_dir)] == [1, 2, 3, 4, 5, 6]
    assert all(
        r["mismatch/abs_dlogp_mean"] < 1e-4 for r in rows(run_dir) if r["staleness/max"] == 0
    )
    assert books(run_dir)[1] == 6 * 8
    export = command("export", f"run_dir={run_dir}", f"out={out}")
    assert export.wait() == 0, export.text[-3000:]
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(out)
    assert sum(p.numel() for p in model.parameters()) > 0 and (out / "tokenizer.json").is_file()


LARGE = """
import numpy as np
from rlcore.rollout.engines.vllm.engine import VllmEngine

class Large(VllmEngine):
    def __init__(self, job):
        super().__init__(job)
        step, noise = self.core.step, np.zeros(2**20, np.int8)
        self.core.step = lambda: [o._replace(extras={"noise": noise}) for o in step()]
"""


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.ranks
def test_episodes_of_a_mebibyte_wait_for_room_in_the_buffer_and_the_run_goes_on(
    command, small, tmp_path
):
    """Eight groups of four a step, 32 MiB: staleness alone would admit 160 MiB. Settings do not say
    how large these records are."""
    run_dir, engine = tmp_path / "run", tmp_path / "large.py"
    engine.write_text(LARGE)
    own = (f"actor.bf16.engine={engine}:Large", "cluster.buffer_mib=72", "schedule.steps=12")
    run = command("train", *small, f"run_dir={run_dir}", *own, "schedule.max_staleness=4")
    assert run.wait() == 0, run.text[-3000:]
    found = rows(run_dir)
    assert [r["step"] for r in found] == list(range(1, 13))
    used = [r["buffer/bytes"] for r in found]
    assert 32 * 2**20 < max(used) <= 76 * 2**20, used  # one group more
    assert books(run_dir)[1] == 12 * 8


# A job over a Ray cluster of three nodes (own raylets on this machine), one of which is cut off.


WORDS = (
    "cluster.launch.nodes=3",
    "cluster.launch.learner_nodes=1",
    "actor.bf16.count=2",
    "actor.bf16.num_cpus=2",  # one on each node
    "cluster.heartbeat_s=1",
    "cluster.hang_timeout_s=30",
    "cluster.start_timeout_s=300",
    "schedule.steps=10000",
    "logging.console=plain",
    "logging.report=false",
    "evaluation.every=1000",
)


@pytest.fixture
def three_nodes():
    nodes = Cluster()
    try:
        store = 10**8
        nodes.add_node(
            num_cpus=1,
            resources={"rlcore_learner": 1000},
            include_dashboard=False,
            object_store_memory=store,
        )
        yield nodes
    finally:
        ray.shutdown()
        nodes.shutdown()


def _actor_node(nodes):
    return nodes.add_node(num_cpus=2, resources={"rlcore_actor": 1000}, object_store_memory=10**8)


def _processes(node):
    """Titles of the processes that a node's raylet has started, joined."""
    return " ".join(word for child in _children(node) for word in child.cmdline())


def _children(node):
    (raylet,) = node.all_processes["raylet"]
    return psutil.Process(raylet.process.pid).children(recursive=True)


@pytest.mark.slow
@pytest.mark.cluster
def test_a_node_is_cut_off_and_another_joins(three_nodes, installed, small, tmp_path):
    nodes = [_actor_node(three_nodes), _actor_node(three_nodes)]
    run_dir = tmp_path / "run"
    run = installed(
        "train", *small, *WORDS, f"run_dir={run_dir}", f"cluster.address={three_nodes.address}"
    )
    run.wait_for(lambda: len(rows(run_dir)) >= 3, what="three steps")
    # All nodes have one address, and Ray connects a driver to any of them: the roles without
    # resources are with it.
    every = [three_nodes.head_node, *nodes]
    found = [[n for n in every if f"ray::{r}" in _processes(n)] for r in ("BufferA", "ScorerA")]
    assert len(found[0]) == 1 and found[0][0] in found[1]  # other nodes may have graders, too
    lost = next(node for node in nodes if node not in found[0])
    (shard,) = [p for p in _children(lost) if "ray::ShardActor" in " ".join(p.cmdline())]
    shard.kill()
    run.wait_for(lambda: "#1 kept are lost" in run.text, what="the loss of a shard alone")
    at = len(rows(run_dir))
    run.wait_for(lambda: len(rows(run_dir)) >= at + 3, what="steps with its actor alive")
    run.wait_for(lambda: "ray::ShardActor" in _processes(lost), what="another shard in its place")
    three_nodes.remove_node(lost, allow_graceful=False)
    run.wait_for(lambda: "is replaced" in run.text, what="the loss to be seen")
    run.wait_for(lambda: "#2 kept are lost" in run.text, what="its records to be missed")
    run.wait_for(lambda: "the graders of node" in run.text, what="its graders to be missed")
    run.wait_for(lambda: "died with its queue" in run.text, what="their answers to be asked again")
    at = len(rows(run_dir))
    run.wait_for(lambda: len(rows(run_dir)) >= at + 5, what="steps with the other node alone")
    assert "is in the rotation" not in run.text  # there is no room for a replacement yet
    _actor_node(three_nodes)
    run.wait_for(
        lambda: "is in the rotation" in run.text, what="a replacement on the node that joined"
    )
    at = len(rows(run_dir))
    run.wait_for(lambda: len(rows(run_dir)) >= at + 3, what="further steps")
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 130, run.text[-3000:]
    last = rows(run_dir)[-1]
    replaced = [line for line in run.text.splitlines() if "is replaced" in line]
    # a second time where Ray put the first replacement on the node that it still took for alive
    assert last["rollout/replacements"] == len(replaced) <= 2, replaced
    assert last["staleness/max"] <= 1
    assert last["ledger/failed"] == 0 and last["ledger/evicted"] == 0
    assert last["ledger/consumed"] == len(rows(run_dir)) * 8


@pytest.mark.slow
@pytest.mark.cluster
def test_a_run_over_several_nodes_goes_on_from_what_its_shards_wrote(
    three_nodes, installed, small, tmp_path
):
    for _ in range(2):
        _actor_node(three_nodes)
    run_dir = tmp_path / "run"
    words = (
        "train",
        *small,
        *WORDS,
        f"run_dir={run_dir}",
        "schedule.max_staleness=4",
        "resume=auto",
    )
    done = 0
    for _ in range(2):
        run = installed(*words, f"cluster.address={three_nodes.address}")
        run.wait_for(lambda least=done + 3: len(rows(run_dir)) >= least, what="three steps")
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 130, run.text[-3000:]
        assert (f"continuing from step_{done:06d}" in run.text) == bool(done)
        done = len(rows(run_dir))
        buffer = run_dir / "checkpoints" / f"step_{done:06d}" / "buffer"
        assert any(file.stat().st_size for file in buffer.glob("records-*.bin"))
    last = rows(run_dir)[-1]
    assert last["ledger/consumed"] == done * 8 and last["buffer/resampled"] == 0
    assert last["ledger/failed"] == 0 and last["ledger/evicted"] == 0
