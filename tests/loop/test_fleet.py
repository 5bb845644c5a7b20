"""The fleet's rules on fakes of actors, in simulated time."""

import asyncio

import numpy as np
import pytest

from rlcore.advisor.simulate.actors import SimulatedActor, Speed, spawned
from rlcore.advisor.simulate.clock import run_simulated
from rlcore.errors import StageError, UserError
from rlcore.loop.fleet import Fleet
from rlcore.loop.members import ActorPool
from rlcore.loop.role_protocols import Publication
from rlcore.loop.specs import ScheduleSpec, SupervisionSpec
from rlcore.loop.timing import ITEMS
from rlcore.testing.records import make_sampling
from rlcore.types import POLICY, Request, WeightManifest


class World:
    """A fleet of actors that never finish a request, so that what they hold can be looked at."""

    def __init__(self, *, count=2, joined=False, max_restarts=3):
        self.notes = []
        self.refusing = 0  # so many of the next processes refuse weights
        self.limits = (
            ScheduleSpec(publish_timeout_s=5),
            SupervisionSpec(hang_timeout_s=3, start_timeout_s=20, max_restarts=max_restarts),
        )
        pool = ActorPool("bf16", self.spawn, count)
        self.fleet = Fleet([pool], *self.limits, joined=joined, note=self.notes.append)
        self.supervisor = self.fleet.supervisor
        self.assignments = self.fleet.assignments

    def spawn(self, name):
        actor = SimulatedActor(
            name,
            None,
            None,
            speed=Speed(start_s=2),
            tokens=lambda request: 10**9,
            limits=self.limits,
        )
        if self.refusing:
            self.refusing -= 1
            actor.refusing = "checksum of lm_head differs"
        return spawned(actor)

    def actor(self, index):
        return self.fleet.members[index].process.client

    async def open(self, index):
        """What an actor is working on, once it has heard everything."""
        await asyncio.sleep(1)
        return sorted(await self.actor(index).open_requests())

    def lost(self):
        return self.assignments.take_waiting().lost

    async def settled(self, count):
        for _ in range(100):
            await self.supervisor.watch()
            if len(self.fleet.rotation()) == count:
                return
            await asyncio.sleep(1)
        raise AssertionError(self.notes)


def group(number, samples=2):
    ids = np.ones(2, np.int32)
    return [
        Request(number, i, f"t/train/{number}", ids, make_sampling(), seed=0)
        for i in range(samples)
    ]


def weights(version):
    manifest = WeightManifest(version, (), (), "float32", {}, True)
    return Publication(version, {POLICY: (manifest, None)})


def play(scenario, **settings):
    async def run():
        world = World(**settings)
        await world.fleet.publish(weights(0))
        try:
            await scenario(world)
        finally:
            await world.supervisor.close()

    run_simulated(run())


def test_whole_groups_go_to_the_least_loaded():
    async def scenario(world):
        members = world.fleet.members
        world.assignments.assign({0: group(0, 4), 1: group(1), 2: group(2), 3: group(3)})
        assert [sorted(m.groups) for m in members] == [[0, 3], [1, 2]]
        world.assignments.withdraw({1, 3})
        assert [sorted(m.groups) for m in members] == [[0], [2]]
        world.assignments.assign({4: group(4)})
        assert sorted(members[1].groups) == [2, 4]

    play(scenario)


def test_a_long_wave_is_assigned_in_turns_as_it_would_be_in_one():
    wave = {g: group(g, 1 + g % 3) for g in range(3 * ITEMS + 5)}
    found = []

    async def scenario(world):
        messages = [[], []]
        for i, sent in enumerate(messages):
            submit = world.actor(i).submit

            async def note(requests, begun=None, sent=sent, submit=submit):
                sent.append([r.request_id for r in requests])
                await submit(requests, begun)

            world.actor(i).submit = note
        if found:
            await world.assignments.assign_in_turns(wave)
        else:
            world.assignments.assign(wave)
        await asyncio.sleep(1)
        found.append(messages)

    play(scenario)
    play(scenario)
    assert found[0] == found[1] and [len(sent) for sent in found[0]] == [1, 1]


