"""Which checkpoint a command is about."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rlcore.config.schema import RunConfig
from rlcore.loop import checkpoint


def named_or_newest(
    config: RunConfig, named: str | None, note: Callable[[str], None]
) -> Path | None:
    """The checkpoint that the command names, else the newest valid one of the run, if any.

    Raises UserError if the named one cannot be used.
    """
    if named is not None:
        return checkpoint.require(named)
    root = Path(config.run_dir) / "checkpoints"
    return checkpoint.newest_valid(root, note) if root.is_dir() else None
