"""`rlcore report`: report.html of one run, or of several overlaid."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from rlcore.commands.owner import own
from rlcore.commands.watch import judged
from rlcore.config.compose import load
from rlcore.errors import UserError
from rlcore.metrics.report import write_report
from rlcore.metrics.rows import Row
from rlcore.metrics.run_folder import require_run


def report(run_dirs: Sequence[str], out: str | None) -> int:
    """Write the report and print where it is. Raises UserError for a folder that holds no run."""
    if not run_dirs:
        raise UserError("rlcore report needs at least one run directory.")
    with _owned(run_dirs, out):
        print(write_report(run_dirs, out, _judge))
    return 0


def _owned(run_dirs: Sequence[str], out: str | None) -> AbstractContextManager[object]:
    """Own the run that the report is written into, if it is written into one."""
    target = Path(out).parent if out else Path(run_dirs[0]) if len(run_dirs) == 1 else Path()
    if not any(target.resolve() == Path(folder).resolve() for folder in run_dirs):
        return nullcontext()
    require_run(target)
    return own(target, "rlcore report", instead="name another file with out=FILE")


def _judge(folder: Path, rows: Sequence[Row]) -> list[str]:
    """A run's warnings by its own bounds. The report is of use without them, so that a run without
    a configuration, or with one that this version refuses, is said to be not judged."""
    if not (folder / "config.yaml").is_file():
        return ["not judged, since the folder holds no config.yaml"]
    try:
        config = load([f"run_dir={folder}", "resume=auto"])
    except UserError as e:
        return [f"not judged: {e}"]
    return judged(config, rows)
