"""`rlcore launch`: render what a launcher would start, print it (dry run) or start it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rlcore.errors import StageError, UserError
from rlcore.launch.kubernetes import render_kubernetes
from rlcore.launch.settings import LaunchSettings, Rendered, train_command
from rlcore.launch.slurm import render_slurm


def _local(settings: LaunchSettings, words: Sequence[str], run_dir: str) -> Rendered:
    return Rendered(tuple(train_command(words)))


def _ray(settings: LaunchSettings, words: Sequence[str], run_dir: str) -> Rendered:
    """A job of the cluster's own job server, or a driver on this machine (which must be part of the cluster)."""
    command = train_command(words)
    if settings.job_address is None:
        return Rendered(tuple(command))
    return Rendered(("ray", "job", "submit", f"--address={settings.job_address}", "--", *command))


LAUNCHERS: Mapping[str, Callable[[LaunchSettings, Sequence[str], str], Rendered]] = {
    "local": _local,
    "ray": _ray,
    "slurm": render_slurm,
    "kubernetes": render_kubernetes,
}


def render(settings: LaunchSettings, words: Sequence[str], run_dir: str) -> Rendered:
    """What would be started for `rlcore train WORDS`. Raises UserError naming the key that does not fit."""
    if settings.kind not in LAUNCHERS:
        raise UserError.choice("cluster.launch.kind", settings.kind, LAUNCHERS)
    if settings.learner_nodes >= settings.nodes and settings.learner_nodes:
        raise UserError(
            f"cluster.launch.learner_nodes={settings.learner_nodes} leaves no node of"
            f" cluster.launch.nodes={settings.nodes} for actors; choose fewer, or 0 to share all nodes."
        )
    return LAUNCHERS[settings.kind](settings, words, run_dir)


def launch(settings: LaunchSettings, words: Sequence[str], run_dir: str, *, dry_run: bool = False) -> int:
    """Start `rlcore train WORDS` where the settings say; with `dry_run` only print what would be started.

    Files go under `run_dir`/launch. Returns the exit code of the command. Raises UserError if something does not fit
    or the launcher's program is not installed here, StageError if the program refuses the job.
    """
    rendered = render(settings, words, run_dir)
    if dry_run:
        print(rendered.text(), end="")
        return 0
    for path, content in rendered.files.items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(content)
    try:
        code = subprocess.run(rendered.command, check=False).returncode
    except FileNotFoundError as error:
        raise UserError(
            f"cluster.launch.kind={settings.kind} needs the program '{rendered.command[0]}', which this machine lacks:"
            " launch from one that has it, or add dry_run=true to see what would be started."
        ) from error
    if code and settings.kind in ("slurm", "kubernetes"):
        raise StageError(f"{rendered.command[0]} did not take the job (exit code {code})")
    return code
