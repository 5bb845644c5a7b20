"""The fleet's rules on real Ray actors that stand in for engines."""

import asyncio
import os
import signal
import sys
import time

import psutil
import pytest
import ray

from rlcore.errors import StageError, UserError
from rlcore.runtime.cluster import RoleLost, cluster
from rlcore.runtime.fleet import Fleet, Member, Publication, Spawned
from rlcore.types import Request, SamplingSpec, WeightManifest

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not know the tests' folder
THREADS = {"max_concurrency": 4, "num_cpus": 1}


class Engine:
    """Takes requests, holds a version, and fails as told."""

    def __init__(self, refuses):
        self.refuses, self.requests, self.version = refuses, [], -1

    def start(self):
        return os.getpid()

    def submit(self, requests):
        assert self.version >= 0, "was given work before it had weights"
        self.requests += [r.request_id for r in requests]

    def abort(self, request_ids):
        self.requests = [r for r in self.requests if r not in request_ids]
        return True

    def open_requests(self):
        return self.requests

    def update_weights(self, manifest, handle, on_publish, timeout_s):
        if self.refuses:
            raise RuntimeError("checksum of lm_head differs")
        self.version = manifest.version
        return {"stop_s": 0.1}

    def status(self):
        return {"error": None, "heartbeat_age_s": 0.0, "pid": os.getpid()}

    def state(self):
        return self.version, sorted(self.requests)


@pytest.fixture(scope="module", autouse=True)
def room_for_six():
    with cluster(address=None, num_cpus=6, needed_cpus=1, needed_gpus=0, object_store_mib=100):
        yield


class World:
    """A fleet of stand-ins, what it said, and whether the next processes refuse weights."""

    def __init__(self, count=2, joined=False, max_restarts=3):
        self.said, self.refusing = [], 0
        members = []
        for i in range(count):
            spawned = self.spawn(f"bf16-{i}")
            members.append(Member(f"bf16-{i}", "bf16", self.spawn, spawned.handle))
        ray.get([m.handle.start.remote() for m in members])
        self.fleet = Fleet(
            members,
            on_publish="finish",
            publish_timeout_s=5,
            hang_timeout_s=3,
            start_timeout_s=20,
            max_restarts=max_restarts,
            joined=joined,
            log=self.said.append,
        )

    def spawn(self, name):
        refuses, self.refusing = self.refusing > 0, max(0, self.refusing - 1)
        handle = ray.remote(**THREADS)(Engine).remote(refuses)
        return Spawned(handle, handle.__ray_ready__.remote(), handle.start.remote())

    def state(self, member):
        return ray.get(member.handle.state.remote())

    async def settled(self, count):
        for _ in range(300):
            await self.fleet.watch()
            if len(self.fleet.rotation()) == count:
                return
            await asyncio.sleep(0.1)
        raise AssertionError(f"{self.fleet.members} {self.said}")

    async def end(self):
        await self.fleet.close()
        for m in self.fleet.members:
            ray.kill(m.handle)


def group(number, samples=2):
    return [Request(number, i, f"t/train/{number}", None, SamplingSpec(), seed=0) for i in range(samples)]


def weights(version):
    return Publication(WeightManifest(version, (), (), "float32", {}, True), None)


def play(scenario, **settings):
    async def run():
        world = World(**settings)
        try:
            return await scenario(world)
        finally:
            await world.end()

    return asyncio.run(run())


def test_whole_groups_go_to_the_least_loaded():
    async def scenario(world):
        fleet = world.fleet
        await fleet.publish(weights(0))
        await fleet.assign({0: group(0, 4), 1: group(1), 2: group(2), 3: group(3)})
        assert [sorted(m.groups) for m in fleet.members] == [[0, 3], [1, 2]]
        fleet.forget({0, 2})
        assert [sorted(m.groups) for m in fleet.members] == [[0], [2]]
        await fleet.assign({4: group(4)})
        assert sorted(fleet.members[1].groups) == [2, 4]

    play(scenario)


def test_what_a_dead_actor_held_is_lost_and_its_replacement_has_the_newest_weights():
    async def scenario(world):
        fleet = world.fleet
        await fleet.publish(weights(0))
        await fleet.assign({0: group(0), 1: group(1)})
        victim = fleet.members[0]
        os.kill(ray.get(victim.handle.start.remote()), signal.SIGKILL)
        await fleet.watch()
        assert [m.name for m in fleet.rotation()] == ["bf16-1"]
        took = await fleet.publish(weights(1))  # does not wait for the one on its way
        assert took == {"stop_s": 0.1}
        lost = fleet.take_lost()
        assert lost == {0: group(0)} and not fleet.take_lost()
        await fleet.assign(lost)
        assert world.state(fleet.members[1]) == (1, ["train:0:0", "train:0:1", "train:1:0", "train:1:1"])
        await world.settled(2)
        assert world.state(victim) == (1, []) and fleet.replacements == 1
        assert any("bf16-0 is replaced" in line for line in world.said)

    play(scenario)


