"""Update phases of several batches and epochs (schedule.steps_per_phase, schedule.epochs)."""

import asyncio

import pytest
from loop_audit import audit_uses, steps_by_group

from rlcore.advisor.simulate.loop import Scenario, simulate
from rlcore.buffer.admission import StalenessBound
from rlcore.errors import UserError
from rlcore.loop.specs import CheckpointSpec, EvaluationSpec, ScheduleSpec

SCHEDULES = {
    "epochs": {"epochs": 3},
    "two_batches": {"steps_per_phase": 2, "epochs": 2},
    "large_batch": {"steps_per_publish": 4, "epochs": 2},
    "phases_in_a_publish": {"steps_per_publish": 4, "steps_per_phase": 1, "epochs": 2},
    "eta_1": {"max_staleness": 1, "steps_per_phase": 2, "epochs": 2, "on_publish": "in_flight"},
    "eta_3": {"max_staleness": 3, "steps_per_phase": 3, "on_publish": "abort"},
    "eta_2_slow_publish": {"max_staleness": 2, "steps_per_publish": 4, "epochs": 2},
}


def schedule(name, **changes):
    return ScheduleSpec(**{"steps": 24, "groups_per_step": 2, **SCHEDULES[name], **changes})


def stop_after(step):
    async def stop(simulation):
        await simulation.until(step - 1)
        simulation.controller.request_stop()

    return stop


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_group_is_trained_on_once_an_epoch(name, tmp_path):
    simulation = simulate(Scenario(schedule(name)), tmp_path)
    audit_uses(simulation)
    phases = simulation.scenario.schedule.phases
    assert {len(steps) for steps in steps_by_group(simulation).values()} == {phases.epochs}
    assert simulation.reporter.rows[-1]["ledger/live"] == 0
    # one p_ref a phase, for all of its batches, before its first step
    assert simulation.learner.phases == [
        (list(range(start, start + phases.steps)), phases.batches)
        for start in range(0, 24, phases.steps)
    ]
    assert simulation.reporter.shown  # samples of a phase's first batch, however long it is


def test_the_cap_is_reached_and_kept():
    """Staleness counts optimizer steps: the last epoch is E-1 epochs later than the first."""
    for changes, cap in (
        ({"epochs": 4}, 3),
        ({"max_staleness": 2, "steps_per_phase": 2, "epochs": 2}, 5),
        ({"max_staleness": 2, "steps_per_publish": 8, "steps_per_phase": 2, "epochs": 2}, 9),
        ({"max_staleness": 2, "steps_per_publish": 2}, 3),
    ):
        assert StalenessBound.of(ScheduleSpec(**changes)).cap == cap


def test_a_synchronous_run_trains_on_the_newest_weights_and_ages_within_a_phase(tmp_path):
    rows = simulate(Scenario(schedule("two_batches", steps=8)), tmp_path).reporter.rows
    assert [row["staleness/max"] for row in rows] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [row["ledger/consumed"] for row in rows] == [0, 0, 2, 4, 4, 4, 6, 8]


def test_a_synchronous_phase_publishes_nothing_before_its_end(tmp_path):
    simulation = simulate(Scenario(schedule("two_batches", steps=8)), tmp_path)
    assert simulation.learner.published == [0, 4, 8]


def test_an_asynchronous_phase_publishes_within_itself_and_overlaps_with_generation(tmp_path):
    changes = {"max_staleness": 4, "steps_per_phase": 2, "epochs": 2, "on_publish": "in_flight"}
    fast, slow = (
        simulate(
            Scenario(schedule("epochs", **{"epochs": 1, **both}), learn_s=2.0), tmp_path / str(i)
        )
        for i, both in enumerate((changes, {**changes, "max_staleness": 0, "on_publish": "finish"}))
    )
    assert fast.learner.published == list(range(25))
    assert sum(row["time/wait_data_s"] for row in fast.reporter.rows[4:]) < 0.5
    assert fast.progress.seconds < slow.progress.seconds


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("at", [3, 4, 6, 7])
def test_a_run_stopped_in_a_phase_goes_on_in_it(name, at, tmp_path):
    scenario = Scenario(schedule(name), evaluation=EvaluationSpec(every=5, prompts=4))
    first = simulate(scenario, tmp_path / "run", stop_after(at))
    assert first.progress.step == at
    audit_uses(first)
    second = simulate(scenario, tmp_path / "run", resume=True)
    audit_uses(second)
    phases = scenario.schedule.phases
    within = at % phases.steps != 0
    assert bool(second.learner.resumed_phases) == within
    if within:
        rest = list(range(at, phases.end(at)))
        assert second.learner.phases[0] == (rest, min(phases.batches, len(rest)))
    if scenario.schedule.synchronous:  # to the sample, as if it had never been stopped
        whole = simulate(scenario, tmp_path / "whole")
        assert second.learner.trained == whole.learner.trained