def test_what_is_lost_before_its_turn_is_not_submitted():
    async def scenario(world):
        wave = {g: group(g) for g in range(3 * ITEMS)}
        process = world.fleet.members[0].process
        assigning = asyncio.create_task(world.assignments.assign_in_turns(wave))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        held = set(world.fleet.members[0].groups)
        world.supervisor.mark_failed(world.fleet.members[0], process, "died")
        await assigning
        assert held and set(world.lost()) == held
        others = {g for name in await world.open(1) for g in [int(name.split(":")[1])]}
        assert others == wave.keys() - held

    play(scenario)


def test_what_a_dead_actor_held_is_lost_and_its_replacement_has_the_newest_weights():
    async def scenario(world):
        fleet = world.fleet
        world.assignments.assign({0: group(0), 1: group(1)})
        world.actor(0).die()
        await world.supervisor.watch()
        assert [m.name for m in fleet.rotation()] == ["bf16-1"]
        took = await fleet.publish(weights(1))  # does not wait for the one on its way
        assert set(took) == {"stop_s", "drain_s"}
        lost = world.lost()
        assert list(lost) == [0] and not world.lost()
        world.assignments.assign(lost)
        assert await world.open(1) == ["train:0:0", "train:0:1", "train:1:0", "train:1:1"]
        await world.settled(2)
        assert world.actor(0).version == 1 and await world.open(0) == []
        assert world.supervisor.replacements == 1
        assert any("bf16-0 is replaced" in line for line in world.notes)

    play(scenario)


def test_work_waits_while_no_actor_is_healthy():
    async def scenario(world):
        hung = world.actor(0)
        hung.hang()
        world.assignments.assign({7: group(7)})  # taking work is what it fails at
        await asyncio.sleep(4)
        assert not world.fleet.rotation() and not world.lost()
        assert hung.dead
        assert await world.fleet.publish(weights(1)) == {}
        await world.settled(1)
        assert list(world.lost()) == [7] and world.actor(0).version == 1

    play(scenario, count=1)


def test_weights_that_do_not_arrive_cost_the_actor_and_too_many_failures_the_run():
    async def scenario(world):
        world.refusing = 1  # the process after that one is sound
        world.actor(0).die()
        await world.supervisor.watch()
        await world.settled(1)
        assert world.supervisor.replacements == 2
        assert any("checksum of lm_head differs" in line for line in world.notes)
        world.refusing = 9
        world.actor(0).die()
        with pytest.raises(StageError, match=r"cluster\.max_restarts=3"):
            await world.settled(1)

    play(scenario, count=1)


def test_a_node_that_takes_many_actors_with_it_does_not_use_up_the_restarts_of_each():
    async def scenario(world):
        for index in range(3):
            world.actor(index).die()
        await world.settled(3)
        world.actor(0).die()
        with pytest.raises(
            StageError, match=r"bf16-0 failed 2 times within an hour \(cluster\.max_restarts=1\)"
        ):
            await world.supervisor.watch()

    play(scenario, count=3, max_restarts=1)


def test_failures_of_more_than_an_hour_ago_are_forgotten():
    async def scenario(world):
        for _ in range(4):
            world.actor(0).die()
            await world.settled(2)
            await asyncio.sleep(3601)

    play(scenario, max_restarts=1)


def test_a_group_assigned_again_is_withdrawn_from_its_holder_first():
    async def scenario(world):
        world.assignments.assign({0: group(0, 3)})
        assert await world.open(0) == ["train:0:0", "train:0:1", "train:0:2"]
        assert len(await world.assignments.open_requests()) == 3
        world.assignments.assign({0: group(0, 3)[2:]})
        assert await world.open(0) == ["train:0:2"]

    play(scenario, count=1)


def test_overlapping_assignments_of_one_group_reach_its_engine_once():
    """Overdue, and its graders restarted, at the same moment."""

    async def scenario(world):
        world.assignments.assign({0: group(0)})
        world.assignments.assign({0: group(0)})
        world.assignments.assign({0: group(0)[1:]})
        assert await world.open(0) == ["train:0:1"]
        await world.supervisor.watch()  # an engine given a request twice would end the run

    play(scenario, count=1)