def test_a_stopped_process_is_killed_and_work_waits_while_nobody_is_well():
    async def scenario(world):
        fleet = world.fleet
        await fleet.publish(weights(0))
        pid = ray.get(fleet.members[0].handle.start.remote())
        os.kill(pid, signal.SIGSTOP)
        await fleet.assign({7: group(7)})  # taking work is what it fails at
        assert not fleet.rotation() and not fleet.take_lost()
        assert await fleet.publish(weights(1)) == {}
        await world.settled(1)
        assert fleet.take_lost() == {7: group(7)}
        assert world.state(fleet.members[0])[0] == 1
        deadline = time.monotonic() + 20
        while psutil.pid_exists(pid) and time.monotonic() < deadline:
            await asyncio.sleep(0.2)
        assert not psutil.pid_exists(pid)

    play(scenario, count=1)


def test_weights_that_do_not_arrive_cost_the_actor_and_too_many_failures_the_run():
    async def scenario(world):
        fleet = world.fleet
        await fleet.publish(weights(0))
        world.refusing = 1  # of the next process; the one after it is sound
        os.kill(ray.get(fleet.members[0].handle.start.remote()), signal.SIGKILL)
        await fleet.watch()
        await world.settled(1)
        assert fleet.replacements == 2 and any("checksum of lm_head differs" in line for line in world.said)
        world.refusing = 9
        os.kill(ray.get(fleet.members[0].handle.start.remote()), signal.SIGKILL)
        with pytest.raises(StageError, match=r"cluster\.max_restarts=3"):
            await world.settled(1)

    play(scenario, count=1)


def test_a_node_that_takes_many_actors_with_it_does_not_use_up_the_restarts_of_each():
    async def scenario(world):
        fleet = world.fleet
        await fleet.publish(weights(0))
        for m in fleet.members:
            fleet.sicken(m, m.handle, "its node died")
        await world.settled(3)
        first = fleet.members[0]
        fleet.sicken(first, first.handle, "it died alone")
        with pytest.raises(StageError, match=r"bf16-0 failed 2 times within an hour \(cluster\.max_restarts=1\)"):
            await fleet.watch()

    play(scenario, count=3, max_restarts=1)


def test_a_group_handed_out_again_is_dropped_by_its_holder_first():
    async def scenario(world):
        fleet = world.fleet
        await fleet.publish(weights(0))
        await fleet.assign({0: group(0, 3)})
        assert await fleet.open_requests() == {"train:0:0", "train:0:1", "train:0:2"}
        await fleet.assign({0: group(0, 3)[2:]})
        assert world.state(fleet.members[0]) == (0, ["train:0:2"])

    play(scenario, count=1)


def test_the_fleet_grows_and_shrinks_while_it_works():
    async def scenario(world):
        fleet = world.fleet
        await fleet.publish(weights(3))
        await fleet.assign({0: group(0)})
        fleet.resize({"bf16": 3})
        assert len(fleet.rotation()) == 1  # the run does not wait for them
        await world.settled(3)
        assert [m.name for m in fleet.members] == ["bf16-0", "bf16-1", "bf16-2"]
        assert {world.state(m)[0] for m in fleet.members} == {3}
        await fleet.assign({1: group(1), 2: group(2)})
        fleet.resize({"bf16": 1})
        assert sorted(fleet.take_lost()) == [1, 2] and [m.name for m in fleet.members] == ["bf16-0"]
        assert fleet.replacements == 0
        for counts, words in [({"fp8": 1}, "fp8"), ({"bf16": 0}, "at least one")]:
            with pytest.raises(UserError, match=words):
                fleet.resize(counts)
        fleet.resize({"bf16": 2})
        await world.settled(2)
        assert [m.name for m in fleet.members] == ["bf16-0", "bf16-3"]  # names are never given twice

    play(scenario, count=1)


def test_a_broadcast_group_is_lost_with_any_of_its_members():
    async def scenario(world):
        fleet = world.fleet
        await fleet.publish(weights(0))
        with pytest.raises(UserError, match=r"cluster\.transport"):
            fleet.resize({"bf16": 3})
        os.kill(ray.get(fleet.members[1].handle.start.remote()), signal.SIGKILL)
        with pytest.raises(RoleLost, match="bf16-1"):
            await fleet.watch()

    play(scenario, joined=True)
