"""A buffer that is nearly full slows generation down and ends nothing."""

import pytest

from rlcore.loop.specs import ScheduleSpec
from rlcore.serialization import dump_trajectory
from rlcore.simulate.actors import Speed
from rlcore.simulate.loop import Scenario, simulate
from rlcore.testing.records import make_trajectory

RECORD = len(dump_trajectory(make_trajectory(1000, 1, turns=[((1, 2), (7,) * 10)])))
GROUPS, SAMPLES = 4, 2


@pytest.mark.parametrize("steps_of_room", [1.5, 2.0, 3.0])
@pytest.mark.parametrize("on_publish", ["finish", "in_flight"])
def test_a_run_goes_on_in_little_memory(steps_of_room, on_publish, tmp_path):
    """What arrives between asking for room and admitting shrinks the room."""
    schedule = ScheduleSpec(
        steps=60, groups_per_step=GROUPS, max_staleness=3, on_publish=on_publish
    )
    scenario = Scenario(
        schedule,
        samples=SAMPLES,
        max_bytes=int(steps_of_room * GROUPS * SAMPLES * RECORD),
        tokens=lambda request: 3 + 7 * (request.group_id % 2),  # arrivals never come together
        speed=Speed(step_s=0.03),
        learn_s=0.3,
    )
    simulation = simulate(scenario, tmp_path)
    assert simulation.progress.step == 60
    # until the first groups are whole, nobody knows how large they are
    used = max(row["buffer/bytes"] for row in simulation.reporter.rows[10:])
    assert used <= (steps_of_room + 1) * GROUPS * SAMPLES * RECORD
