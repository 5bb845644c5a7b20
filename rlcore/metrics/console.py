"""What a person sees of a run: a live table (or a line a step), and at the end a summary with sample completions."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table

from rlcore.metrics.names import combine, declared, is_accuracy
from rlcore.metrics.rows import Row
from rlcore.metrics.sinks import BaseSink, Sample

RECENT = 20  # steps that the pace, and so the time left, is averaged over
COMPLETIONS = 4


@dataclass(frozen=True, slots=True)
class Cell:
    """One line of the live table, made from the latest row."""

    label: str
    show: Callable[[Row], str | None]


def number(value: float | int | None, digits: int = 3) -> str:
    """A short readable number; "n/a" for what was not finite."""
    if value is None:
        return "n/a"
    if isinstance(value, int) or (float(value).is_integer() and abs(value) >= 1000):
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def duration(seconds: float) -> str:
    """1:02:03 or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def evaluations(row: Row) -> dict[str, float | int | None]:
    """Held-out accuracies of a row, by task/metric."""
    return {n.removeprefix("eval/"): row[n] for n in row if is_accuracy(n)}


def _pair(first: str, second: str, text: str) -> Callable[[Row], str | None]:
    def show(row: Row) -> str | None:
        if first not in row and second not in row:
            return None
        return text.format(number(row.get(first)), number(row.get(second)))

    return show


def _wait_share(row: Row) -> str | None:
    wait, step = row.get("time/wait_data_s"), row.get("time/step_s")
    return f"{wait / step:.0%} of {number(step)} s" if wait is not None and step else None


def _failed_scores(row: Row) -> str | None:
    errors, timeouts = row.get("ledger/score_errors"), row.get("ledger/score_timeouts")
    return f"{number(errors or 0)} errors, {number(timeouts or 0)} timeouts" if errors or timeouts else None


CELLS = (
    Cell("reward", _pair("reward/mean", "reward/std", "{} ± {}")),
    Cell("response length", _pair("response_length/mean", "response_length/truncated_share", "{} tokens, {} cut off")),
    Cell("staleness", _pair("staleness/mean", "staleness/max", "mean {}, max {} steps")),
    Cell("mismatch", _pair("mismatch/kl_k3", "mismatch/ess", "KL {} nats, ESS {}")),
    Cell("entropy, gradient", _pair("entropy", "grad_norm", "{} nats, norm {}")),
    Cell(
        "tokens per second",
        _pair("throughput/rollout_tokens_per_s", "throughput/train_tokens_per_s", "{} sampled, {} trained"),
    ),
    Cell("learner waits", _wait_share),
    Cell("buffer", _pair("buffer/groups", "ledger/consumed", "{} groups ready, {} consumed")),
    Cell("failed scores", _failed_scores),
)


