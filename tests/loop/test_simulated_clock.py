import asyncio

import pytest

from rlcore.advisor.simulate.clock import run_simulated


def test_a_week_of_waiting_takes_no_time_and_events_come_in_order():
    async def main():
        seen = []

        async def after(seconds):
            await asyncio.sleep(seconds)
            seen.append((seconds, asyncio.get_running_loop().time()))

        await asyncio.gather(*(after(s) for s in (604800, 3, 0.5)))
        return seen

    assert run_simulated(main()) == [(s, pytest.approx(s)) for s in (0.5, 3, 604800)]


def test_deadlines_are_kept_in_simulated_time():
    async def main():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.sleep(100), 60)
        return asyncio.get_running_loop().time()

    assert run_simulated(main()) == pytest.approx(60)


def test_what_would_run_in_a_thread_takes_no_simulated_time():
    async def main():
        assert await asyncio.to_thread(lambda: 7) == 7
        with pytest.raises(OSError, match="full"):
            await asyncio.to_thread(_raise, OSError("full"))
        return asyncio.get_running_loop().time()

    assert run_simulated(main()) == 0


def _raise(error):
    raise error


def test_a_wait_for_nothing_is_an_error_and_so_is_one_without_end():
    async def forever():
        while True:
            await asyncio.sleep(1)

    with pytest.raises(RuntimeError, match="deadlock"):
        run_simulated(asyncio.Event().wait(), limit_s=None)
    with pytest.raises(TimeoutError):
        run_simulated(forever(), limit_s=100)
