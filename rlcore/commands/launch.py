"""`rlcore launch`: start `rlcore train` where `cluster.launch` says."""

from __future__ import annotations

from collections.abc import Sequence

from rlcore.config.schema import RunConfig
from rlcore.launch import launch as start


def launch(config: RunConfig, words: Sequence[str], *, dry_run: bool) -> int:
    """Start the run that `words` describe; with `dry_run` only print what would be started."""
    return start(config.cluster.launch, words, config.run_dir, dry_run=dry_run)
