"""A shard's process, with a buffer that answers when the test says so."""

import asyncio

import pytest

from rlcore.advisor.simulate.clock import run_simulated
from rlcore.buffer.shard import ShardReply
from rlcore.cluster.clients.shards import ShardActor
from rlcore.references import ShardLost
from rlcore.serialization import dump_trajectory
from rlcore.testing.records import make_score, make_trajectory


class Method:
    def __init__(self, call):
        self.remote = call


class Buffer:
    def __init__(self):
        self.calls = []
        self.scores = []
        self.pause_s = 0.0
        self.answers = asyncio.Queue()
        self.add_report = Method(self._add)
        self.released = Method(self._released)

    async def _add(self, shard, told):
        self.calls.append([header.sample_index for header, _ in told.kept])
        self.scores.append([score.sample_index for score in told.scores])
        answer = await self.answers.get()
        if isinstance(answer, Exception):
            raise answer
        return ShardReply(answer, self.pause_s)

    async def _released(self, shard):
        return [1]


def record(index):
    return dump_trajectory(make_trajectory(0, index))


def test_what_comes_during_a_call_goes_together_into_the_next():
    async def main():
        buffer = Buffer()
        shard = ShardActor("one", buffer)
        adding = [asyncio.create_task(shard.add_records([record(i)])) for i in range(4)]
        await asyncio.sleep(0)
        assert buffer.calls == [[0]]
        for _ in range(2):
            buffer.answers.put_nowait([])
        await asyncio.gather(*adding)
        assert buffer.calls == [[0], [1, 2, 3]]
        assert await shard.fetch("one", [0, 3]) == [record(0), record(3)]

    asyncio.run(asyncio.wait_for(main(), 20))


def test_records_and_scores_go_together_and_pause_as_the_buffer_asks():
    async def main():
        buffer = Buffer()
        buffer.pause_s = 3.0
        shard = ShardActor("one", buffer)
        buffer.answers.put_nowait([])
        clock = asyncio.get_running_loop().time
        await shard.add_records([record(0)])
        assert clock() == 0.0  # after a rest the first message goes at once
        buffer.answers.put_nowait([])
        score = make_score(make_trajectory(0, 0), 1.0)
        later = [shard.add_scores([score]), shard.add_records([record(1)])]
        await asyncio.gather(*later)
        assert clock() == 3.0
        assert (buffer.calls, buffer.scores) == ([[0], [1]], [[], [0]])

    run_simulated(main())


def test_what_the_buffer_has_released_is_dropped():
    async def main():
        buffer = Buffer()
        shard = ShardActor("one", buffer)
        buffer.answers.put_nowait([0])
        await shard.add_records([record(0), record(1)])
        assert await shard.fetch("one", [1]) == [record(1)]
        with pytest.raises(ShardLost):
            await shard.fetch("one", [0])
        assert await shard.alive() == 0

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_buffer_that_refuses_is_not_believed_to_have_taken_it():
    async def main():
        buffer = Buffer()
        shard = ShardActor("one", buffer)
        buffer.answers.put_nowait(ValueError("refused"))
        with pytest.raises(ValueError, match="refused"):
            await shard.add_records([record(0)])

    asyncio.run(asyncio.wait_for(main(), 20))
