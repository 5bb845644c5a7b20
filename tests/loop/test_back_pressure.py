"""A buffer that is nearly full slows generation down and ends nothing."""

import pytest

from rlcore.advisor.simulate.actors import Speed
from rlcore.advisor.simulate.loop import Scenario, simulate
from rlcore.loop.specs import ScheduleSpec
from rlcore.serialization import dump_trajectory
from rlcore.testing.records import make_trajectory

GROUPS, SAMPLES = 4, 2


def size(tokens):
    """Bytes of a record."""
    return len(dump_trajectory(make_trajectory(1000, 1, turns=[((1, 2), (7,) * tokens)])))


SMALL = [(room, how, 10, 60) for room in (1.5, 2.0, 3.0) for how in ("finish", "in_flight")]


@pytest.mark.parametrize(
    ("steps_of_room", "on_publish", "tokens", "steps"),
    [*SMALL, pytest.param(2.0, "in_flight", 50_000, 12, id="of 1 MB")],
)
def test_a_run_goes_on_in_little_memory(steps_of_room, on_publish, tokens, steps, tmp_path):
    """What arrives between asking for room and admitting shrinks the room."""
    record = size(tokens)
    assert record > 1 << 20 or tokens == 10
    schedule = ScheduleSpec(
        steps=steps, groups_per_step=GROUPS, max_staleness=3, on_publish=on_publish
    )
    scenario = Scenario(
        schedule,
        samples=SAMPLES,
        max_bytes=int(steps_of_room * GROUPS * SAMPLES * record),
        # arrivals never come together
        tokens=lambda request: tokens * (3 + 7 * (request.group_id % 2)) // 10,
        speed=Speed(step_s=0.3 / tokens),
        learn_s=0.3,
    )
    simulation = simulate(scenario, tmp_path)
    assert simulation.progress.step == steps
    used = max(row["buffer/bytes"] for row in simulation.reporter.rows)
    assert used <= (steps_of_room + 1) * GROUPS * SAMPLES * record
