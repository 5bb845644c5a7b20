"""The ranks' parts of one state, written together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

from rlcore.learner.protocols import Schedule
from rlcore.learner.ranks import gather_objects, is_first_rank
from rlcore.learner.state_files import Part, StateWriter


def write_parts(
    folder: Path,
    parts: Mapping[str, Part | None],
    run: Schedule | None = None,
    **facts: int | str,
) -> None:
    """Have every rank write its parts by name, and rank 0 the index. Collective.

    `run` schedules the writing of each rank's files, so that the index may be there before the
    files of other ranks are; without it all is written on return. `parts` must not change until
    they are written.
    """
    writer = StateWriter(folder, *([run] if run else []), rank=dist.get_rank())
    for name, part in parts.items():
        if part is not None:
            writer.add(name, part)
    listings = gather_objects(writer.finish())
    if is_first_rank():
        writer.close(listings, **facts)
    if run is None:
        dist.barrier()  # the index is there for all
