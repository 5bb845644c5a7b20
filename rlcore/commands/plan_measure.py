"""`rlcore plan measure`: rates of this machine, from runs that it has done."""

from __future__ import annotations

import time
from pathlib import Path

from rlcore.commands import roles
from rlcore.commands.plan import check_simulated
from rlcore.config.compose import load
from rlcore.config.schema import RunConfig
from rlcore.errors import UserError
from rlcore.metrics.rows import read_rows
from rlcore.planner.measure import SPAN, MeasuredRun, measured
from rlcore.planner.specs import Rates
from rlcore.spec import refuse
from rlcore.tasks import make_task
from rlcore.tasks.scoring import Scorer
from rlcore.types import Answer

GRADED = 256  # answers, to time the graders
GRADING_S = 120.0  # deadline for them
GRADERS_START_S = 60.0


def measure(runs: str, out: str) -> int:
    """Write the rates that `rlcore plan rates=FILE` reads.

    `runs`: run directories, with commas between. Raises UserError.
    """
    found = [_read(name) for name in runs.split(",")]
    measured_runs = [run for _, run in found]
    config = found[0][0]
    rates = measured(measured_runs, grade_s=_grade_seconds(config))
    Path(out).write_text(rates.model_dump_json(indent=1) + "\n")
    for line in _described(measured_runs, rates):
        print(line)
    print(f"written to {out}")
    return 0


def _read(name: str) -> tuple[RunConfig, MeasuredRun]:
    folder = Path(name)
    if not (folder / "config.yaml").is_file():
        raise UserError(f"runs={name} is no run directory: it holds no config.yaml.")
    config = load([f"run_dir={name}", "resume=auto"])
    check_simulated(config)
    refuse(
        len(config.actor) > 1,
        f"runs={name} has actors of several kinds ({', '.join(config.actor)}), whose lengths and "
        "times cannot be told apart: measure a run of each kind.",
    )
    ((label, actor),) = config.actor.items()
    run = MeasuredRun(
        name,
        read_rows(folder / "metrics.jsonl"),
        label,
        max_running=actor.max_num_seqs,
        max_tokens=config.rollout.max_new_tokens,
        synchronous=roles.plan(config).synchronous,
        ref_pass=config.schedule.phases.steps > 1,
    )
    return config, run


def _grade_seconds(config: RunConfig) -> float | None:
    """Between two answers of the task's graders, timed here; None where a model or server grades
    too."""
    ((label, task),) = config.tasks.items()
    if task.weighed:
        return None
    items = make_task(task.name, task.args, label=label)
    item = items.item("train", 0)
    text = items.worked_answer(item) or item.answer
    scorer = Scorer({label: task}, config.grading, on_scored=lambda scored: None)
    try:
        answers = [
            Answer(i, 0, f"measure:{i}", f"{label}/train/0", text, tokens=len(text))
            for i in range(GRADED + 1)
        ]
        scorer.submit(answers[:1])  # the processes start with the first answer
        scorer.drain(GRADERS_START_S)
        begun = time.monotonic()
        scorer.submit(answers[1:])
        scorer.drain(GRADING_S)
        return (time.monotonic() - begun) / GRADED
    finally:
        scorer.close()


def _described(runs: list[MeasuredRun], rates: Rates) -> list[str]:
    actor, learner, lengths = rates.actor, rates.learner, rates.lengths
    batches = [float(run.learner_tokens().mean()) for run in runs]
    told = max(batches) >= SPAN * min(batches)
    how = "" if told else " (all of it by tokens: give a second run with another batch size)"
    return [
        f"engine step    {actor.decode_s * 1e3:.3g} ms, {actor.decode_request_s * 1e6:.3g} us a "
        f"request, {actor.decode_context_s * 1e9:.3g} ns a token of context; "
        f"{actor.prefill_tokens_per_s:.4g} prompt tokens/s",
        f"optimizer step {learner.step_s:.3g} s and {learner.token_s * 1e6:.3g} us a token{how}",
        f"publication    {learner.publish_s:.3g} s of the learner, {actor.load_s:.3g} s of actors",
        f"lengths        prompts {lengths.prompt}, answers {lengths.median:.3g} in the median, "
        f"spread {lengths.spread:.3g}",
        f"grading        {rates.grade_s * 1e3:.3g} ms an answer",
    ]
