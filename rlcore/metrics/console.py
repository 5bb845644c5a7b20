"""The console of a run: a live table (or a line a step), and at the end a summary with sample
completions."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table

from rlcore.metrics.digest import (
    BRIEF,
    CELLS,
    KINDS_COMPARED,
    Digest,
    by_kind,
    change,
    changed_first,
    duration,
    evaluations,
    number,
)
from rlcore.metrics.rows import Row, run_rows
from rlcore.metrics.sinks import Decoded, Sink

COMPLETIONS = 4
PIPED = 10_000  # columns of a table's line where the output is no terminal
LOGGED = 160  # and of the boxes of a run's end
LINE, BETWEEN = 120, "  "  # characters of a step's line, and what is between its parts


def wide_console(columns: int = PIPED) -> Console:
    """A console for tables. A pipe or a file has no width, and rich's 80 columns would
    break words: lines have up to `columns` there, unless COLUMNS says otherwise."""
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = columns
    return console


class ConsoleSink(Sink):
    """A table that updates in place; without a terminal (or with `live` off) one line a step."""

    title = "the console (logging.console)"
    in_folder = False

    def __init__(
        self, *, run_dir: Path, total_steps: int, live: bool, console: Console | None = None
    ) -> None:
        self.console = console or wide_console(LOGGED)
        self.run_dir = run_dir
        self.total_steps = total_steps
        self.digest = Digest()
        self.now = ""  # what the run does, and waits for
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
        self.digest.add(row)
        self.show()

    def catch_up(self, rows: Iterable[Row]) -> None:
        """Read the rows of steps from before this console was started, without showing them."""
        for row in rows:
            self.digest.add(row)
        # The run's age is that of its rows, not of this console.
        self.started = time.monotonic() - ((self.digest.row or {}).get("time/total_s") or 0.0)

    def resume_at(self, step: int) -> None:
        """Begin with what the run's folder holds, so that "first" and "before" are the run's."""
        self.digest, self.answers = Digest(), {}
        for row in run_rows(self.run_dir):
            if (row["step"] or 0) <= step:
                self.digest.add(row)
        for file in sorted((self.run_dir / "samples").glob("eval_*_*.jsonl")):
            if int(file.stem.split("_")[1]) <= step:
                lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
                self.samples(file.stem, [json.loads(line) for line in lines])

    def show(self) -> None:
        """Update the live table, or print the line of the newest step."""
        if self._live is not None:
            self._live.start()
            self._live.update(self.table())
        elif self.digest.row is not None:
            line = self.line(self.digest.row)
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def activity(self, name: str, waits_for: str, step: int) -> None:
        self.now = f"{name}, waits for {waits_for}" if waits_for else name
        if self._live is not None and self._live.is_started:
            self.show()

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
        said = ("verdict", "stopped")
        facts = {name: value for name, value in summary.items() if name not in said}
        self.console.print(self.summary(facts))
        if verdict := summary.get("verdict"):
            self.console.print(verdict, markup=False, highlight=False, soft_wrap=True)
        if stopped := summary.get("stopped"):
            self.console.print(stopped, markup=False, highlight=False, soft_wrap=True)
        for shown in self._completions()[:COMPLETIONS]:
            self.console.print(shown)

    def _completions(self) -> list[RenderableType]:
        """Answers before and after, changed ones first and of greedy decoding if there is any; else
        the newest samples."""
        modes = sorted(self.answers, key=lambda mode: not mode.endswith("greedy"))
        if modes:
            first, newest = self.answers[modes[0]]
            if first is not newest:
                return [comparison(*pair) for pair in changed_first(first, newest)]
        return [completion(sample) for sample in self.decoded]

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def remaining(self, step: int) -> str:
        """Estimated time of the remaining steps at the recent pace."""
        return duration(self.digest.pace_s() * max(0, self.total_steps - step))

    def line(self, row: Row) -> str:
        """One step as one line of at most `LINE` characters, without its less important parts."""
        step = int(row["step"])  # type: ignore[arg-type]
        first, last = f"step {step}/{self.total_steps}", f"left {self.remaining(step)}"
        found = self.digest.shown(evaluations(row))
        parts = [f"{name} {number(value)}" for name, value in found.items()]
        parts[:0] = [shown for brief in BRIEF[:1] if (shown := brief(row)) is not None]
        parts += [shown for brief in BRIEF[1:] if (shown := brief(row)) is not None]
        kept = [first]
        for part in parts:
            if len(BETWEEN.join([*kept, part, last])) <= LINE:
                kept.append(part)
        return BETWEEN.join([*kept, last])

    def table(self) -> RenderableType:
        """The live view."""
        row = self.digest.row
        if row is None:
            return self.now or "starting"
        step = int(row["step"])  # type: ignore[arg-type]
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold")
        table.add_column(justify="left")
        for cell in CELLS:
            shown = cell.show(row)
            if shown is not None:
                table.add_row(cell.label, shown)
        if self.digest.evals:
            at, found = self.digest.evals[-1]
            for name, value in self.digest.shown(found).items():
                first = number(self.digest.evals[0][1].get(name))
                table.add_row(f"eval {name}", f"{number(value)}  (version {at}, first {first})")
        kinds = kinds_table(row)
        if kinds is not None:
            table.add_row("kinds", kinds)
        if self.now:
            table.add_row("now", escape(self.now))
        elapsed = duration(time.monotonic() - self.started)
        title = (
            f"step {step}/{self.total_steps}   {elapsed} elapsed, {self.remaining(step)} remaining"
        )
        bar = Table.grid()
        bar.add_row(ProgressBar(total=self.total_steps, completed=step, width=60))
        folder = escape(str(self.run_dir))
        return Panel(Group(bar, table), title=title, subtitle=folder, expand=False)

    def summary(self, extra: Mapping[str, Any]) -> RenderableType:
        """The summary: first and last values, and means over the last steps."""
        title = f"run {escape(str(self.run_dir))}"
        table = Table(title=title, title_justify="left", show_edge=False)
        for heading in ("", "first", "last"):
            table.add_column(heading)
        for figure in self.digest.figures():
            table.add_row(figure.label, figure.first, figure.shown)
        for name, value in extra.items():
            shown = number(value) if isinstance(value, int | float) else escape(str(value))
            table.add_row(escape(str(name)), "", shown)
        kinds = kinds_table(self.digest.row or {})
        return table if kinds is None else Group(table, kinds)


def kinds_table(row: Row) -> Table | None:
    """A step's samples by kind of actors; None where they are of one kind."""
    found = by_kind(row)
    if not found:
        return None
    table = Table(show_edge=False)
    for heading in ("actors", *found):
        table.add_column(escape(heading))
    for name in KINDS_COMPARED:
        values = [number(of[name]) if name in of else "" for of in found.values()]
        if any(values):
            table.add_row(name, *values)
    return table


