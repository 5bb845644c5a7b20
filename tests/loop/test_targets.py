"""Set-points: the admitted staleness follows a statistic, slowly and within its bounds."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.loop.specs import CheckpointSpec, ScheduleSpec, TargetSpec
from rlcore.loop.targets import AdmittedStaleness
from rlcore.simulate.clients import FakeLearner
from rlcore.simulate.clock import run_simulated
from rlcore.simulate.loop import Scenario, Simulation

NAME = "mismatch/agreement_p5"


def controlled(state=None, **settings):
    targets = {"bf16": TargetSpec(**settings)}
    return AdmittedStaleness(targets, 12, several=False, state=state or {})


def drive(controller, agreement, steps):
    """The bound in force at each step, the statistic being a function of it and of the step."""
    bounds = []
    for step in range(steps):
        controller.observe({NAME: agreement(controller.bound, step)})
        bounds.append(controller.bound)
    return bounds


def test_the_statistic_is_held_and_the_bound_does_not_swing():
    """Agreement falls by 0.02 a step of staleness, with an alternating error of 0.008."""

    def agreement(bound, step):
        return 0.99 - 0.02 * bound + (0.008 if step % 2 else -0.008)

    bounds = drive(controlled(rate=0.05), agreement, 300)
    assert bounds[0] == 12 and set(bounds[150:]) <= {6, 7}
    assert abs(0.99 - 0.02 * bounds[-1] - 0.86) < 0.02
    changes = sum(a != b for a, b in pairwise(bounds[150:]))
    assert changes == 0


def test_a_policy_that_drifts_is_followed():
    bounds = drive(controlled(), lambda bound, step: 0.99 - 0.0001 * step * bound, 400)
    assert bounds[0] == 12 and bounds[-1] in (3, 4) and bounds == sorted(bounds, reverse=True)


@given(st.lists(st.floats(0, 1), max_size=60), st.integers(0, 60))
def test_it_stays_within_its_bounds_and_goes_on_from_a_checkpoint_exactly(found, at):
    whole, parts = controlled(least=3), controlled(least=3)
    for place, value in enumerate(found):
        if place == at:
            parts = controlled(least=3, state=parts.state())
        whole.observe({NAME: value})
        parts.observe({NAME: value})
        assert parts.state() == whole.state() and 3 <= whole.bound <= 12


def test_a_step_without_a_token_of_the_kind_moves_nothing():
    controller = AdmittedStaleness({"fp8": TargetSpec()}, 8, several=True, state={})
    controller.observe({NAME: 0.1, f"{NAME}@bf16": 0.1})
    assert controller.state() == {"fp8": [8, 8]}
    controller.observe({f"{NAME}@fp8": 0.1})
    assert controller.state()["fp8"][0] < 8
    assert AdmittedStaleness({}, 8, several=True, state={}).bound is None


class Drifting(FakeLearner):
    """Samples agree the less the older they are."""

    async def train_step(self, step):
        metrics = await super().train_step(step)
        return metrics | {NAME: 0.98 - 0.03 * metrics["staleness/mean"]}


class Drifted(Simulation):
    def make_learner(self):
        return Drifting(self.buffer, step_s=1.0)


def simulated(folder, steps, *, resume=False, **targets):
    schedule = ScheduleSpec(steps=steps, groups_per_step=4, max_staleness=12)
    checkpoint = CheckpointSpec(every=20)
    scenario = Scenario(schedule, checkpoint=checkpoint, actors=16, targets=targets)

    async def main():
        return await Drifted(scenario, folder).run(resume=resume)

    return run_simulated(main()).reporter.rows


def test_a_run_holds_its_set_point_also_after_a_resume(tmp_path):
    free = simulated(tmp_path / "free", 80)
    held = simulated(tmp_path / "held", 40, bf16=TargetSpec())
    assert free[-1]["staleness/mean"] > 6 and "control/bf16/staleness" not in free[-1]
    last = held[-1]["control/bf16/staleness"]
    rows = simulated(tmp_path / "held", 80, resume=True, bf16=TargetSpec())
    assert abs(rows[0]["control/bf16/staleness"] - last) <= 1
    assert sum(row[NAME] for row in rows[-20:]) / 20 == pytest.approx(0.86, abs=0.02)
    assert max(row["staleness/max"] for row in rows) <= 12
