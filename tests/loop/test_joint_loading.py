"""Publications through a group transport, on fakes in simulated time: who is asked to stop, who is
sent weights, and what the loss of an actor costs."""

import asyncio

import pytest

from rlcore.advisor.simulate.actors import SimulatedActor, Speed, spawned
from rlcore.advisor.simulate.clients import SimulatedLearner
from rlcore.advisor.simulate.clock import run_simulated
from rlcore.advisor.simulate.loop import Scenario, simulate
from rlcore.errors import RoleLost
from rlcore.loop.fleet import Fleet
from rlcore.loop.members import ActorPool
from rlcore.loop.role_protocols import Publication
from rlcore.loop.specs import ScheduleSpec, SupervisionSpec
from rlcore.types import POLICY, WeightManifest

LIMITS = (
    ScheduleSpec(publish_timeout_s=5),
    SupervisionSpec(heartbeat_s=1, hang_timeout_s=60, start_timeout_s=20, max_restarts=3),
)


class World:
    def __init__(self, count=3):
        self.notes, self.learner = [], SimulatedLearner(None)
        pool = ActorPool("bf16", self.spawn, count)
        self.fleet = Fleet([pool], *LIMITS, joined=True, note=self.notes.append)

    def spawn(self, name):
        speed = Speed(start_s=2)
        return spawned(
            SimulatedActor(name, None, None, speed=speed, tokens=lambda request: 9, limits=LIMITS)
        )

    def actor(self, index):
        return self.fleet.members[index].process.client

    async def publish(self, version):
        manifest = WeightManifest(version, (), (), "float32", {}, True)
        publication = Publication(version, {POLICY: (manifest, None)})
        return await self.fleet.publish(publication, self.learner.send)

    async def until(self, holds):
        """Watch until something holds of the third member."""
        while not holds(self.fleet.members[2]):
            await self.fleet.supervisor.watch()
            await asyncio.sleep(1)

    def versions(self):
        return [m.process.version for m in self.fleet.members]


def play(scenario, count=3):
    async def main():
        await scenario(World(count))

    run_simulated(main(), limit_s=300)


def test_weights_are_sent_once_every_actor_has_stopped_for_them():
    async def scenario(world):
        stopped, sends = [], world.learner.send
        for i in range(3):
            world.actor(i).speed = Speed(answer_s=0.1 * i)

        async def send(publication, receivers):
            stopped.extend(actor._sent is not None for actor in receivers)
            await sends(publication, receivers)

        world.learner.send = send
        took = await world.publish(1)
        assert stopped == [True] * 3 and set(took) == {"stop_s", "drain_s"}
        assert world.versions() == [1, 1, 1] and len(world.fleet.rotation()) == 3

    play(scenario)


def test_a_dead_actor_is_left_out_and_its_replacement_joins_at_the_next_publication():
    async def scenario(world):
        await world.publish(1)
        world.actor(1).die()  # nothing has noticed it yet
        await world.publish(2)
        assert world.learner.sent == [(1, 3), (2, 2)]
        assert [m.name for m in world.fleet.rotation()] == ["bf16-0", "bf16-2"]
        await asyncio.sleep(10)  # its replacement has started, and has no weights
        assert len(world.fleet.rotation()) == 2
        await world.publish(3)
        await asyncio.sleep(0.1)
        assert world.learner.sent[-1] == (3, 3) and world.versions() == [3, 3, 3]
        assert len(world.fleet.rotation()) == 3
        world.fleet.resize({"bf16": 4})
        await asyncio.sleep(10)
        await world.publish(4)
        await asyncio.sleep(0.1)
        assert world.learner.sent[-1] == (4, 4) and len(world.fleet.rotation()) == 4

    play(scenario)


def test_a_replacement_that_dies_before_it_joins_is_replaced_again():
    async def scenario(world):
        await world.publish(1)
        world.actor(1).die()
        await world.publish(2)
        await asyncio.sleep(10)
        world.actor(1).die()
        await world.publish(3)
        await asyncio.sleep(10)
        await world.publish(4)
        await asyncio.sleep(0.1)
        assert [n for _, n in world.learner.sent] == [3, 2, 2, 3]
        assert len(world.fleet.rotation()) == 3

    play(scenario)


def test_a_silent_actor_is_not_waited_for_and_catches_up_later():
    async def scenario(world):
        await world.publish(1)
        world.actor(2).hang()
        await world.until(lambda member: member.suspect)
        await world.publish(2)
        assert world.learner.sent[-1] == (2, 2)
        world.actor(2).wake()
        await world.until(lambda member: not member.suspect)
        assert len(world.fleet.rotation()) == 2  # its weights are older than the others'
        await world.publish(3)
        assert world.versions() == [3, 3, 3] and len(world.fleet.rotation()) == 3

    play(scenario)


def test_a_loss_while_weights_are_sent_costs_a_recovery():
    async def scenario(world):
        sends = world.learner.send

        async def send(publication, receivers):
            receivers[1].die()
            await sends(publication, receivers)

        world.learner.send = send
        with pytest.raises(RoleLost, match="version 1 was sent to actors in part"):
            await world.publish(1)

    play(scenario)


def test_a_loss_without_another_actor_costs_a_recovery():
    """Its replacement would wait for the next weights, which need what it is to sample."""

    async def scenario(world):
        await world.publish(1)
        world.actor(0).die()
        with pytest.raises(RoleLost, match="bf16-0 is lost, and no other actor"):
            await world.fleet.supervisor.watch()

    play(scenario, count=1)


@pytest.mark.parametrize("on_publish", ["finish", "abort", "in_flight"])
def test_a_whole_run_survives_the_loss_of_an_actor(tmp_path, on_publish):
    async def lose_one(simulation):
        await simulation.until(2)
        simulation.actors["bf16-1"].die()

    schedule = ScheduleSpec(steps=8, groups_per_step=4, max_staleness=2, on_publish=on_publish)
    run = simulate(Scenario(schedule, joined=True, actors=3), tmp_path, lose_one)
    assert run.progress.step == 8
    receivers = [count for _, count in run.learner.sent]
    assert receivers[0] == receivers[-1] == 3 and min(receivers) == 2
    assert len(run.started) == 4
