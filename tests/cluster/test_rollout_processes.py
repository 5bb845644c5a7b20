"""The fleet, and a teacher's engines, over real processes that stand in for engines: kill -9,
kill -STOP."""

import asyncio
import os
import signal
import sys
import time

import numpy as np
import psutil
import pytest
import ray
from timing import deadline, wait_for_end

from rlcore.cluster import teacher_engines
from rlcore.cluster.clients import RayRolloutActor
from rlcore.cluster.clients.rollout import PendingReply
from rlcore.cluster.ray_cluster import cluster
from rlcore.cluster.specs import Hosting, RaySpec
from rlcore.cluster.teacher_engines import TeacherActor, TeacherOutlet, start_engines
from rlcore.errors import UserError
from rlcore.loop.fleet import Fleet
from rlcore.loop.members import ActorPool
from rlcore.loop.role_protocols import Publication, Spawned
from rlcore.loop.specs import EvaluationSpec, ScheduleSpec, SupervisionSpec
from rlcore.rollout.specs import ActorSpec, EngineJob
from rlcore.testing.records import make_sampling, make_trajectory
from rlcore.types import POLICY, TEACHER, Request, WeightManifest
from rlcore.weights.specs import TransportSpec

pytestmark = pytest.mark.cluster

# workers do not know the tests' folder
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
HANG_S = deadline(12)  # more than a publication takes
THREADS = {"max_concurrency": 4, "num_cpus": 1}


class Engine:
    """Takes requests and holds a version."""

    def __init__(self):
        self.requests, self.version = [], -1

    def start(self):
        return os.getpid()

    def submit(self, requests):
        if any(r.prompt_id == "refused" for r in requests):
            raise UserError("a rollout actor refused a request: it is too long")
        assert self.version >= 0, "was given work before it had weights"
        self.requests += [r.request_id for r in requests]

    def abort(self, request_ids):
        self.requests = [r for r in self.requests if r not in request_ids]

    def open_requests(self):
        return self.requests

    def update_weights(self, manifest, handle, on_publish):
        self.version = manifest.version
        return {"stop_s": 0.1}

    def status(self):
        return {
            "error": None,
            "heartbeat_age_s": 0.0,
            "pid": os.getpid(),
            "busy_s": 0.0,
            "steps": 0,
        }

    def state(self):
        return self.version, sorted(self.requests)


@pytest.fixture(scope="module", autouse=True)
def room_for_four():
    with cluster(RaySpec(num_cpus=4, object_store_mib=100), needed_cpus=1, needed_gpus=0):
        yield


def make_hosting(hang_timeout_s=HANG_S):
    return Hosting(
        ray=RaySpec(),
        schedule=ScheduleSpec(publish_timeout_s=60),
        supervision=SupervisionSpec(
            heartbeat_s=0.5,
            hang_timeout_s=hang_timeout_s,
            start_timeout_s=60,
            max_restarts=3,
        ),
        transport=TransportSpec(),
        evaluation=EvaluationSpec(),
        run_dir="",
        own_nodes=False,
    )


class World:
    def __init__(self, count):
        self.notes = []
        self.hosting = make_hosting()
        self.fleet = Fleet(
            [ActorPool("bf16", self.spawn, count)],
            self.hosting.schedule,
            self.hosting.supervision,
            joined=False,
            note=self.notes.append,
        )
        self.supervisor, self.assignments = self.fleet.supervisor, self.fleet.assignments

    def spawn(self, name):
        handle = ray.remote(**THREADS)(Engine).remote()
        started = handle.start.remote()
        return Spawned(
            RayRolloutActor(handle, name, started, self.hosting),
            placed=PendingReply(handle.__ray_ready__.remote(), "its process"),
            started=PendingReply(started, "its start"),
        )

    def handle(self, index):
        return self.fleet.members[index].process.client.handle

    def pid(self, index):
        return ray.get(self.handle(index).start.remote(), timeout=deadline(20))

    def state(self, index):
        return ray.get(self.handle(index).state.remote(), timeout=deadline(20))

    def lost(self):
        return self.assignments.take_waiting().lost

    async def settled(self, count):
        await self.until(lambda: len(self.fleet.rotation()) == count)

    async def until(self, holds):
        """Watch the fleet until something holds."""
        end = time.monotonic() + deadline(60)
        while True:
            await self.supervisor.watch()
            if holds():
                return
            assert time.monotonic() < end, self.notes
            await asyncio.sleep(0.1)


def group(number):
    ids = np.ones(2, np.int32)
    return [Request(number, i, f"t/train/{number}", ids, make_sampling(), seed=0) for i in range(2)]


def weights(version):
    manifest = WeightManifest(version, (), (), "float32", {}, True)
    return Publication(version, {POLICY: (manifest, None)})


