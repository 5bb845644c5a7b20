"""A study of the learner alone: cells that are run one after the other, lines, and a page.

A study can be stopped at any time and continued: each finished run is one line of its file, and is
not run again. Only lines of this machine's start count: a machine whose start differs has the study
anew.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks.evidence.evidence import CLAIMS, ROOT, WAIT_S, lines, locked
from benchmarks.evidence.evidence_page import replace_block
from benchmarks.evidence.evidence_tables import Line, source_digest
from benchmarks.harness import again


class Cell(Protocol):
    """A run, named by its key."""

    @property
    def key(self) -> tuple[Any, ...]: ...


@dataclass(frozen=True)
class Study:
    """A registered study."""

    name: str
    file: Path  # of lines
    page: Path
    start: Path  # the model that every run begins from
    make_start: Callable[[Path], None]
    cells: Callable[[], Iterator[Cell]]  # every run, the most informative first
    run: Callable[[Any, Path], Line]
    key: Callable[[Line], tuple[Any, ...]]
    tables: Callable[[Sequence[Line]], list[str]]  # of the lines that count
    sources: tuple[str, ...]  # whose change makes a run old
    stopped: Callable[[Sequence[Line]], bool] = lambda found: False  # its gate has closed
    pilot: Study | None = None  # runs to their end first, from the same start

    def main(self, doc: str | None) -> None:
        """The command line of a study's file, whose docstring is `doc`."""
        parser = argparse.ArgumentParser(
            description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        parser.add_argument("--minutes", type=float, default=120, help="start no run after these")
        parser.add_argument("--only-page", action="store_true", help="run nothing, write the page")
        parser.add_argument("--background", action="store_true", help="detached, at low priority")
        args = parser.parse_args()
        if args.background:
            print(f"runs as process {self._in_background()}")
            return
        stop = time.monotonic() + 60 * args.minutes
        torch.set_num_threads(1)
        while not args.only_page and time.monotonic() < stop and self.run_first_free():
            pass
        replace_block(self.page, self.block(lines(self.file)))

    def _in_background(self) -> str:
        """Start this program again, detached; says which process it is and where its output
        goes."""
        CLAIMS.mkdir(parents=True, exist_ok=True)
        log = CLAIMS / f"{self.name}.log"
        words = [word for word in sys.argv[1:] if word != "--background"]
        with log.open("a") as out:
            started = subprocess.Popen(
                ["nice", "-n", "19", *again(sys.modules["__main__"].__spec__), *words],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return f"{started.pid}, output in {log}"

    def run_first_free(self) -> bool:
        """Run the first cell that has no line and that no other process has taken, if there is
        one."""
        if self.pilot is not None and self.pilot.run_first_free():
            return True
        model = self._begun()
        digest = start_digest(model)
        if self.stopped([r for r in lines(self.file) if r["start"] == digest]):
            return False
        for cell in self.cells():
            name = ", ".join(map(str, cell.key))
            with locked(CLAIMS / f"{self.name}, {name}") as own:
                done = {self.key(r) for r in lines(self.file) if r["start"] == digest}
                if own and cell.key not in done:
                    line = self.run(cell, model)
                    with self.file.open("a") as out:
                        out.write(json.dumps(line) + "\n")
                    kept = {k: v for k, v in line.items() if isinstance(v, float)}
                    print(f"{name}: {kept}", flush=True)
                    return True
        return False

    def _begun(self) -> Path:
        """The model that every run begins from, made once a machine."""
        while not self.start.exists():
            with locked(self.start.with_name(self.start.name + ".lock")) as own:
                if own and not self.start.exists():
                    self.make_start(self.start)
            time.sleep(0.0 if own else WAIT_S)
        return self.start

    def block(self, found: Sequence[Line]) -> str:
        """How many runs there are, and the tables of those that began alike."""
        wanted = list(self.cells())
        keys = {cell.key for cell in wanted}
        counted = Counter(r["start"] for r in found if self.key(r) in keys).most_common(1)
        kept = [r for r in found if self.key(r) in keys and r["start"] == counted[0][0]]
        said = [f"**{len(kept)} of {len(wanted)} runs are there.** Nothing is claimed beyond them."]
        said += self.tables(kept)
        if refused := len(found) - len(kept):
            said.append(f"{refused} lines are not counted: they began from another model.")
        digest = source_digest(ROOT, self.sources)
        if old := sum(line["sources"] != digest for line in kept):
            said.append(f"{old} runs were made by earlier sources than today's.")
        return "\n\n".join(said)


def start_digest(model: Path) -> str:
    """SHA-256 of the weights that runs begin from."""
    return hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()
