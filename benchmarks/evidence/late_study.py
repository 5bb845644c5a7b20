"""A study of the learner alone: cells that are run one after the other, lines, and a page.

A study can be stopped at any time and continued: each finished run is one line of its file, and is
not run again. Only lines of one start count, in each part of the study that is compared within
itself: a machine whose start differs has every part anew that is not whole.
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
    part: Callable[[Any], Any] = lambda key: None  # of a run's key: what begins alike
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
                if own and cell.key not in self._done(digest):
                    line = self.run(cell, model)
                    with self.file.open("a") as out:
                        out.write(json.dumps(line) + "\n")
                    kept = {k: v for k, v in line.items() if isinstance(v, float)}
                    print(f"{name}: {kept}", flush=True)
                    return True
        return False

    def _done(self, digest: str) -> set[tuple[Any, ...]]:
        """The runs that a machine whose start has this digest need not make."""
        found = lines(self.file)
        done = {self.key(r) for r in found if r["start"] == digest}
        whole = Counter(self.part(cell.key) for cell in self.cells())
        for (part, _), kept in self._by_start(found).items():
            done |= set(kept) if len(kept) == whole[part] else set()
        return done

    def _by_start(self, found: Sequence[Line]) -> dict[tuple[Any, str], dict[Any, Line]]:
        """The lines of planned runs by their keys, by part and start, in the order found."""
        planned = {cell.key for cell in self.cells()}
        grouped: dict[tuple[Any, str], dict[Any, Line]] = {}
        for line in found:
            if (key := self.key(line)) in planned:
                grouped.setdefault((self.part(key), line["start"]), {})[key] = line
        return grouped

    def _counted(self, found: Sequence[Line]) -> list[Line]:
        """Each part's lines from the start that has most of them."""
        largest: dict[Any, dict[Any, Line]] = {}
        for (part, _), kept in self._by_start(found).items():
            if len(kept) > len(largest.get(part, {})):
                largest[part] = kept
        return [line for kept in largest.values() for line in kept.values()]

    def _begun(self) -> Path:
        """The model that every run begins from, made once a machine."""
        while not self.start.exists():
            with locked(self.start.with_name(self.start.name + ".lock")) as own:
                if own and not self.start.exists():
                    self.make_start(self.start)
            time.sleep(0.0 if own else WAIT_S)
        return self.start

    def block(self, found: Sequence[Line]) -> str:
        """How many runs there are, and their tables; a part's runs began alike."""
        wanted = list(self.cells())
        kept = self._counted(found)
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
