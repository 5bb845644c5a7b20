"""A run whose policy was lost (`schedule.on_collapse=rollback` or `stop`): the checkpoint that it
goes on from, the rate that would have held, and the record of rollbacks."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rlcore.buffer.admission import StalenessBound
from rlcore.config.schema import RunConfig
from rlcore.errors import Collapsed
from rlcore.files import replace_file
from rlcore.loop import checkpoint
from rlcore.metrics.digest import number
from rlcore.metrics.rows import Row, run_rows
from rlcore.metrics.rules.policy import HOLDS
from rlcore.metrics.step_lengths import step_lengths

RECORD = "rollbacks.json"  # of a run directory: what `rollbacks` reads


@dataclass(frozen=True, slots=True)
class Rollback:
    """A return to an earlier checkpoint. Example: Rollback(11, 3, 1e-4, 2e-4)"""

    fell: int  # the step at which the policy had fallen
    to: int  # the step that the run went on from
    lr: float  # its rate from then on
    given: float  # the run's learner.lr: with another one the rollback's rate does not hold


def rollbacks(run_dir: Path) -> list[Rollback]:
    """The rollbacks of a run so far, oldest first."""
    try:
        return [Rollback(**each) for each in json.loads((run_dir / RECORD).read_text())]
    except FileNotFoundError:
        return []


def rate_of(config: RunConfig) -> float:
    """The learning rate of a run, which its rollbacks have lowered. config.yaml keeps the one that
    was given, so that the words that a run was started with resume it."""
    done, given = rollbacks(Path(config.run_dir)), config.learner.lr
    return done[-1].lr if done and done[-1].given == given else given


def go_back(config: RunConfig, error: Collapsed) -> str:
    """Set the checkpoints of after the alarm aside and record the rollback, whose rate `rate_of`
    gives; returns a note. Raises Collapsed, with a sentence that says how to go on, where the run
    is not to go back (again)."""
    run_dir, schedule = Path(config.run_dir), config.schedule
    done = rollbacks(run_dir)
    if schedule.on_collapse != "rollback" or len(done) >= schedule.max_rollbacks:
        raise _stopped(config, error, len(done)) from error
    left = checkpoint.set_aside(run_dir / "checkpoints", error.alarm)
    lr = rate_of(config) / 2
    to = checkpoint.step_of(left) if left is not None else 0
    record = [*done, Rollback(error.step, to, lr, config.learner.lr)]
    replace_file(run_dir / RECORD, json.dumps([asdict(each) for each in record], indent=1))
    where = left.name if left is not None else "the beginning, since there was no checkpoint"
    return (
        f"{error}: rollback {len(record)} of schedule.max_rollbacks={schedule.max_rollbacks}, to "
        f"{where}, with learner.lr={lr:g}"
    )


def slowed(config: RunConfig) -> RunConfig:
    """The configuration with the rate that rollbacks have left."""
    learner = config.learner.model_copy(update={"lr": rate_of(config)})
    return config.model_copy(update={"learner": learner})


def _holding(config: RunConfig, rows: Sequence[Row], alarm: int) -> float | None:
    """The rate with which samples as old as the schedule lets them be would have stayed near the
    policy, by the rows up to the alarm. None where these do not say it."""
    until = [row for row in rows if int(row["step"] or 0) <= alarm]
    lengths = step_lengths(until, config.learner.step_bound or HOLDS)
    return lengths.rate(StalenessBound.of(config.schedule).cap) if lengths else None


def _stopped(config: RunConfig, error: Collapsed, times: int) -> Collapsed:
    run_dir = Path(config.run_dir)
    rows, folder = run_rows(run_dir), shlex.quote(config.run_dir)
    left = checkpoint.set_aside(run_dir / "checkpoints", error.alarm)
    now = rate_of(config)
    lr = min(_holding(config, rows, error.alarm) or now, now / 2)
    steps = range(error.alarm, error.step + 1)
    rewards = [row.get("reward/mean") for row in rows if row["step"] in steps]
    fell = f" (reward/mean {number(rewards[0])} to {number(rewards[-1])})" if rewards else ""
    again = f" after {times} rollbacks" if times else ""
    last = f"Its last checkpoint before is {left}" if left else "It has no checkpoint before that"
    return Collapsed(
        error.step,
        error.alarm,
        f"the policy fell by step {error.step}{fell}{again}; the first alarm was at step "
        f"{error.alarm} (schedule.on_collapse={config.schedule.on_collapse}). {last}; to go on "
        f"from there: rlcore train run_dir={folder} resume=auto learner.lr={lr:g}",
    )
