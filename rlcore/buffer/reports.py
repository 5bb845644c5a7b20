"""Metrics and messages about a replay buffer."""

from __future__ import annotations

from rlcore.buffer.store import ReplayBuffer

AUDITED = 256  # groups that are looked at in one call


def audit(buffer: ReplayBuffer, groups: int | None = None) -> None:
    """Raise LedgerError unless all accounts match: the counts of all groups, and what is in so many
    groups, the next ones each time; None: in all."""
    live, batches = buffer.live, buffer.batches
    live.check()
    batches.check()
    entries = list(live.entries.values()) if groups is None else live.next_audited(groups)
    for entry in entries:
        live.check_group(entry)
        batches.check_group(entry)


def metrics(buffer: ReplayBuffer) -> dict[str, float]:
    """`buffer/*` and `ledger/*` as they stand now. Raises LedgerError unless all accounts match, as
    far as `audit` looks."""
    audit(buffer, AUDITED)
    live, intake = buffer.live, buffer.intake
    finished = len(live.entries) - live.waited_for
    return {
        "buffer/groups": float(finished),
        "buffer/in_flight": float(live.waited_for),
        "buffer/bytes": float(live.bytes),
        "buffer/duplicates": float(intake.duplicates),
        "buffer/late": float(intake.late),
        "buffer/resampled": float(live.resampled),
        **intake.totals.metrics(),
        **live.ledger.metrics(),
        **(live.accounts.metrics() if live.tasks else {}),
    }


def waiting_for(buffer: ReplayBuffer, step: int) -> str:
    """One line for an error message: what `take(step)` lacks."""
    waiting = buffer.batches.waiting()
    line = (
        f"step {step} needs {buffer.batches.bound.groups_per_step} groups: {waiting.finished} "
        f"finished, {len(waiting) - waiting.finished} in flight"
    )
    for group_id, (prompt_id, missing) in list(buffer.in_flight().items())[:1]:
        line += (
            f"; the oldest in flight is group {group_id} ({prompt_id}), with {len(missing)} of "
            f"{buffer.live.samples(buffer.live.entries[group_id])} samples missing"
        )
    failed, sentence = failed_scores(buffer)
    return f"{line}; {sentence}" if failed else line


def failed_scores(buffer: ReplayBuffer) -> tuple[int, str]:
    """Samples that could not be scored so far, and a clause that says so with the last reason."""
    errors, timeouts = buffer.ledger.score_errors, buffer.ledger.score_timeouts
    sentence = (
        f"{errors + timeouts} of {buffer.intake.totals.samples} samples so far could not be scored "
        f"({errors} errors, {timeouts} timeouts), the last: {buffer.intake.failed_score}"
    )
    return errors + timeouts, sentence
