import asyncio

import pytest

from rlcore.advisor.simulate.clock import run_simulated
from rlcore.advisor.simulate.loop import Scenario, simulate
from rlcore.errors import RoleLost
from rlcore.loop.saver import CheckpointPace
from rlcore.loop.specs import CheckpointSpec, ScheduleSpec


def taken(standstill_s, *, seconds, step_s=10.0, **settings):
    """When checkpoints were taken in a run of `seconds`, and what was noted. `standstill_s`: of
    each in turn."""

    async def run():
        notes, at, costs = [], [], iter(standstill_s)
        pace = CheckpointPace(CheckpointSpec(**settings), notes.append)
        pace.begin()
        now = asyncio.get_running_loop().time
        begun = now()
        while now() - begun < seconds:
            await asyncio.sleep(step_s)
            if pace.due_by_time():
                at.append(round(now() - begun))
                with pace.taking():
                    await asyncio.sleep(next(costs, 0.0))
        return at, notes, pace

    return run_simulated(run())


def test_checkpoints_come_every_ten_minutes_by_default():
    at, notes, pace = taken([0.1] * 9, seconds=3600, step_s=6.0)
    assert at == [600, 1206, 1806, 2406, 3006] and notes == []
    assert pace.take_standstill_s() == pytest.approx(0.5) and pace.take_standstill_s() == 0


def test_no_more_than_two_percent_of_the_run_are_spent_on_them():
    at, notes, pace = taken([30.0, 30.0, 61.0, 61.0], seconds=30_000)
    assert at[:4] == [600, 2130, 3660, 6771]  # 30 s are 2 % of 1500, 61 of 3050
    assert pace.interval_s == 3050 and len(notes) == 2
    assert "30.0 s" in notes[0] and "every 1500 s" in notes[0] and "every_s" in notes[0]
    assert (30 + 30 + 61 + 61 * (len(at) - 3)) / 30_000 < 0.021


def test_slightly_slower_ones_are_not_each_worth_a_note():
    _, notes, _ = taken([12.5, 12.6, 12.7, 12.8, 12.9], seconds=10_000)
    assert len(notes) == 1


def test_zero_turns_those_by_time_off():
    at, notes, _ = taken([99.0], seconds=10_000, every_s=0)
    assert at == [] and notes == []


def _default(**schedule):
    return Scenario(ScheduleSpec(groups_per_step=4, **schedule), learn_s=100.0)


def test_a_run_without_settings_goes_on_from_its_timed_checkpoint(tmp_path):
    async def fail(simulation):
        await asyncio.sleep(0)
        simulation.learner.fails_at[16] = RoleLost("learner rank 0 died")

    with pytest.raises(RoleLost):
        simulate(_default(steps=24, max_staleness=1), tmp_path, fail)
    newest = max(int(p.name.removeprefix("step_")) for p in tmp_path.glob("step_*"))
    assert 8 <= newest < 16
    again = simulate(_default(steps=24, max_staleness=1), tmp_path, resume=True)
    assert again.reporter.rows[0]["step"] == newest + 1
    assert again.reporter.rows[-1]["checkpoint/step"] > newest
    trained = [g for step in again.learner.trained.values() for g in {g for g, _ in step}]
    assert len(trained) == len(set(trained)) == 24 * 4


def test_one_by_time_in_the_middle_of_a_phase_continues_exactly(tmp_path):
    async def fail(simulation):
        await asyncio.sleep(0)
        simulation.learner.fails_at[14] = RoleLost("learner rank 0 died")

    def scenario():
        return _default(steps=16, steps_per_publish=8)

    with pytest.raises(RoleLost):
        simulate(scenario(), tmp_path / "run", fail)
    second = simulate(scenario(), tmp_path / "run", resume=True)
    assert second.learner.resumed_phases, "the checkpoint was not in the middle of a phase"
    whole = simulate(scenario(), tmp_path / "whole")
    assert second.learner.trained == whole.learner.trained


def test_a_slow_disk_delays_those_by_time_and_nothing_else(tmp_path):
    async def slow(simulation):
        await asyncio.sleep(0)
        simulation.learner.write_s = 950.0

    scenario = _default(steps=40, max_staleness=1)
    simulation = simulate(scenario, tmp_path, slow)
    assert not any("left out" in n for n in simulation.reporter.notes)
    rows = simulation.reporter.rows
    assert max(row["time/step_s"] for row in rows) < 150
    assert 2 <= len({row["checkpoint/step"] for row in rows}) <= 5
    assert rows[-1]["checkpoint/failed"] == 0 and rows[-1]["checkpoint/interval_s"] == 600
