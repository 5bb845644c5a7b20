"""`rlcore scale`: how many rollout actors a running job should have, asked for through a file in its run directory."""

from __future__ import annotations

import json
import os
from pathlib import Path

from rlcore.errors import UserError

CONTROL = Path("control") / "actors.json"


def ask(run_dir: str | Path, counts: dict[str, int]) -> None:
    """Ask the run in `run_dir` for so many actors of each label. It answers in its log within a heartbeat."""
    if not (Path(run_dir) / "config.yaml").is_file():
        raise UserError(f"run_dir={run_dir} holds no run.")
    path = Path(run_dir) / CONTROL
    path.parent.mkdir(exist_ok=True)
    beside = path.with_suffix(".tmp")
    beside.write_text(json.dumps(counts))
    os.replace(beside, path)


class Wanted:
    """What is asked of a run from outside: a number of actors, read once per request, and an early end.

    A new command starts with the counts of its configuration.
    """

    def __init__(self, run_dir: Path) -> None:
        self.stop = False  # a signal came
        self._path = run_dir / CONTROL
        self._path.unlink(missing_ok=True)

    def __call__(self) -> dict[str, int] | None:
        """The counts of a request that has not been read yet, or None."""
        try:
            counts = json.loads(self._path.read_text())
        except FileNotFoundError:
            return None
        self._path.unlink()
        return {str(label): int(count) for label, count in counts.items()}


def parse(words: list[str]) -> dict[str, int]:
    """`actor.<label>.count=<n>` words. Raises UserError for anything else."""
    counts = {}
    for word in words:
        key, _, value = word.partition("=")
        parts = key.split(".")
        if len(parts) != 3 or (parts[0], parts[2]) != ("actor", "count") or not value.isdigit():
            raise UserError(f"rlcore scale does not know '{word}': write run_dir=DIR actor.<label>.count=<number>.")
        counts[parts[1]] = int(value)
    if not counts:
        raise UserError("rlcore scale: say how many, for example actor.bf16.count=2.")
    return counts