def test_an_asynchronous_resume_in_a_phase_publishes_the_learners_own_weights(tmp_path):
    """Groups in flight were admitted at versions that were published within the phase."""
    simulate(Scenario(schedule("eta_1")), tmp_path, stop_after(6))
    resumed = simulate(Scenario(schedule("eta_1")), tmp_path, resume=True)
    assert resumed.learner.published[0] == 6
    assert resumed.learner.resumed_phases == [str(tmp_path / "step_000006" / "learner")]


@pytest.mark.parametrize("steps", [5, 6, 7])
def test_a_plan_that_ends_in_a_phase_and_is_made_longer_continues_exactly(steps, tmp_path):
    ends = simulate(Scenario(schedule("two_batches", steps=steps)), tmp_path / "run")
    audit_uses(ends)
    longer = simulate(Scenario(schedule("two_batches", steps=12)), tmp_path / "run", resume=True)
    whole = simulate(Scenario(schedule("two_batches", steps=12)), tmp_path / "whole")
    assert longer.learner.trained == whole.learner.trained


def test_a_lost_learner_repeats_the_phase_from_the_checkpoint_within_it(tmp_path):
    async def fail(simulation):
        await asyncio.sleep(0)
        simulation.learner.fails_at[7] = RuntimeError("the learner is gone")

    scenario = Scenario(schedule("eta_1"), checkpoint=CheckpointSpec(every=3))
    with pytest.raises(RuntimeError):
        simulate(scenario, tmp_path, fail)
    again = simulate(scenario, tmp_path, resume=True)
    assert again.learner.phases[0] == ([6, 7], 2)
    audit_uses(again)


def test_dynamic_sampling_and_train_on_best_replace_whole_groups_within_phases(tmp_path):
    from rlcore.buffer.specs import SelectionSpec

    scenario = Scenario(
        schedule("eta_1"),
        samples=4,
        selection=SelectionSpec(dynamic_sampling=True, train_on_best=2),
        # equal in two groups of three, also among the best two
        reward=lambda a: float(a.sample_index % 2 == 0 and a.group_id % 3 == a.sample_index // 2),
    )
    simulation = simulate(scenario, tmp_path)
    audit_uses(simulation)
    assert simulation.reporter.rows[-1]["ledger/evicted/filtered_equal_rewards"] > 0


@pytest.mark.parametrize(
    "changes", [{"epochs": 2}, {"epochs": 1}, {"steps_per_phase": 4}, {"steps_per_phase": 1}]
)
def test_other_epochs_than_the_checkpoints_are_refused_in_a_sentence(changes, tmp_path):
    start = "epochs" if changes.get("epochs") == 2 else "two_batches"
    simulate(Scenario(schedule(start)), tmp_path, stop_after(5))
    with pytest.raises(UserError, match=r"^schedule\.epochs=\d .* up to step 5: resume with"):
        simulate(Scenario(schedule(start, **changes)), tmp_path, resume=True)


@pytest.mark.parametrize(
    ("name", "eta", "within", "end"), [("eta_1", 0, 5, 8), ("eta_3", 0, 4, 6), ("eta_3", 1, 4, 6)]
)
def test_a_lower_bound_cannot_begin_within_a_phase_and_is_kept_from_its_end(
    name, eta, within, end, tmp_path
):
    lower = Scenario(schedule(name, max_staleness=eta))
    simulate(Scenario(schedule(name)), tmp_path, stop_after(within))
    said = rf"^schedule\.max_staleness={eta} .* step {within}.* up to step {end}\.$"
    with pytest.raises(UserError, match=said):
        simulate(lower, tmp_path, resume=True)
    simulate(Scenario(schedule(name)), tmp_path, stop_after(end), resume=True)
    again = simulate(lower, tmp_path, resume=True)
    assert again.progress.step == 24
    # also in the batches that were fetched ahead when the run was stopped
    cap = StalenessBound.of(lower.schedule).cap
    taken = [row for row in again.reporter.rows if row["step"] > end]
    assert len(taken) == 24 - end and all(row["staleness/max"] <= cap for row in taken)


def test_another_number_of_batches_a_phase_goes_on_where_there_is_one_epoch(tmp_path):
    simulate(Scenario(schedule("eta_3")), tmp_path, stop_after(4))
    changed = simulate(Scenario(schedule("eta_3", steps_per_phase=2)), tmp_path, resume=True)
    assert changed.progress.step == 24 and changed.learner.phases[1] == ([6, 7], 2)