def test_the_fleet_grows_and_shrinks_while_it_works():
    async def scenario(world):
        fleet = world.fleet
        world.assignments.assign({0: group(0)})
        fleet.resize({"bf16": 3})
        assert len(fleet.rotation()) == 1  # the run does not wait for them
        await world.settled(3)
        assert [m.name for m in fleet.members] == ["bf16-0", "bf16-1", "bf16-2"]
        assert {world.actor(i).version for i in range(3)} == {0}
        world.assignments.assign({1: group(1), 2: group(2)})
        fleet.resize({"bf16": 1})
        assert sorted(world.lost()) == [1, 2]
        assert [m.name for m in fleet.members] == ["bf16-0"]
        assert world.supervisor.replacements == 0
        for counts, words in [({"fp8": 1}, "fp8"), ({"bf16": 0}, "at least one")]:
            with pytest.raises(UserError, match=words):
                fleet.resize(counts)
        fleet.resize({"bf16": 2})
        await world.settled(2)
        assert [m.name for m in fleet.members] == ["bf16-0", "bf16-3"]  # names are never reused

    play(scenario, count=1)


def test_a_late_reply_is_not_credited_to_the_process_that_took_its_place():
    """The old process loads weights slowly, fails meanwhile, and answers after its replacement
    came."""

    async def scenario(world):
        member = world.fleet.members[0]
        old = member.process
        world.actor(0).hang()
        publishing = asyncio.create_task(world.fleet.publish(weights(1)))
        await asyncio.sleep(0)
        world.supervisor.mark_failed(member, old, "a heartbeat said so")
        assert member.process is not old
        await publishing
        assert member.process.version == -1 and not member.healthy

    play(scenario)


def test_busy_seconds_are_the_mean_over_training_actors_by_their_newest_heartbeats():
    async def scenario(world):
        fleet = world.fleet
        first, second = (m.process for m in fleet.members)
        first.status, second.status = {"pid": 1, "busy_s": 4.0}, {}
        assert fleet.take_busy_s() == 2.0
        first.status, second.status = {"pid": 1, "busy_s": 7.0}, {"pid": 2, "busy_s": 1.0}
        assert fleet.take_busy_s() == 2.0
        first.status = {"pid": 9, "busy_s": 0.5}  # a new process under the old name
        assert fleet.take_busy_s() == 0.25

    play(scenario)


def test_costs_of_steps_are_the_mean_over_the_actors_of_a_label_that_say():
    async def scenario(world):
        first, second = (m.process for m in world.fleet.members)
        first.status, second.status = {"pid": 1}, {"pid": 2, "costs": {"step_s": 0.5}}
        assert world.fleet.step_costs() == {"engine/bf16/step_s": 0.5}
        first.status = {"pid": 1, "costs": {"step_s": 0.3}}
        assert world.fleet.step_costs() == {"engine/bf16/step_s": 0.4}

    play(scenario)


def test_accepted_proposals_are_counted_since_the_last_row_over_the_actors_of_a_label():
    async def scenario(world):
        first, second = (m.process for m in world.fleet.members)
        first.status, second.status = {"pid": 1}, {"pid": 2, "proposed": 10, "accepted": 5}
        assert world.fleet.accepted() == {"engine/bf16/accepted": 0.5}
        first.status = {"pid": 1, "proposed": 20, "accepted": 4}
        second.status = {"pid": 2, "proposed": 20, "accepted": 10}
        assert world.fleet.accepted() == {"engine/bf16/accepted": 9 / 30}
        assert world.fleet.accepted() == {}

    play(scenario)


def test_figures_of_environments_are_summed_over_the_actors_that_play():
    playing = {"open": 3, "waiting": 2, "environment_s": 1.0, "calls": 4}
    playing |= {"errors": 1, "timeouts": 0, "unreadable_turns": 5}

    async def scenario(world):
        first, second = (m.process for m in world.fleet.members)
        first.status, second.status = {"pid": 1}, {"pid": 2}
        assert world.fleet.environment_figures() == {}
        first.status = {"pid": 1, "playing": playing}
        second.status = {"pid": 2, "playing": {**playing, "environment_s": 3.0}}
        found = world.fleet.environment_figures()
        assert (found["environment/open"], found["environment/waiting"]) == (6, 4)
        assert found["environment/call_s"] == 0.5  # 4 s over 8 calls
        assert (found["environment/errors"], found["environment/unreadable_turns"]) == (2, 10)

    play(scenario)
