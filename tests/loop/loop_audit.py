"""What holds of every simulated run, whatever its schedule and its faults."""

from collections import defaultdict

from rlcore.buffer.admission import StalenessBound


def steps_by_group(simulation):
    """The steps that trained on each group, ascending, over all attempts."""
    found = defaultdict(list)
    for step in sorted(simulation.learner.trained):
        for group in {group for group, _ in simulation.learner.trained[step]}:
            found[group].append(step)
    return found


def audit_uses(simulation):
    """Each group is trained on once in every epoch of one phase, within the staleness bound, and
    consumed by the last of these steps; the account balances."""
    spec, rows, done = (
        simulation.scenario.schedule,
        simulation.reporter.rows,
        simulation.progress.step,
    )
    phases, bound, used = spec.phases, StalenessBound.of(spec), steps_by_group(simulation)
    assert sorted(simulation.learner.trained) == list(range(done))
    per_step = defaultdict(int)
    for group, steps in used.items():
        uses = [steps[0], *phases.again(steps[0])]
        assert steps == [step for step in uses if step < done], (group, steps)
        assert phases.again(steps[0])[-1:] or phases.epochs == 1
        for step in steps:
            per_step[step] += 1
    assert len(used) == spec.groups_per_step * phases.batches_before(done)
    assert set(per_step.values()) <= {spec.groups_per_step}
    assert all(row["staleness/max"] <= bound.cap for row in rows)
    if rows:
        ledger = {k: v for k, v in rows[-1].items() if k.startswith("ledger/")}
        left = sum(ledger[f"ledger/{k}"] for k in ("consumed", "evicted", "failed", "live"))
        assert ledger["ledger/admitted"] == left
        last_uses = [steps[0] + phases.repeats for steps in used.values()]
        assert ledger["ledger/consumed"] == sum(step < done for step in last_uses)
