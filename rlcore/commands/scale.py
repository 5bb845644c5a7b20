"""`rlcore scale`: change the number of rollout actors of a running job, through a file in its run
directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from rlcore.config.schema import RunConfig
from rlcore.errors import UserError
from rlcore.files import replace_file

CONTROL = Path("control") / "actors.json"


def scale(run_dir: str | Path, counts: Mapping[str, int]) -> int:
    """Ask the run in `run_dir` for this many actors of each label. It answers in its log within a
    heartbeat. Raises UserError if there is no run."""
    if not counts:
        raise UserError("rlcore scale needs a number, for example actor.bf16.count=2.")
    if not (Path(run_dir) / "config.yaml").is_file():
        raise UserError(f"run_dir={run_dir} holds no run.")
    path = Path(run_dir) / CONTROL
    path.parent.mkdir(exist_ok=True)
    # A file needs no open port, and works wherever the run directory can be seen.
    replace_file(path, json.dumps(dict(counts)))
    return 0


class ScaleRequests:
    """Requests for another number of actors, each read once.

    A new command starts with the counts of its configuration; within one, the fleet's size survives
    recoveries.
    """

    def __init__(self, run_dir: Path) -> None:
        self._sizes: dict[str, int] = {}  # actors of each label when the last attempt ended
        self._again: dict[str, int] | None = None  # asked of the next attempt once it runs
        self._path = run_dir / CONTROL
        self._path.unlink(missing_ok=True)  # of an earlier command on this run

    def __call__(self) -> dict[str, int] | None:
        """The counts of a request that has not been read yet, or None."""
        try:
            counts = json.loads(self._path.read_text())
        except FileNotFoundError:
            again, self._again = self._again, None
            return again
        self._path.unlink()  # read once
        again, self._again = self._again or {}, None
        return again | {str(label): int(count) for label, count in counts.items()}

    def keep(self, sizes: Mapping[str, int]) -> None:
        """Note how many actors of each label an attempt ended with."""
        self._sizes = dict(sizes)

    def start_with(self, config: RunConfig) -> RunConfig:
        """The configuration that an attempt starts with; its difference from the size kept is
        requested again.

        A fleet that had shrunk starts small. One that had grown grows again while it works: the
        cluster may have no room yet, and the run was checked to fit with the counts of its
        configuration.
        """
        sizes = {label: self._sizes.get(label, a.count) for label, a in config.actor.items()}
        # At least one: a label without actors could not be published to, or grow again.
        starting = {
            label: max(1, min(actor.count, sizes[label])) for label, actor in config.actor.items()
        }
        self._again = {label: n for label, n in sizes.items() if n != starting[label]} or None
        actors = {
            label: a.model_copy(update={"count": starting[label]})
            for label, a in config.actor.items()
        }
        return config.model_copy(update={"actor": actors})
