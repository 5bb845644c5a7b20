"""What the feed makes of losses and failures, on a real buffer and a fleet that only takes note."""

import asyncio
from types import SimpleNamespace

import numpy as np

from rlcore.buffer.journal import load, save
from rlcore.runtime.feed import Feed, spans
from rlcore.runtime.shells.buffer import BufferShell
from rlcore.types import Request, SamplingSpec, Trajectory

PROMPTS = ["digits/train/0", "digits/train/1"]


class Client:
    """`BufferClient` without a process between."""

    def __init__(self, shell):
        self.shell = shell

    async def call(self, method, *args, what):
        return await getattr(self.shell, method)(*args)

    async def in_flight(self):
        return await self.shell.in_flight()


class World:
    """A feed whose fleet writes down what it is given, two samples a group."""

    def __init__(self):
        self.said, self.assigned, self.lost = [], [], {}
        self.shell = BufferShell()
        self.buffer = Client(self.shell)

        async def assign(groups):
            self.assigned.append(sorted(groups))

        self.fleet = SimpleNamespace(assign=assign, forget=lambda live: None, take_lost=lambda: self.lost)
        requests = SimpleNamespace(
            samples=2,
            group=lambda g, prompt: [Request(g, i, prompt, None, SamplingSpec(), seed=0) for i in range(2)],
        )
        self.feed = Feed(
            SimpleNamespace(request_timeout_s=60.0),
            fleet=self.fleet,
            buffer=self.buffer,
            prompts=None,
            requests=requests,
            evaluator=None,
            note=self.said.append,
            wanted_actors=lambda: None,
        )

    async def begin(self, groups_per_step=2):
        await self.shell.start({"groups_per_step": groups_per_step, "samples_per_group": 2})
        return await self.shell.admit((PROMPTS * groups_per_step)[:groups_per_step])


def unscorable(group_id, sample_index):
    empty = np.zeros(0, np.int32)
    return Trajectory(
        *(empty, empty, empty.astype(np.float32), np.zeros((0, 1), np.int32), np.zeros((0, 1), np.float32), empty),
        actor_id="bf16-0",
        actor_kind="bf16",
        group_id=group_id,
        prompt_id=PROMPTS[group_id % 2],
        sample_index=sample_index,
        finish_reason="stop",
    ).scored("error", error="ZeroDivisionError: no reference answer")


def test_a_grader_that_always_raises_is_told_of_with_its_reason_at_each_tenfold_number():
    async def scenario():
        world = World()
        await world.begin(20)
        await world.feed.tell_failed_scores()
        assert not world.said
        for group_id in range(20):
            await world.shell.add([unscorable(group_id, 0)])
            await world.feed.tell_failed_scores()
        assert [line.split(" samples")[0] for line in world.said] == ["1 of 1", "10 of 10"]
        reason = "digits/train/1: ZeroDivisionError: no reference answer"
        assert reason in world.said[1]
        assert reason in await world.shell.waiting_for(0)  # what a batch that never comes is explained with

    asyncio.run(scenario())


def test_a_prompt_that_ends_every_actor_it_meets_is_given_up_and_replaced(tmp_path):
    async def scenario():
        world = World()
        await world.begin()
        await world.feed._hand_out_again([0], "were held by lost actors")
        save(tmp_path / "journal", world.shell.buffer.snapshot())
        world = World()  # the count outlives a resume
        await world.shell.start({"groups_per_step": 2, "samples_per_group": 2})
        load(tmp_path / "journal", world.shell.buffer)
        await world.feed._hand_out_again([0, 1], "were held by lost actors")
        assert world.assigned == [[0, 1]] and "(0-1)" in world.said[0]
        await world.feed._hand_out_again([0, 1], "were held by lost actors")
        assert world.assigned == [[0, 1], [1]]
        assert "given up (0 (digits/train/0))" in world.said[-1]
        assert (await world.shell.metrics())["ledger/failed/lost_3_times"] == 1
        assert await world.shell.wait_room(0.0, False, 100) == 1  # another prompt takes its place

    asyncio.run(scenario())


def test_overdue_groups_are_counted_as_lost():
    async def scenario():
        world = World()
        await world.begin()
        await world.feed._hand_out(await world.buffer.in_flight())
        for _ in range(3):
            world.feed._live = dict.fromkeys(world.feed._live, 0.0)
            await world.feed._reissue_overdue()
        assert world.assigned == [[0, 1]] * 3 and not await world.buffer.in_flight()

    asyncio.run(scenario())


def test_groups_are_all_named():
    assert spans([*range(3, 40), 50, 1]) == "1, 3-39, 50"
