"""Set-points: the admitted staleness follows a statistic, slowly and within its bounds."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.advisor.simulate.clients import SimulatedLearner
from rlcore.advisor.simulate.clock import run_simulated
from rlcore.advisor.simulate.loop import Scenario, Simulation
from rlcore.loop.specs import CheckpointSpec, ScheduleSpec, TargetSpec
from rlcore.loop.targets import PageRange, Ranges, SetPoints
from rlcore.serialization import load_trajectory
from rlcore.types import PageRule

NAME = "mismatch/agreement_p5"


def controlled(most=12, own_age=0, state=None, **settings):
    targets = {"bf16": TargetSpec(**settings)}
    return SetPoints(targets, Ranges(most, own_age), several=False, state=state or {})


def drive(controller, agreement, steps, own_age=0):
    """The bound in force and the age of the trained tokens at each step; the statistic is a
    function of the age and of the step.

    Batches wait in order, as many as the bound admits, so that a bound shows in the tokens that
    many steps later."""
    waiting, seen = [], []
    for step in range(steps):
        while len(waiting) <= controller.bound:
            waiting.append(step)
        age = own_age + step - waiting.pop(0)
        controller.observe({NAME: agreement(age, step), "staleness/max": age})
        seen.append((controller.bound, age))
    return seen


@pytest.mark.parametrize("own_age", [0, 7])
def test_the_statistic_is_held_and_the_bound_does_not_swing(own_age):
    """|log r| grows by 0.012 a step of staleness, with an alternating error of 0.008."""

    def agreement(age, step):
        return math.exp(-0.012 * age) + (0.008 if step % 2 else -0.008)

    seen = drive(controlled(32, own_age), agreement, 200, own_age)
    bounds, ages = zip(*seen)
    assert bounds[0] <= 2  # it begins at the least
    assert all(abs(math.exp(-0.012 * age) - 0.86) < 0.02 for age in ages[100:])
    assert sum(a != b for a, b in pairwise(bounds[100:])) == 0


@given(st.floats(0.5, 1.5), st.integers(2, 24), st.floats(0.05, 0.2))
def test_it_settles_whatever_the_law_by_which_samples_age(power, held, rate):
    """|log r| grows with a power of the age, and is 0.15 at `held` steps."""
    slope = -math.log(0.86) / held**power
    seen = drive(controlled(32, rate=rate), lambda age, _: math.exp(-slope * age**power), 400)
    bounds, ages = zip(*seen[-100:])
    # where a step of staleness is much, the bound may alternate between neighbours
    assert max(bounds) - min(bounds) <= 1 and {*ages} <= {*bounds}
    assert abs(bounds[0] - held) <= 1 or abs(math.exp(-slope * bounds[0] ** power) - 0.86) < 0.05


def test_a_policy_that_drifts_is_followed():
    seen = drive(controlled(rate=0.2), lambda age, step: math.exp(-0.00016 * step * age), 400)
    bounds = [bound for bound, _ in seen]
    assert bounds[20] == 12 and bounds[-1] in (2, 3)
    assert bounds[20:] == sorted(bounds[20:], reverse=True)


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 30)), max_size=60), st.integers(0, 60))
def test_it_stays_within_its_bounds_and_goes_on_from_a_checkpoint_exactly(found, at):
    whole, parts = controlled(least=3), controlled(least=3)
    for place, (value, age) in enumerate(found):
        if place == at:
            parts = controlled(least=3, state=parts.state())
        whole.observe({NAME: value, "staleness/max": age})
        parts.observe({NAME: value, "staleness/max": age})
        assert parts.state() == whole.state() and 3 <= whole.bound <= 12


@pytest.mark.parametrize("place", [1.0, 6.0, 12.0])  # a bound in steps, as it was kept before
def test_a_place_in_other_units_begins_at_the_bound_in_force(place):
    resumed = controlled(state={"bf16": {"moved": [[place, place]]}})
    assert resumed.bound == place
    resumed.observe({NAME: 0.86, "staleness/max": place})
    assert resumed.bound == place
    resumed.observe({NAME: 0.5, "staleness/max": place})
    assert resumed.bound < place or place == 1


def test_a_step_without_a_token_of_the_kind_moves_nothing():
    controller = SetPoints({"fp8": TargetSpec()}, Ranges(8), several=True, state={})
    controller.observe({NAME: 0.99, f"{NAME}@bf16": 0.99})
    assert controller.state() == {"fp8": {"moved": [[1, 1]]}}
    controller.observe({f"{NAME}@fp8": 0.99})
    assert controller.state()["fp8"]["moved"][0][0] > 1
    assert SetPoints({}, Ranges(8), several=True, state={}).bound is None


# four stretches of 1024 positions in pages of 16, all of a context of 4096 at most
START = PageRange(PageRule(0, 1024, (24, 24, 24, 24)), (64, 128, 192, 256))
STRETCH = "mismatch/stretch_{}/agreement_p5"


def paged(state=None, **settings):
    targets = {"sparse": TargetSpec(moves="pages", **settings)}
    ranges = Ranges(4, pages={"sparse": START})
    return SetPoints(targets, ranges, several=False, state=state or {})


def agreement_of(share, ease=0.35):
    """A statistic that rises with the share of a context's pages that is read."""
    return 1.0 - 0.5 * (1.0 - share) ** 2 / (1.0 + share / ease)


