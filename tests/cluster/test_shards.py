"""The shards of a cluster of two nodes (own raylets on this machine)."""

import asyncio
import os
import signal

import pytest
import ray
from ray.cluster_utils import Cluster
from timing import wait_until

from rlcore.buffer.journal import JournalError, RecordFile, file_of
from rlcore.buffer.shard import ShardReply
from rlcore.cluster.actors.scorer import ScorerActor
from rlcore.cluster.clients import shards as shards_module
from rlcore.cluster.clients.shards import RayShards, fetch_records, read_shards, write_shards
from rlcore.cluster.delivery import NodeOutlet
from rlcore.cluster.placement import actor_class, on_node, shard_name
from rlcore.errors import DeadlineExceeded, RoleLost
from rlcore.references import ShardLost
from rlcore.serialization import dump_trajectory
from rlcore.testing.records import make_answer, make_score, make_trajectory

RECORD = dump_trajectory(make_trajectory(0, 0))
LIMIT_S = 60.0


def buffer_class():
    """An actor class; a local one, which Ray sends whole."""

    class Buffer:
        """Keeps what shards and actors send."""

        def __init__(self):
            self.references, self.records, self.scores = [], [], []

        async def add_report(self, shard, told):
            self.references += [reference for _, reference in told.kept]
            self.scores += told.scores
            return ShardReply([], 0.0)

        async def add_records(self, records):
            self.records += records

        async def released(self, shard):
            return []

        async def has(self):
            return self.references, self.records

        async def scored(self):
            return self.scores

    return ray.remote(Buffer)


class Handles:
    """As much of a buffer's client and of a run's hosting as shards need."""

    name = "buffer-test"
    own_nodes = False
    hang_timeout_s = 120.0
    max_restarts = 2

    def __init__(self, handle):
        self.handle = handle
        self.supervision = self


def scorer_class():
    """A graders' process without graders, which are not needed for episodes."""

    class Scorer(ScorerActor):
        def start(self):
            return 0

    return Scorer


@pytest.fixture
def two_nodes():
    nodes = Cluster()
    try:
        nodes.add_node(num_cpus=1, include_dashboard=False, object_store_memory=10**8)
        ray.init(address=nodes.address)
        nodes.add_node(num_cpus=1, object_store_memory=10**8)
        nodes.wait_for_nodes()
        yield
    finally:
        ray.shutdown()
        nodes.shutdown()


@pytest.mark.cluster
def test_a_shard_that_dies_alone_is_replaced_and_its_records_are_lost(
    two_nodes, monkeypatch, tmp_path
):
    monkeypatch.setattr(shards_module, "AGAIN_S", 1.0)
    monkeypatch.setattr("rlcore.cluster.delivery.LOOK_S", 0.5)
    here = ray.get_runtime_context().get_node_id()
    (there,) = (n["NodeID"] for n in ray.nodes() if n["NodeID"] != here)
    buffer = buffer_class().remote()
    hosting = Handles(buffer)
    shards = RayShards(hosting, hosting)
    assert asyncio.run(shards.watch(print)) == []
    process = shard_name("buffer-test", there)
    outlet = NodeOutlet("add_records", process, buffer)
    outlet([RECORD])
    wait_until(lambda: ray.get(buffer.has.remote())[0], 120)
    (first,) = ray.get(buffer.has.remote())[0]
    assert first.shard == f"{process}#1"
    assert fetch_records({first.shard: [first.key]}) == {first.shard: [RECORD]}

    made = write_shards(tmp_path, {first.shard: [first.key]}, LIMIT_S)
    assert (tmp_path / file_of(first.shard)).read_bytes() == RECORD and len(made[first.shard]) == 32
    with pytest.raises(FileNotFoundError):
        write_shards(tmp_path / "not there", {first.shard: [first.key]}, LIMIT_S)

    file = RecordFile(file_of(first.shard), [len(RECORD)], made[first.shard])
    (keys,) = read_shards(tmp_path, {first.shard: [file, file]}, LIMIT_S).values()
    assert fetch_records({first.shard: keys}) == {first.shard: [RECORD, RECORD]}
    with pytest.raises(JournalError, match="must be one folder for all nodes"):
        read_shards(tmp_path / "not there", {first.shard: [file]}, LIMIT_S)

    pid = ray.get(ray.get_actor(process).pid.remote())
    os.kill(pid, signal.SIGSTOP)  # slow, and not lost
    with pytest.raises(DeadlineExceeded, match=r"checkpoint\.write_timeout_s=1"):
        write_shards(tmp_path, {first.shard: [first.key]}, 1.0)
    with pytest.raises(DeadlineExceeded, match=r"cluster\.start_timeout_s=1"):
        read_shards(tmp_path, {first.shard: [file]}, 1.0)
    with pytest.raises(ShardLost, match="GetTimeoutError"):
        fetch_records({first.shard: [first.key]}, 1.0)
    os.kill(pid, signal.SIGCONT)

    os.kill(pid, signal.SIGKILL)
    # nothing is lost meanwhile
    wait_until(lambda: outlet([RECORD]) or ray.get(buffer.has.remote())[1], 120)
    assert asyncio.run(shards.watch(print)) == [first.shard]
    wait_until(lambda: not asyncio.run(shards.watch(print)) and _named(process), 120)
    with pytest.raises(ShardLost):
        fetch_records({first.shard: [first.key]})
    with pytest.raises(ShardLost):
        write_shards(tmp_path, {first.shard: [first.key]}, LIMIT_S)
    with pytest.raises(RoleLost):
        read_shards(tmp_path, {first.shard: [file]}, LIMIT_S)
    wait_until(lambda: outlet([RECORD]) or len(ray.get(buffer.has.remote())[0]) > 1, 120)
    again = ray.get(buffer.has.remote())[0][-1]
    assert again.shard == f"{process}#2"
    assert fetch_records({again.shard: [again.key]}) == {again.shard: [RECORD]}
    shards.kill()


@pytest.mark.cluster
def test_a_nodes_graders_give_training_scores_to_its_shard(two_nodes):
    here = ray.get_runtime_context().get_node_id()
    (there,) = (n["NodeID"] for n in ray.nodes() if n["NodeID"] != here)
    buffer = buffer_class().options(name="buffer-test").remote()
    hosting = Handles(buffer)
    shards = RayShards(hosting, hosting)
    assert asyncio.run(shards.watch(print)) == []
    home = buffer_class().options(name="home").remote()
    scorer = actor_class(scorer_class(), num_cpus=0, scheduling_strategy=on_node(there))
    process = scorer.remote("buffer-test", (), "", "home")
    answer, score = make_answer(), make_score(make_trajectory(0, 0))
    ray.get(process.submit_scored.remote([(answer, score)]))
    wait_until(lambda: ray.get(buffer.scored.remote()) == [score], 120)
    del home
    shards.kill()


def _named(process):
    try:
        return ray.get_actor(process)
    except ValueError:
        return None
