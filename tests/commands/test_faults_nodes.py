"""A job over a Ray cluster of three nodes (own raylets on this machine), one of which is cut
off."""

import signal

import psutil
import pytest
import ray
from conftest import rows
from ray.cluster_utils import Cluster

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
