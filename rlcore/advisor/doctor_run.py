"""`rlcore doctor run=DIR`: how long the optimizer steps of a run may be while samples are late,
from the run's rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rlcore.commands.derived import course_of
from rlcore.config.schema import RunConfig
from rlcore.metrics.digest import number
from rlcore.metrics.rows import run_rows
from rlcore.metrics.rules.policy import HOLDS
from rlcore.metrics.step_lengths import step_lengths

STALENESS = (1, 2, 4, 8, 16)  # steps that a rate is given for, and the run's own
NEWEST = 20  # steps that say how it is now


def doctor_run(config: RunConfig, *, as_json: bool) -> int:
    """Print the largest learning rate of a run at each staleness. `config`: the run's own.
    Returns 0."""
    found = diagnosed(config)
    print(json.dumps(found, indent=1) if as_json else "\n".join(lines(found)))
    return 0


def diagnosed(config: RunConfig) -> dict[str, Any]:
    """kappa and the rates by staleness; without "kappa" where no row has a measure."""
    rows = run_rows(config.run_dir)
    bound, lr = config.learner.step_bound or HOLDS, config.learner.lr
    found: dict[str, Any] = {"run": config.run_dir, "steps": len(rows), "bound": bound, "lr": lr}
    largest = step_lengths(rows, bound)
    if largest is None:
        return found
    now = step_lengths(rows, bound, newest=NEWEST)
    own = course_of(config).staleness_bound
    return found | {
        "kappa": largest.kappa,
        "at_step": largest.step,
        "kappa_now": now.kappa if now is not None else None,
        "staleness_at_lr": largest.staleness(lr),
        "staleness_bound": own,
        "rates": {age: largest.rate(age) for age in sorted({*STALENESS, own} - {0})},
        "rates_now": {age: now.rate(age) for age in sorted({own} - {0})} if now else {},
    }


def lines(found: Mapping[str, Any]) -> list[str]:
    """The same in words."""
    if "kappa" not in found:
        return [
            f"{found['run']}, {found['steps']} steps: no row has samples from before a step, so "
            "how long steps in flight may be is not known; fresh samples need no bound."
        ]
    held, own = found["staleness_at_lr"], found["staleness_bound"]
    fits = f"samples up to {held} step{'s' if held > 1 else ''} old" if held else "no late samples"
    said = [
        f"{found['run']}, {found['steps']} steps: kappa {number(found['kappa'])} nats an answer "
        f"per squared summed learning rate, the largest, at step {found['at_step']}; "
        f"{number(found['kappa_now'])} in the last {NEWEST} steps that show it.",
        f"learner.lr={found['lr']:g} fits {fits}, by learner.step_bound={found['bound']:g}; the "
        "largest learner.lr by the age of samples in steps:",
        *(
            f"  {age:4d}  {rate:g}{' (the most that this run allows)' if age == own else ''}"
            for age, rate in found["rates"].items()
        ),
    ]
    for age, rate in found["rates_now"].items():
        if rate > found["rates"][age]:
            said.append(f"  {age:4d}  {rate:g} as it is now")
    return said
