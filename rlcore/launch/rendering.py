"""What a launcher gives back, and the command that it starts."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlcore.files import shipped

TEMPLATES = shipped("launchers")


@dataclass(frozen=True, slots=True)
class Rendered:
    """What would be started: files to write first (content by path), then one command.

    Example: Rendered(("sbatch", "run/launch/job.sbatch"), {"run/launch/job.sbatch": "#!..."})
    """

    command: tuple[str, ...]
    files: Mapping[str, str] = field(default_factory=dict)

    def text(self) -> str:
        """Everything, readable and in order."""
        parts = [f"# {path}\n{content.rstrip()}\n" for path, content in self.files.items()]
        return "\n".join([*parts, f"# command\n{shlex.join(self.command)}\n"])


def train_command(words: Sequence[str]) -> list[str]:
    """`rlcore train` with the words given; a run that exists already is resumed."""
    # Schedulers repeat the command: without it the second start would refuse the run directory.
    resume = [] if any(w.startswith("resume=") for w in words) else ["resume=auto"]
    return ["rlcore", "train", *words, *resume]