def test_pages_by_position_are_moved_to_where_each_stretch_holds_the_target():
    controller = paged()
    rules = [controller.page_rules["sparse"]]
    for step in range(400):
        blocks = controller.page_rules["sparse"].blocks
        shares = [kept / most for kept, most in zip(blocks, START.most)]
        noise = 0.005 * (-1) ** step
        controller.observe(
            {STRETCH.format(n): agreement_of(s) + noise for n, s in enumerate(shares, start=1)}
        )
        rules.append(controller.page_rules["sparse"])
    blocks = rules[-1].blocks
    assert blocks == tuple(sorted(blocks)) and blocks[0] < 24 < blocks[-1]
    found = [agreement_of(kept / most) for kept, most in zip(blocks, START.most)]
    assert all(abs(value - 0.86) < 0.03 for value in found), found
    assert len(set(rules[200:])) == 1  # it does not swing
    changed = [a != b for a, b in pairwise(rules)]
    assert rules[-1].version == sum(changed) > 3
    assert all(a.version + (a.blocks != b.blocks) == b.version for a, b in pairwise(rules))


@given(
    st.lists(st.tuples(st.integers(1, 4), st.floats(0, 1)), max_size=60),
    st.integers(0, 60),
)
def test_pages_stay_within_bounds_and_go_on_from_a_checkpoint_exactly(found, at):
    whole, parts = paged(least=4), paged(least=4)
    for place, (n, value) in enumerate(found):
        if place == at:
            parts = paged(json.loads(json.dumps(parts.state())), least=4)
        whole.observe({STRETCH.format(n): value})
        parts.observe({STRETCH.format(n): value})
        rule = whole.page_rules["sparse"]
        assert parts.state() == whole.state() and parts.page_rules["sparse"] == rule
        assert all(a <= b for a, b in pairwise(rule.blocks)) and rule.length_step == 1024
        assert 4 <= rule.blocks[0] <= 64 and rule.blocks[-1] <= 256


def test_pages_without_a_target_stay_what_they_are():
    controller = SetPoints({}, Ranges(4, pages={"sparse": START}), several=False, state={})
    controller.observe({STRETCH.format(1): 0.1})
    assert controller.page_rules == {"sparse": START.rule} and controller.state() == {}


