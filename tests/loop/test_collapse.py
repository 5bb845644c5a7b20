"""The answer to a lost policy, in simulated runs of the whole loop: what is held, what stays kept,
and accounts that balance."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_audit import audit_uses

from rlcore.advisor.simulate.clock import run_simulated
from rlcore.advisor.simulate.loop import Scenario, SimulatedReporter, Simulation
from rlcore.errors import Collapsed
from rlcore.loop import checkpoint
from rlcore.loop.collapse import HELD, QUIET, SETTLES, SIGNS, Collapse
from rlcore.loop.run_plan import Progress
from rlcore.loop.specs import CheckpointSpec, ScheduleSpec
from rlcore.metrics.health import Health
from rlcore.metrics.rules.base import Course
from rlcore.metrics.specs import WarningsSpec


class Judging(SimulatedReporter):
    """Says which rules speak at each step; what a step does not name is silence."""

    def __init__(self, speaking):
        super().__init__()
        self._speaking = speaking

    def row(self, row):
        super().row(row)
        return frozenset(self._speaking.get(row["step"], ()))


def schedule(**changes):
    given = {"steps": 12, "groups_per_step": 4, "max_staleness": 3, "on_publish": "in_flight"}
    return ScheduleSpec(**{**given, **changes})


def run(root, speaking, resume=False, events=None, keep=2, **changes):
    """A run whose rules speak as given."""
    scenario = Scenario(
        schedule(**changes), checkpoint=CheckpointSpec(every=1, every_s=0, keep=keep)
    )

    async def main():
        class Told(Simulation):
            def make_reporter(self, beside):
                return Judging(speaking)

        return await Told(scenario, root).run(events, resume=resume)

    return run_simulated(main())


def evicted(simulation):
    return simulation.reporter.rows[-1].get(f"ledger/evicted/{HELD}", 0)


def oldest(simulation, step):
    return min(low for low, _ in simulation.learner.trained[step].values())


def test_hold_trains_on_nothing_that_was_sampled_before(tmp_path):
    before = run(tmp_path / "a", {})
    held = run(tmp_path / "b", {5: SIGNS})
    audit_uses(held)
    assert held.progress.step == 12 and evicted(before) == 0 < evicted(held)
    assert oldest(before, 5) < 5  # what the run would have trained on
    assert all(oldest(held, step) >= 5 for step in range(5, 12))
    (note,) = [n for n in held.reporter.notes if "on_collapse=hold" in n]
    assert note.startswith("step 5: the policy has fallen")
    assert f"{evicted(held):.0f} groups are given up" in note


@pytest.mark.parametrize("signs", [{"fallen"}, {"answer_kl"}, {"ess", "heldout"}, set()])
def test_one_sign_alone_holds_nothing(tmp_path, signs):
    simulation = run(tmp_path, {step: frozenset(signs) for step in range(1, 13)})
    assert evicted(simulation) == 0 and simulation.progress.held < 0


def test_a_hold_is_judged_by_new_rows_before_the_next(tmp_path):
    simulation = run(tmp_path, {step: SIGNS for step in range(3, 13)})
    audit_uses(simulation)
    held = [n for n in simulation.reporter.notes if "on_collapse=hold" in n]
    assert [n.split(":")[0] for n in held] == [f"step {s}" for s in range(3, 12, SETTLES)]


@pytest.mark.parametrize("changes", [{"max_staleness": 0, "on_publish": "finish"}, {"lag": 2}])
def test_where_nothing_could_be_fresher_hold_says_so_once(tmp_path, changes):
    changes = {"on_publish": "finish", **changes}
    if "lag" in changes:
        changes["max_staleness"] = changes["lag"]
    simulation = run(tmp_path, {step: SIGNS for step in range(3, 13)}, **changes)
    assert simulation.progress.step == 12 and evicted(simulation) == 0
    (note,) = [n for n in simulation.reporter.notes if "can hold nothing" in n]
    assert "use rollback or stop" in note


def test_off_does_nothing(tmp_path):
    told = {step: SIGNS for step in range(3, 13)}
    simulation = run(tmp_path, told, on_collapse="off")
    assert evicted(simulation) == 0 and simulation.progress.step == 12


@pytest.mark.parametrize("on_collapse", ["rollback", "stop"])
@pytest.mark.parametrize("keep", [1, 2])
def test_rollback_and_stop_end_the_attempt_with_a_checkpoint_from_before_the_alarm(
    tmp_path, on_collapse, keep
):
    told = {4: {"answer_kl"}, 5: {"answer_kl"}, 6: {"answer_kl"}, 9: SIGNS}
    with pytest.raises(Collapsed) as found:
        run(tmp_path, told, keep=keep, on_collapse=on_collapse)
    assert (found.value.step, found.value.alarm) == (9, 4)
    steps = [checkpoint.step_of(folder) for folder in sorted(tmp_path.glob("step_*"))]
    # the newest of before the alarm is kept; no checkpoint is taken of the lost policy
    assert 3 in steps and 2 not in steps and max(steps) == 8
    assert checkpoint.set_aside(tmp_path, 4).name == "step_000003"
    assert [folder.name for folder in tmp_path.glob("step_*")] == ["step_000003"]
    # what goes on from there trains the rest once, and its accounts balance
    simulation = run(tmp_path, {}, resume=True)
    audit_uses(simulation)
    assert simulation.progress.step == 12 and simulation.progress.alarm is None


def test_an_alarm_that_is_over_pins_nothing(tmp_path):
    steps = 4 + QUIET
    simulation = run(tmp_path, {2: {"answer_kl"}}, steps=steps, keep=1)
    assert simulation.progress.alarm is None
    assert [f.name for f in tmp_path.glob("step_*")] == [checkpoint.name_of(steps)]


def test_a_resumed_run_remembers_its_alarm_and_what_it_held(tmp_path):
    async def stop(simulation):
        await simulation.until(5)
        simulation.controller.request_stop()

    told = {4: {"answer_kl"}, 5: SIGNS}
    first = run(tmp_path, told, events=stop)
    assert (first.progress.alarm, first.progress.held) == (4, 5)
    again = run(tmp_path, {7: SIGNS}, resume=True)
    audit_uses(again)
    assert again.progress.held == 5  # rows 6 and 7 do not settle it
    assert all(oldest(again, step) >= 5 for step in range(6, 12))


@given(
    at=st.sets(st.integers(1, 11), max_size=4),
    eta=st.integers(1, 4),
    period=st.sampled_from([1, 2]),
    batches=st.sampled_from([1, 2]),
    epochs=st.sampled_from([1, 2]),
    on_publish=st.sampled_from(["finish", "abort", "in_flight"]),
)
@settings(max_examples=25, deadline=None)
def test_whatever_is_held_the_accounts_balance_and_the_run_ends(
    tmp_path_factory, at, eta, period, batches, epochs, on_publish
):
    simulation = run(
        tmp_path_factory.mktemp("run"),
        {step: SIGNS for step in at},
        max_staleness=eta,
        steps_per_publish=period,
        steps_per_phase=batches,
        epochs=epochs,
        on_publish=on_publish,
    )
    audit_uses(simulation)
    assert simulation.progress.step == 12


def test_the_rules_that_decide_are_rules():
    judged = Health(WarningsSpec(), Course())
    judged.add({"step": 1})
    assert {"answer_kl", "fallen"} == SIGNS <= set(WarningsSpec.model_fields)


def test_the_first_alarm_is_of_the_episode_that_ends_in_the_collapse():
    scenario, notes = Scenario(schedule(on_collapse="stop", steps=100)), []
    progress = Progress()
    collapse = Collapse(scenario.plan(), progress, notes.append)
    with pytest.raises(Collapsed) as found:
        for step in range(1, 80):
            progress.step = step
            collapse.judge({"answer_kl"} if step in (5, 60) else SIGNS if step == 62 else set())
    assert (found.value.step, found.value.alarm) == (62, 60) and not notes
