"""What a launcher needs to know, as plain values, and what it answers with."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

TEMPLATES = Path(__file__).resolve().parents[2] / "launchers"

# Custom Ray resources of the nodes when the learner has nodes of its own; a role asks for a sliver of its resource.
LEARNER_RESOURCE = "rlcore_learner"
ACTOR_RESOURCE = "rlcore_actor"
RESOURCE_AMOUNT = 1000


@dataclass(frozen=True, slots=True)
class LaunchSettings:
    """The keys of `cluster.launch`; meanings there."""

    kind: str = "local"
    nodes: int = 1
    cpus_per_node: int = 8
    gpus_per_node: int = 0
    memory_gib_per_node: int | None = None
    learner_nodes: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    start_timeout_s: int = 600
    grace_s: int = 300
    retries: int = 3
    sbatch: Mapping[str, str] = field(default_factory=dict)
    setup: Sequence[str] = ()
    job_address: str | None = None
    image: str | None = None
    namespace: str = "default"
    claim: str | None = None
    mount: str = "/data"
    secret: str | None = None
    node_selector: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rendered:
    """What would be started: files to write first (by path), then one command."""

    command: tuple[str, ...]
    files: Mapping[str, str] = field(default_factory=dict)

    def text(self) -> str:
        """Everything, readable and in order."""
        parts = [f"# {path}\n{content.rstrip()}\n" for path, content in self.files.items()]
        return "\n".join([*parts, f"# command\n{shlex.join(self.command)}\n"])


def train_command(words: Sequence[str]) -> list[str]:
    """`rlcore train` with the words given; a started run that is started again continues."""
    resume = [] if any(w.startswith("resume=") for w in words) else ["resume=auto"]
    return ["rlcore", "train", *words, *resume]
