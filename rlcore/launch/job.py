"""Render what a launcher would start, and print it (dry run) or start it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rlcore.errors import StageError, UserError
from rlcore.launch.kubernetes import render_kubernetes
from rlcore.launch.rendering import Rendered, train_command
from rlcore.launch.slurm import render_slurm
from rlcore.launch.specs import LaunchSpec
from rlcore.spec import refuse


def _local(spec: LaunchSpec, words: Sequence[str], run_dir: str) -> Rendered:
    return Rendered(tuple(train_command(words)))


def _ray(spec: LaunchSpec, words: Sequence[str], run_dir: str) -> Rendered:
    """A job of the cluster's own job server, or a driver on this machine, which must then be part
    of the cluster."""
    command = train_command(words)
    if spec.job_address is None:
        return Rendered(tuple(command))
    return Rendered(("ray", "job", "submit", f"--address={spec.job_address}", "--", *command))


LAUNCHERS: Mapping[str, Callable[[LaunchSpec, Sequence[str], str], Rendered]] = {
    "local": _local,
    "ray": _ray,
    "slurm": render_slurm,
    "kubernetes": render_kubernetes,
}


def render(spec: LaunchSpec, words: Sequence[str], run_dir: str) -> Rendered:
    """What would be started for `rlcore train WORDS`. Raises UserError naming the key that does not
    fit."""
    refuse(
        spec.learner_nodes >= spec.nodes,
        f"cluster.launch.learner_nodes={spec.learner_nodes} leaves no node of "
        f"cluster.launch.nodes={spec.nodes} for actors; choose fewer, or 0 to share all nodes.",
    )
    return LAUNCHERS[spec.kind](spec, words, run_dir)


def launch(spec: LaunchSpec, words: Sequence[str], run_dir: str, *, dry_run: bool = False) -> int:
    """Start `rlcore train WORDS` where the specification says; with `dry_run` only print what would
    be started.

    Returns the exit code of the launcher's command. Raises UserError if something does not fit or
    the launcher's program is not installed here, StageError if the program refuses the job.
    """
    rendered = render(spec, words, run_dir)
    if dry_run:
        print(rendered.text(), end="")
        return 0
    for path, content in rendered.files.items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(content)
    program = rendered.command[0]
    try:
        code = subprocess.run(rendered.command, check=False).returncode
    except FileNotFoundError as error:
        raise UserError(
            f"cluster.launch.kind={spec.kind} needs the program '{program}', which this machine "
            "lacks: launch from one that has it, or add dry_run=true to see what would be started."
        ) from error
    # The other kinds run the training itself: its exit code is the answer.
    if code and spec.kind in ("slurm", "kubernetes"):
        raise StageError(f"{program} did not accept the job (exit code {code})")
    return code