def completion(sample: Decoded) -> RenderableType:
    """One decoded trajectory."""
    prompt, response = (escape(str(sample.get(part, ""))) for part in ("prompt", "response"))
    title = escape(f"{sample.get('prompt_id', '')}  {_judged(sample)}")
    reference = _reference(sample)
    text = f"[dim]{prompt}[/dim]{response}"
    text += f"\n[dim]reference  {escape(reference)}[/dim]" if reference else ""
    return Panel(text, title=title, title_align="left", expand=False)


def comparison(before: Decoded, after: Decoded) -> RenderableType:
    """The answers of two versions to one prompt."""
    table = Table.grid(padding=(0, 2))
    for name, sample in (("before", before), ("after", after)):
        table.add_row(f"[dim]{name}", escape(str(sample.get("response", ""))), _judged(sample))
    if reference := _reference(after):
        table.add_row("[dim]reference", escape(reference), "")
    prompt = f"[dim]{escape(str(after.get('prompt', '')))}[/dim]"
    title = escape(f"{after.get('prompt_id', '')}  {change(before, after)}")
    return Panel(Group(prompt, table), title=title, title_align="left", expand=False)


def _reference(sample: Decoded) -> str:
    """The reference answer, or its last line where it is long, as with a worked solution."""
    text = str(sample.get("reference") or "").strip()
    return text if len(text) <= LINE else text.splitlines()[-1][-LINE:]


def _judged(sample: Decoded) -> str:
    reward = sample.get("reward")
    if reward is None:
        return f"not scored: {sample.get('score_status', sample.get('status'))}"
    return f"reward {number(reward)}"
