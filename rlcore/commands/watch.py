"""`rlcore watch`: the console of a run that was started elsewhere, out of its run directory."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from rlcore.commands.derived import health_of
from rlcore.config.schema import RunConfig
from rlcore.metrics.console import LOGGED, ConsoleSink, wide_console
from rlcore.metrics.digest import duration
from rlcore.metrics.log import NAME, read_log, shown
from rlcore.metrics.rows import RowTail
from rlcore.metrics.run_folder import records
from rlcore.metrics.sinks import FINAL, age_s, read_status

POLL_S = 1.0


def watch(
    config: RunConfig,
    *,
    once: bool,
    console: Console | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Show the run in `config.run_dir` until it has ended, or with `once` as it is now.

    Waits for as long as the run takes; Ctrl-C ends the display and not the run. Returns 1 if the
    run has failed, else 0. Raises UserError if metrics.jsonl is damaged.
    """
    view = View(config, console or wide_console(LOGGED), live=not once)
    try:
        ended = view.update()
        if once:
            view.print()
        while not once and not ended:
            sleep(POLL_S)
            ended = view.update()
        if ended and not once:
            view.end()
    finally:
        view.sink.close()
    return 1 if view.phase == "failed" else 0


def watch_log(
    run_dir: str | Path, *, once: bool, sleep: Callable[[float], None] = time.sleep
) -> int:
    """Print log.jsonl as it grows until the run has ended, or with `once` as it is now. Returns 1
    if the run has failed, else 0."""
    folder, at = Path(run_dir), 0
    while True:
        status = read_status(folder)  # before the log: once it is final, no entry is missing
        entries, at = read_log(folder, at)
        for entry in entries:
            print(shown(entry), flush=True)
        phase = str(status["phase"]) if status else "start"
        if once or phase in FINAL:
            return 1 if phase == "failed" else 0
        sleep(POLL_S)


class View:
    """A console that follows the files of a run directory."""

    def __init__(self, config: RunConfig, console: Console, *, live: bool) -> None:
        self._config = config
        self._console = console
        self._live = live and config.logging.console != "plain"
        self._printing = live  # steps and warnings as they come
        self._status: dict[str, Any] | None = None
        self._health = health_of(config)
        self._tail = RowTail(self.folder / "metrics.jsonl")
        self._caught_up = False
        self.sink = self._console_of_run()

    @property
    def folder(self) -> Path:
        return Path(self._config.run_dir)

    @property
    def phase(self) -> str:
        """The current activity of the run: a phase of status.json."""
        return str(self._status["phase"]) if self._status else "start"

    def update(self) -> bool:
        """Read new rows and status; returns whether the run has ended or failed."""
        # Before the rows: once the status says that the run has ended, no row is missing.
        self._status = read_status(self.folder)
        if self._tail.rewritten():  # resumed from a checkpoint: its later rows come again
            self.sink.close()
            self._health.resume([])
            self._tail = RowTail(self.folder / "metrics.jsonl")
            self._caught_up = False
            self.sink = self._console_of_run()
        rows = self._tail.new()
        self._show_activity()
        if not self._caught_up:
            self._caught_up = True
            self.sink.catch_up(rows)
            if self._printing:
                self.sink.show()
        elif self._printing:
            for row in rows:
                self.sink.log(row)
        for alarm in (alarm for row in rows for alarm in self._health.add(row)):
            if self._printing:
                self.sink.alarm(alarm)
        return self.phase in FINAL

    def print(self) -> None:
        """Print the present state of the run, every warning so far, and the verdict."""
        self._console.print(self.sink.table())
        verdict = self._health.verdict()
        for line in (*(f"warning: {text}" for text in verdict.warnings), verdict.said):
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def end(self) -> None:
        """Print the summary that the run's own console prints at its end."""
        if self.phase == "failed":
            assert self._status is not None
            step, log = self._status["step"], self.folder / NAME
            self.sink.note(f"the run failed after step {step}: see {log} (rlcore watch log=true)")
        for file in sorted((self.folder / "samples").glob("eval_*.jsonl")):
            self.sink.samples(file.stem, records(file))
        for file in sorted((self.folder / "samples").glob("step_*.jsonl"))[-1:]:
            self.sink.samples(file.stem, records(file))
        row = self.sink.digest.row or {}
        steps, seconds = row.get("step") or 0, row.get("time/total_s") or 0.0
        verdict = self._health.verdict().line
        self.sink.finish({"steps": steps, "seconds": seconds, "verdict": verdict})

    def _console_of_run(self) -> ConsoleSink:
        return ConsoleSink(
            run_dir=self.folder,
            total_steps=self._config.schedule.steps,
            live=self._live,
            console=self._console,
        )

    def _show_activity(self) -> None:
        if self._status is None:
            return
        waits_for = self._status["waits_for"]
        if waits_for:
            waits_for += f", for {duration(age_s(self._status))}"
        self.sink.activity(self.phase, waits_for, self._status["step"])
