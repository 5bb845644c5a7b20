"""What a person sees of a run: a live table (or a line a step), and at the end a summary with
sample completions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table

from rlcore.metrics.cells import CELLS, duration, evaluations, number
from rlcore.metrics.names import combine, declared
from rlcore.metrics.rows import Row
from rlcore.metrics.sinks import BaseSink, Decoded

RECENT = 20  # steps that the pace, and so the remaining time, is averaged over
COMPLETIONS = 4
COMPARED = (
    "reward/mean",
    "response_length/mean",
    "mismatch/kl_k3",
    "mismatch/ess",
    "staleness/mean",
)


class ConsoleSink(BaseSink):
    """A table that updates in place; without a terminal (or with `live` off) one line a step."""

    def __init__(
        self, *, run_dir: Path, total_steps: int, live: bool, console: Console | None = None
    ) -> None:
        self.console = console or Console()
        self.run_dir = run_dir
        self.total_steps = total_steps
        self.first: Row | None = None
        self.row: Row | None = None
        self.recent: list[Row] = []
        # (step, results), oldest first
        self.evals: list[tuple[int, dict[str, float | int | None]]] = []
        self.decoded: Sequence[Decoded] = ()
        # <task>_<mode> -> answers of the first and of the newest evaluation
        self.answers: dict[str, tuple[Sequence[Decoded], Sequence[Decoded]]] = {}
        self.started = time.monotonic()
        # A table that updates in place needs a terminal; a log file would repeat it twice a second.
        self._live: Live | None = None
        if live and self.console.is_terminal:
            self._live = Live(
                self.table(), console=self.console, refresh_per_second=2, transient=True
            )

    def log(self, row: Row) -> None:
        self.first = self.first or row
        self.row = row
        self.recent = [*self.recent, row][-RECENT:]
        found = evaluations(row)
        if found:
            at = row.get("eval/policy_version")
            version = row["step"] if at is None else at
            self.evals.append((int(version), found))  # type: ignore[arg-type]
        if self._live is not None:
            self._live.start()
            self._live.update(self.table())
        else:
            self.console.print(self.line(row), markup=False, highlight=False, soft_wrap=True)

    def samples(self, name: str, decoded: Sequence[Decoded]) -> None:
        if not decoded:
            return
        self.decoded = decoded
        if name.startswith("eval_"):  # eval_<version>_<task>_<mode>
            mode = name.split("_", 2)[2]
            self.answers[mode] = (self.answers.get(mode, (decoded, decoded))[0], decoded)

    def note(self, text: str) -> None:
        now = time.strftime("%H:%M:%S")
        self.console.print(f"[dim]{now}[/dim] {escape(text)}", highlight=False, soft_wrap=True)

    def finish(self, summary: Mapping[str, Any]) -> None:
        self.close()  # the live table would be drawn over the summary
        self.console.print(self.summary(summary))
        for shown in self._completions()[:COMPLETIONS]:
            self.console.print(shown)

    def _completions(self) -> list[RenderableType]:
        """Answers before and after, greedy ones if there are any; else the newest samples."""
        modes = sorted(self.answers, key=lambda mode: not mode.endswith("greedy"))
        if modes:
            first, newest = self.answers[modes[0]]
            if first is not newest:
                return [comparison(*pair) for pair in zip(first, newest)]
        return [completion(sample) for sample in self.decoded]

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def remaining(self, step: int) -> str:
        """Estimated time of the remaining steps at the recent pace."""
        seconds = [s for r in self.recent if (s := r.get("time/step_s")) is not None]
        pace = sum(seconds) / len(seconds) if seconds else 0.0
        return duration(pace * max(0, self.total_steps - step))

    def line(self, row: Row) -> str:
        """One step as one line."""
        step = int(row["step"])  # type: ignore[arg-type]
        parts = [f"step {step}/{self.total_steps}"]
        parts += [f"{c.label} {shown}" for c in CELLS if (shown := c.show(row)) is not None]
        parts += [f"eval {name} {number(value)}" for name, value in evaluations(row).items()]
        parts.append(f"remaining {self.remaining(step)}")
        return "  |  ".join(parts)

    def table(self) -> RenderableType:
        """The live view."""
        if self.row is None:
            return "starting"
        row, step = self.row, int(self.row["step"])  # type: ignore[arg-type]
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold")
        table.add_column(justify="left")
        for cell in CELLS:
            shown = cell.show(row)
            if shown is not None:
                table.add_row(cell.label, shown)
        if self.evals:
            at, found = self.evals[-1]
            for name, value in found.items():
                first = number(self.evals[0][1].get(name))
                table.add_row(f"eval {name}", f"{number(value)}  (version {at}, first {first})")
        elapsed = duration(time.monotonic() - self.started)
        title = (
            f"step {step}/{self.total_steps}   {elapsed} elapsed, {self.remaining(step)} remaining"
        )
        bar = Table.grid()
        bar.add_row(ProgressBar(total=self.total_steps, completed=step, width=60))
        folder = escape(str(self.run_dir))
        return Panel(Group(bar, table), title=title, subtitle=folder, expand=False)

    def summary(self, extra: Mapping[str, Any]) -> RenderableType:
        """First against last, and the means of the last steps."""
        title = f"run {escape(str(self.run_dir))}"
        table = Table(title=title, title_justify="left", show_edge=False)
        for heading in ("", "first", "last"):
            table.add_column(heading)
        if self.evals:
            first, last = self.evals[0][1], self.evals[-1][1]
            for name in last:
                table.add_row(f"eval {name}", number(first.get(name)), number(last[name]))
        if self.first is not None and self.row is not None:
            for name in (n for n in COMPARED if n in self.row):
                table.add_row(name, number(self.first.get(name)), number(self.row[name]))
            for name, value in self._recent_means().items():
                table.add_row(f"{name}, last {len(self.recent)} steps", "", value)
        for name, value in extra.items():
            shown = number(value) if isinstance(value, int | float) else escape(str(value))
            table.add_row(escape(str(name)), "", shown)
        return table

    def _recent_means(self) -> dict[str, str]:
        """Rates and the learner's waiting over the last steps."""
        means = combine([{k: v for k, v in r.items() if declared(k)} for r in self.recent])
        rates = ("throughput/rollout_tokens_per_s", "throughput/train_tokens_per_s")
        shown = {name: number(means[name]) for name in rates if name in means}
        if means.get("time/step_s") and "time/wait_data_s" in means:
            share = means["time/wait_data_s"] / means["time/step_s"]
            shown["learner waits"] = f"{share:.0%}"
        return shown


def completion(sample: Decoded) -> RenderableType:
    """One decoded trajectory."""
    prompt, response = (escape(str(sample.get(part, ""))) for part in ("prompt", "response"))
    title = escape(f"{sample.get('prompt_id', '')}  {_judged(sample)}")
    return Panel(f"[dim]{prompt}[/dim]{response}", title=title, title_align="left", expand=False)


def comparison(before: Decoded, after: Decoded) -> RenderableType:
    """The answers of two versions to one prompt."""
    table = Table.grid(padding=(0, 2))
    for name, sample in (("before", before), ("after", after)):
        table.add_row(f"[dim]{name}", escape(str(sample.get("response", ""))), _judged(sample))
    prompt = f"[dim]{escape(str(after.get('prompt', '')))}[/dim]"
    title = escape(str(after.get("prompt_id", "")))
    return Panel(Group(prompt, table), title=title, title_align="left", expand=False)


def _judged(sample: Decoded) -> str:
    reward = sample.get("reward")
    if reward is None:
        return f"not scored: {sample.get('score_status')}"
    return f"reward {number(reward)}"
