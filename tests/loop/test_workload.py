"""Who has least to do, against the plain rule: a look at every member for every group."""

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.advisor.simulate.clock import run_simulated
from rlcore.loop.members import ActorPool, Member, Process, Roster, evaluation_id
from rlcore.loop.timing import TurnLimit, in_turns

PURPOSES = ("all", "training", "evaluation")


def plain_choice(roster, group_id):
    able = [m for m in roster.rotation() if m.serves(group_id) and group_id not in m.groups]
    return min(able, key=lambda m: sum(map(len, m.groups.values())), default=None)


def member(number):
    pool = ActorPool(PURPOSES[number % 3], None, 1, PURPOSES[number % 3], place=1 + number % 3)
    return Member(f"m-{number}", pool, Process(None))


@given(st.integers(0, 2**32), st.integers(1, 9))
@settings(max_examples=150, deadline=None)
def test_the_least_loaded_member_is_that_of_the_plain_rule(seed, count):
    rng, roster = random.Random(seed), Roster([])
    work, asked = roster.work, set()
    for number in range(count):
        roster.add(member(number))
    for _ in range(120):
        kind = rng.choice(["give"] * 6 + ["take", "take", "out", "join", "leave"])
        someone = rng.choice(roster.members) if roster.members else None
        if kind == "join" or someone is None:
            roster.add(member(rng.randrange(3)))
        elif kind == "out":
            someone.healthy = not someone.healthy
        elif kind == "leave" and len(roster.members) > 1:
            roster.remove(someone)
            work.take_all(someone)
        elif kind == "take" and someone.groups:
            work.take(someone, rng.choice(sorted(someone.groups)))
        else:
            numbers = [rng.randrange(40) for _ in range(3)]
            wanted = [rng.choice([n, evaluation_id(n, rng.randrange(4))]) for n in numbers]
            asked.update(wanted)
            with work.choosing(roster.in_rotation) as least_loaded:
                for group in wanted:
                    chosen = least_loaded(group)
                    assert chosen is plain_choice(roster, group)
                    if chosen is not None:
                        work.give(chosen, group, [None] * rng.randrange(1, 4))
        for held in asked:
            assert work.holders(held) == [m for m in roster.members if held in m.groups]
        assert all(m.load == sum(map(len, m.groups.values())) for m in roster.members)


def test_callers_beyond_a_turns_number_go_on_in_later_turns_in_order():
    async def scenario():
        turns, begun, turns_passed = TurnLimit(per_turn=2), [], 0

        async def caller(name):
            await turns.next()
            begun.append((turns_passed, name))

        tasks = [asyncio.create_task(caller(i)) for i in range(7)]
        tasks[3].cancel()  # it takes no place
        while turns_passed < 8:
            await asyncio.sleep(0)
            turns_passed += 1
        assert [name for _, name in begun] == [0, 1, 2, 4, 5, 6]
        by_turn = [sum(at == t for at, _ in begun) for t in range(8)]
        assert max(by_turn) == 2 and sum(by_turn) == 6
        await asyncio.wait_for(turns.next(), 1)  # and there is room again
        await asyncio.gather(*tasks, return_exceptions=True)

    run_simulated(scenario())


@pytest.mark.parametrize("count", [0, 3, 4, 9])
def test_a_long_list_lets_others_run_in_between(count):
    async def scenario():
        others = 0

        async def another():
            nonlocal others
            while True:
                others += 1
                await asyncio.sleep(0)

        beside = asyncio.create_task(another())
        found = [item async for item in in_turns(range(count), 3)]
        beside.cancel()
        assert found == list(range(count)) and others == max(0, (count - 1) // 3)

    run_simulated(scenario())