def test_a_share_follows_the_statistic_of_all_tokens():
    targets = {"int3": TargetSpec(moves="share")}
    controller = SetPoints(targets, Ranges(4), several=True, state={})
    assert controller.shares == {"int3": 1.0} and controller.bound is None
    for _ in range(60):
        part = controller.shares["int3"]
        controller.observe({NAME: 0.99 - 0.25 * part, f"{NAME}@int3": 0.3})
    assert controller.metrics()["control/int3/share"] == pytest.approx(0.52, abs=0.09)
    for _ in range(60):
        controller.observe({NAME: 0.2})
    assert controller.shares["int3"] == pytest.approx(0.05, abs=0.02)


class Drifting(SimulatedLearner):
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


class Reading(SimulatedLearner):
    """Sparse actors agree the less, the fewer of a context's pages their records say they read."""

    def step_seconds(self, records):
        self.rules = [PageRule.of_record(load_trajectory(r).extras) for r in records]
        return super().step_seconds(records)

    async def train_step(self, step):
        metrics = await super().train_step(step)
        rules, found = self.rules, {}
        for n, most in enumerate(START.most):
            values = [agreement_of(rule.blocks[n] / most) for rule in rules]
            found[STRETCH.format(n + 1)] = sum(values) / len(values)
        return metrics | found


class Read(Simulation):
    def make_learner(self):
        return Reading(self.buffer, step_s=1.0)


def test_requests_are_sent_with_the_pages_in_force_also_after_a_resume(tmp_path):
    def run(steps, *, resume=False):
        schedule = ScheduleSpec(steps=steps, groups_per_step=4, max_staleness=2)
        scenario = Scenario(
            schedule,
            checkpoint=CheckpointSpec(every=20),
            kinds={"sparse": 4},
            targets={"sparse": TargetSpec(moves="pages")},
            pages={"sparse": START},
        )

        async def main():
            return await Read(scenario, tmp_path).run(resume=resume)

        return run_simulated(main()).reporter.rows

    first = run(40)[-1]
    rows = run(120, resume=True)
    kept = [f"control/sparse/pages_{n}" for n in range(1, 5)]
    assert rows[0]["control/sparse/rule_version"] >= first["control/sparse/rule_version"] > 1
    assert all(abs(rows[0][k] - first[k]) < 0.5 * first[k] for k in kept)
    last = rows[-1]
    for n in range(1, 5):
        assert last[STRETCH.format(n)] == pytest.approx(0.86, abs=0.04)


class Rounded(Simulation):
    """Actors of one label agree the more, the more of their layers stay precise."""

    def make_learner(self):
        simulation = self

        class Learner(SimulatedLearner):
            async def train_step(self, step):
                metrics = await super().train_step(step)
                actors = simulation.actors.values()
                simulation.seen.append({a.name.partition("-")[0]: a.precise_layers for a in actors})
                layers = simulation.seen[-1]["int3"]
                found = 0.8 + 0.01 * layers
                return metrics | {f"{NAME}@int3": found, f"{NAME}@bf16": 1.0, NAME: 0.9}

        return Learner(self.buffer, step_s=1.0)


def test_layers_change_with_publications_of_their_own_kind_alone(tmp_path):
    schedule = ScheduleSpec(steps=60, groups_per_step=4, max_staleness=1)
    scenario = Scenario(
        schedule,
        kinds={"bf16": 1, "int3": 2},
        targets={"int3": TargetSpec(moves="layers", most=12, rate=0.2)},
        layers={"bf16": 0, "int3": 1},
    )

    async def main():
        simulation = Rounded(scenario, tmp_path)
        simulation.seen = []
        return await simulation.run()

    done = run_simulated(main())
    precise = [seen["int3"] for seen in done.seen]
    assert {seen["bf16"] for seen in done.seen} == {None}
    assert precise[0] == 1 and precise == sorted(precise) and precise[-1] in (4, 5, 6)
    assert done.reporter.rows[-1]["control/int3/layers"] == precise[-1]