def play(scenario, count):
    async def run():
        world = World(count)
        for client in world.fleet.clients():
            await asyncio.to_thread(ray.get, client.starting[0][0], timeout=deadline(60))
        await world.fleet.publish(weights(0))
        try:
            await scenario(world)
        finally:
            await world.supervisor.close()
            for client in world.fleet.clients():
                client.kill()

    asyncio.run(run())


def test_a_killed_actor_is_replaced_and_its_groups_are_lost():
    async def scenario(world):
        world.assignments.assign({0: group(0), 1: group(1)})
        os.kill(world.pid(0), signal.SIGKILL)
        await world.until(lambda: world.supervisor.replacements)
        assert [m.name for m in world.fleet.rotation()] == ["bf16-1"]
        assert await world.fleet.publish(weights(1)) == {"stop_s": 0.1}
        lost = world.lost()
        assert list(lost) == [0]
        world.assignments.assign(lost)
        await world.settled(2)
        assert world.state(1) == (1, ["train:0:0", "train:0:1", "train:1:0", "train:1:1"])
        assert world.state(0) == (1, [])
        assert any("bf16-0 is replaced: its process died" in note for note in world.notes)

    play(scenario, 2)


def test_a_stopped_process_holds_up_nobody_and_goes_on_when_it_wakes():
    async def scenario(world):
        pid = world.pid(0)
        world.assignments.assign({7: group(7)})
        assert world.fleet.members[0].groups
        os.kill(pid, signal.SIGSTOP)
        try:
            publishing = asyncio.create_task(world.fleet.publish(weights(1)))
            await world.until(lambda: any("has not answered" in note for note in world.notes))
            await publishing  # the others have the weights, and the actor's deadline is not over
            assert world.supervisor.replacements == 0
            assert [m.name for m in world.fleet.rotation()] == ["bf16-1", "bf16-2"]
            world.assignments.assign_waiting(world.assignments.take_waiting())
            await world.until(lambda: world.state(1) == (1, ["train:7:0", "train:7:1"]))
        finally:
            os.kill(pid, signal.SIGCONT)
        await world.settled(3)
        assert world.state(0) == (1, ["train:7:0", "train:7:1"])
        assert world.supervisor.replacements == 0

    play(scenario, 3)


def test_a_process_that_stays_stopped_is_killed_and_another_takes_its_place():
    async def scenario(world):
        process = psutil.Process(world.pid(0))
        world.assignments.assign({7: group(7)})
        process.suspend()
        await world.until(lambda: world.supervisor.replacements)
        assert any(f"cluster.hang_timeout_s={HANG_S:g}" in note for note in world.notes)
        await world.settled(1)
        assert list(world.lost()) == [7]
        wait_for_end([process], 20)

    play(scenario, 1)


def test_what_an_engine_refuses_ends_the_run_with_its_sentence():
    async def scenario(world):
        refused = [Request(0, 0, "refused", np.ones(2, np.int32), make_sampling(), seed=0)]
        world.assignments.assign({0: refused})
        await asyncio.sleep(1)
        with pytest.raises(UserError, match=r"^a rollout actor refused a request: it is too long$"):
            await world.supervisor.watch()

    play(scenario, 1)


class Likelihoods:
    """A teacher's engine that finds every token sure."""

    def score(self, given):
        counts = [int(np.count_nonzero(sampled)) for _, sampled in given]
        return [
            (np.ones((n, 1), np.int32), np.zeros((n, 1), np.float32), np.zeros(n, np.float32))
            for n in counts
        ]


class Teaching(TeacherActor):
    def start(self):
        self._engine = Likelihoods()
        return os.getpid()


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_teacher_s_engine_that_dies_or_stops_is_replaced_and_scores_again(monkeypatch, sent):
    """Nobody waits beyond the deadline meanwhile, and records without scores go on."""
    monkeypatch.setattr(teacher_engines, "TeacherActor", Teaching)
    notes = []
    job = EngineJob(ActorSpec(), "teacher", "", max_len=8, logprobs_k=1)
    hang_s = deadline(3)
    teacher = start_engines(make_hosting(hang_s), job, notes.append)
    ask = TeacherOutlet(teacher.handles, 1.0)

    def scored():
        record = make_trajectory(0, 0)
        ask([record])
        return all(name in record.extras for name in TEACHER)

    process = psutil.Process(ray.get(teacher.starting[0][0], timeout=deadline(60)))
    TeacherOutlet(teacher.handles, deadline(20))([record := make_trajectory(0, 0)])
    assert TEACHER[0] in record.extras
    teacher.watch()
    ray.get(teacher.handles[0].state.remote(), timeout=deadline(20))  # answered after watch's
    teacher.watch()
    process.send_signal(sent)
    end = time.monotonic() + deadline(60)
    while not scored():
        teacher.watch()
        assert time.monotonic() < end, notes
    wait_for_end([process], 20)
    silent = any(f"did not answer for cluster.hang_timeout_s={hang_s:g}" in n for n in notes)
    # a dead one may be silent as well, where Ray takes longer than the deadline to say that it died
    assert silent or sent == signal.SIGKILL
    teacher.kill()
