"""`rlcore report`: report.html of one run, or of several overlaid."""

from __future__ import annotations

from collections.abc import Sequence

from rlcore.errors import UserError
from rlcore.metrics.report import write_report


def report(run_dirs: Sequence[str], out: str | None) -> int:
    """Write the report and print where it is. Raises UserError for a folder that holds no run."""
    if not run_dirs:
        raise UserError("rlcore report needs at least one run directory.")
    print(write_report(run_dirs, out))
    return 0
