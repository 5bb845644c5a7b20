"""The circuit breaker with a clock of the test's own."""

import asyncio

import pytest

from rlcore.tasks.rewards.requests import Breaker, CircuitOpen


class Service:
    def __init__(self, failures=2, rest_s=10.0):
        self.now = 0.0
        self.notes = []
        self.breaker = Breaker(
            "it",
            failures=failures,
            rest_s=rest_s,
            note=self.notes.append,
            clock=lambda: self.now,
        )

    async def fail(self, why="no"):
        await self.breaker.admit()
        self.breaker.failed(why)

    async def succeed(self):
        await self.breaker.admit()
        self.breaker.succeeded()


def run(play):
    asyncio.run(asyncio.wait_for(play, 20))


def test_failures_in_a_row_open_it_and_a_success_between_does_not():
    async def play():
        s = Service()
        await s.fail()
        await s.succeed()
        await s.fail()
        assert not s.breaker.open and s.notes == []
        await s.fail("status 503")
        assert s.breaker.open and "status 503" in s.notes[0]
        with pytest.raises(CircuitOpen, match="2 failed requests in a row, the last: status 503"):
            await s.breaker.admit()

    run(play())


def test_after_a_rest_one_request_is_tried_while_the_others_wait():
    async def play():
        s = Service()
        await s.fail()
        await s.fail()
        s.now = 10.0
        await s.breaker.admit()
        others = [asyncio.create_task(s.breaker.admit()) for _ in range(3)]
        await asyncio.sleep(0)
        assert not any(task.done() for task in others)
        s.breaker.succeeded()
        await asyncio.gather(*others)
        assert not s.breaker.open and "answers again, 10 s after" in s.notes[1]

    run(play())


def test_a_trial_that_fails_begins_another_rest():
    async def play():
        s = Service()
        await s.fail()
        await s.fail()
        s.now = 10.0
        await s.breaker.admit()
        waiting = asyncio.create_task(s.breaker.admit())
        await asyncio.sleep(0)
        s.breaker.failed("still no")
        with pytest.raises(CircuitOpen, match="3 failed requests in a row, the last: still no"):
            await waiting
        s.now = 19.9
        with pytest.raises(CircuitOpen):
            await s.breaker.admit()
        s.now = 20.0
        await s.succeed()
        assert not s.breaker.open and len(s.notes) == 2

    run(play())


def test_a_trial_that_is_withdrawn_lets_the_next_one_be_tried():
    async def play():
        s = Service(failures=1)
        await s.fail()
        s.now = 10.0
        await s.breaker.admit()
        waiting = asyncio.create_task(s.breaker.admit())
        await asyncio.sleep(0)
        s.breaker.withdrawn()
        await waiting
        s.breaker.succeeded()
        assert not s.breaker.open

    run(play())


def test_what_was_under_way_as_it_opened_does_not_prolong_the_rest():
    async def play():
        s = Service()
        for _ in range(4):
            await s.breaker.admit()
        for s.now in (0.0, 1.0, 5.0):
            s.breaker.failed("no")
        s.now = 11.0
        await s.breaker.admit()  # 10 s after it opened at 1.0
        s.breaker.withdrawn()
        assert len(s.notes) == 1

    run(play())