class ConsoleSink(BaseSink):
    """A rich table that updates in place; without a terminal (or with `live` off) one line a step."""

    def __init__(self, *, run_dir: Path, total_steps: int, live: bool, console: Console | None = None) -> None:
        self.console = console or Console()
        self.run_dir, self.total_steps = run_dir, total_steps
        self.first: Row | None = None
        self.row: Row | None = None
        self.recent: list[Row] = []
        self.evals: list[tuple[int, dict[str, float | int | None]]] = []  # (step, results), oldest first
        self.decoded: Sequence[Sample] = ()
        self.started = time.monotonic()
        self._live: Live | None = None
        if live and self.console.is_terminal:
            self._live = Live(self.table(), console=self.console, refresh_per_second=2, transient=True)

    def log(self, row: Row) -> None:
        self.first = self.first or row
        self.row = row
        self.recent = [*self.recent, row][-RECENT:]
        found = evaluations(row)
        if found:
            at = row.get("eval/policy_version")
            self.evals.append((int(row["step"] if at is None else at), found))  # type: ignore[arg-type]
        if self._live is not None:
            self._live.start()
            self._live.update(self.table())
        else:
            self.console.print(self.line(row), markup=False, highlight=False, soft_wrap=True)

    def samples(self, name: str, decoded: Sequence[Sample]) -> None:
        if decoded:
            self.decoded = decoded

    def note(self, text: str) -> None:
        self.console.print(f"[dim]{time.strftime('%H:%M:%S')}[/dim] {escape(text)}", highlight=False, soft_wrap=True)

    def finish(self, summary: Mapping[str, Any]) -> None:
        self.close()
        self.console.print(self.summary(summary))
        for sample in list(self.decoded)[:COMPLETIONS]:
            self.console.print(completion(sample))

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    # ---- what is shown --------------------------------------------------------------------------------------------

    def pace(self) -> float:
        """Mean seconds a step over the last steps, 0 before the first."""
        seconds = [s for r in self.recent if (s := r.get("time/step_s")) is not None]
        return sum(seconds) / len(seconds) if seconds else 0.0

    def line(self, row: Row) -> str:
        """One step as one line."""
        step = int(row["step"])  # type: ignore[arg-type]
        parts = [f"step {step}/{self.total_steps}"]
        parts += [f"{c.label} {shown}" for c in CELLS if (shown := c.show(row)) is not None]
        parts += [f"eval {name} {number(value)}" for name, value in evaluations(row).items()]
        parts.append(f"left {duration(self.pace() * max(0, self.total_steps - step))}")
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
                table.add_row(
                    f"eval {name}", f"{number(value)}  (version {at}, first {number(self.evals[0][1].get(name))})"
                )
        left = self.pace() * max(0, self.total_steps - step)
        title = (
            f"step {step}/{self.total_steps}   {duration(time.monotonic() - self.started)} gone, {duration(left)} left"
        )
        bar = Table.grid()
        bar.add_row(ProgressBar(total=self.total_steps, completed=step, width=60))
        return Panel(Group(bar, table), title=title, subtitle=escape(str(self.run_dir)), expand=False)

    def summary(self, extra: Mapping[str, Any]) -> RenderableType:
        """First against last, and the means of the last steps."""
        table = Table(title=f"run {escape(str(self.run_dir))}", title_justify="left", show_edge=False)
        for heading in ("", "first", "last"):
            table.add_column(heading)
        if self.evals:
            for name in self.evals[-1][1]:
                table.add_row(f"eval {name}", number(self.evals[0][1].get(name)), number(self.evals[-1][1][name]))
        if self.first is not None and self.row is not None:
            for name in ("reward/mean", "response_length/mean", "mismatch/kl_k3", "mismatch/ess", "staleness/mean"):
                if name in self.row:
                    table.add_row(name, number(self.first.get(name)), number(self.row[name]))
            declared_only = [{k: v for k, v in r.items() if declared(k)} for r in self.recent]
            means = combine(declared_only)
            for name in ("throughput/rollout_tokens_per_s", "throughput/train_tokens_per_s"):
                if name in means:
                    table.add_row(f"{name}, last {len(self.recent)} steps", "", number(means[name]))
            if means.get("time/step_s") and "time/wait_data_s" in means:
                share = means["time/wait_data_s"] / means["time/step_s"]
                table.add_row(f"learner waits, last {len(self.recent)} steps", "", f"{share:.0%}")
        for name, value in extra.items():
            table.add_row(
                escape(str(name)), "", number(value) if isinstance(value, int | float) else escape(str(value))
            )
        return table


def completion(sample: Sample) -> RenderableType:
    """One decoded trajectory."""
    reward = sample.get("reward")
    shown = f"reward {number(reward)}" if reward is not None else f"not scored: {sample.get('score_status')}"
    text = f"[dim]{escape(str(sample.get('prompt', '')))}[/dim]{escape(str(sample.get('response', '')))}"
    return Panel(text, title=escape(f"{sample.get('prompt_id', '')}  {shown}"), title_align="left", expand=False)
