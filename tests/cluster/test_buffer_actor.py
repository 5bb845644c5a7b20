"""The buffer's process: what its long polls answer, and when."""

import asyncio

import pytest

from rlcore.advisor.simulate.clock import run_simulated
from rlcore.buffer import ReplayBuffer
from rlcore.buffer.admission import ByteLimit
from rlcore.buffer.shard import Shard, ShardReport
from rlcore.buffer.specs import BatchingSpec, SelectionSpec
from rlcore.cluster.actors.buffer import BufferActor
from rlcore.serialization import dump_trajectory
from rlcore.testing.records import make_score, make_trajectory


def on_an_actor(test):
    """Run a coroutine function of a buffer actor with one group admitted, in simulated time."""

    async def main():
        actor = BufferActor()
        batching = BatchingSpec(groups_per_step=1)
        limits = {"limit": ByteLimit(1 << 30), "run_seed": 0, "keep_samples": 1}
        await actor.start(ReplayBuffer(batching, SelectionSpec(), samples_per_group=2, **limits))
        assert await actor.admit(["digits/train/0"]) == [0]
        await test(actor)

    run_simulated(main())


def told(shard, *indices):
    drawn = [make_trajectory(0, i) for i in indices]
    kept = shard.put([dump_trajectory(t) for t in drawn])
    return ShardReport(kept, [make_score(t, float(t.sample_index)) for t in drawn])


def test_a_poll_ends_with_the_message_that_makes_it_true():
    async def test(actor):
        clock, shard = asyncio.get_running_loop().time, Shard("one")
        ready = asyncio.create_task(actor.wait_ready(0, 60.0, None))
        await asyncio.sleep(1)
        await actor.add_report("one", told(shard, 0))
        await asyncio.sleep(1)
        assert not ready.done()
        await actor.add_report("one", told(shard, 1))
        assert await ready and clock() == 2.0

    on_an_actor(test)


def test_a_poll_in_vain_ends_with_its_time():
    async def test(actor):
        assert await actor.wait_ready(0, 5.0, None) is False
        assert asyncio.get_running_loop().time() == 5.0

    on_an_actor(test)


def test_what_a_look_raises_is_raised_to_the_poll_and_not_to_the_message():
    async def test(actor):
        waiting = asyncio.create_task(actor.wait_ready(0, 60.0, None))
        await asyncio.sleep(1)
        actor.buffer.batches.next_step = 1
        await actor.set_versions(0, 0)
        with pytest.raises(ValueError, match="step 0 is out of order"):
            await waiting

    on_an_actor(test)


def test_the_more_shards_there_are_the_longer_each_pauses():
    async def test(actor):
        pauses = []
        for name in ("one", "two", "one"):
            pauses.append((await actor.add_report(name, ShardReport())).pause_s)
        assert pauses[0] < pauses[1] == pauses[2]
        await actor.shard_lost("two")
        assert (await actor.add_report("one", ShardReport())).pause_s == pauses[0]

    on_an_actor(test)


def test_records_and_scores_of_one_message_are_taken_both_or_reported():
    async def test(actor):
        drawn = make_trajectory(5, 0)  # of a group that was not admitted
        with pytest.raises(ValueError, match="never asked for"):
            await actor.add_report("one", ShardReport([], [make_score(drawn, 1.0)]))
        with pytest.raises(Exception, match="refused a message"):
            await actor.alive()

    on_an_actor(test)
