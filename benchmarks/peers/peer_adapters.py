"""How `peers.py` runs rlcore and each peer; a further peer is a class and a line of PEERS."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import read_rows
from rlcore.commands.about import run_kernels
from rlcore.config.compose import load as compose

REPOSITORY = Path(__file__).resolve().parents[2]
TIMEOUT_S = 1800.0
Steps = dict[str, Any]  # "step_s", "tokens" and the like: a list with a value for each step


class Peer(ABC):
    """Another program that trains by GRPO."""

    name: str

    def __init__(self, environments: Path) -> None:
        """`environments`: the folder that its own is made in."""
        self.folder = environments / self.name.lower()

    @abstractmethod
    def prepare(self) -> None:
        """Make its environment, unless it is there."""

    @abstractmethod
    def run(self, job: Mapping[str, Any], steps: int, place: Path) -> Steps:
        """Do steps of a job (`peers.py: job_of`), with files that begin with `place`. Raises
        CalledProcessError."""


class Trl(Peer):
    """TRL's GRPOTrainer, which samples with transformers where there is no GPU."""

    name = "TRL"
    PINS = ("trl==1.16.0", "datasets==5.2.0")
    # as in rlcore's environment, so that both run on the same libraries
    SHARED = (
        "transformers",
        "accelerate",
        "tokenizers",
        "numpy",
        "safetensors",
        "huggingface_hub",
        "peft",
    )
    LINKED = ("torch", "torchgen", "functorch")  # linked to rlcore's, not installed again

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def prepare(self) -> None:
        if (self.folder / "ready").exists():
            return
        print(
            f"making the environment of {self.name} in {self.folder}: a minute or two", flush=True
        )
        venv.create(self.folder, with_pip=True, clear=True)
        site = next((self.folder / "lib").glob("python*/site-packages"))
        import torch

        own = Path(torch.__file__).resolve().parents[1]
        (metadata,) = own.glob("torch-*.dist-info")
        for name in (*self.LINKED, metadata.name):
            (site / name).symlink_to(own / name)
        lock = (REPOSITORY / "requirements" / "cpu.lock").read_text().splitlines()
        pins = [line for line in lock if line.lower().startswith(self.SHARED)]
        install = [str(self.python), "-m", "pip", "install", "-q", *self.PINS, *pins]
        subprocess.run(install, check=True)
        (self.folder / "ready").touch()

    def run(self, job: Mapping[str, Any], steps: int, place: Path) -> Steps:
        asked, out = place.with_suffix(".job.json"), place.with_suffix(".out.json")
        asked.write_text(json.dumps({**job, "steps": steps}))
        script = Path(__file__).with_name("peer_trl.py")
        logged([str(self.python), str(script), str(asked), str(out)], place)
        found: Steps = json.loads(out.read_text())
        return found


class Rlcore:
    """This program, by its command."""

    QUIET = (
        "evaluation.every=0",
        "evaluation.at_start=false",
        "logging=quiet",
        "checkpoint.at_end=false",
        "checkpoint.every_s=0",
        "cluster.start_timeout_s=1200",  # starts do not count, and a busy machine takes long
    )
    COMMON = ("model=path", "learner.lr_schedule=constant", *QUIET)

    @staticmethod
    def named(words: Sequence[str]) -> list[str]:
        """Words of a load, with the quickstart's experiment unless they name one."""
        chosen = any(word.startswith("experiment=") for word in words)
        return [*([] if chosen else ["experiment=quickstart"]), *words]

    def run(
        self, job: Mapping[str, Any], steps: int, place: Path, *, on_policy: bool = False
    ) -> Steps:
        """Do steps of a job, asynchronously or in turns."""
        # a resumed script must not continue a run that it broke off
        run_dir = place.with_name(f"{place.name}-{os.getpid()}")
        self._train(self.words(job, steps, run_dir, on_policy=on_policy), place)
        rows = read_rows(run_dir)[:-1]  # the last holds what ends a run
        return {
            "step_s": [r["time/step_s"] for r in rows],
            "wait_s": [r["time/wait_data_s"] for r in rows],
            "learn_s": [r["time/learn_s"] for r in rows],
            "publish_s": [r["time/publish_s"] for r in rows],
            "tokens": [r["train/tokens"] for r in rows],
        }

    def words(
        self, job: Mapping[str, Any], steps: int, run_dir: Path, *, on_policy: bool
    ) -> list[str]:
        """What `rlcore train` is started with."""
        return [
            *self.named(job["words"]),
            *self.COMMON,
            f"schedule={'on_policy' if on_policy else 'async'}",
            f"schedule.steps={steps}",
            f"schedule.groups_per_step={job['groups']}",
            f"rollout.samples_per_prompt={job['samples']}",
            f"rollout.max_new_tokens={job['max_tokens']}",
            f"model.path={job['model']}",
            f"model.max_len={job['max_len']}",
            f"learner.lr={job['lr']}",
            f"seed={job['seed']}",
            f"run_dir={run_dir}",
        ]

    def warm_up(self, place: Path) -> None:
        """Have the quickstart's warmed-up model made and kept."""
        self._train(
            ("experiment=quickstart", *self.QUIET, "schedule.steps=1", f"run_dir={place}"), place
        )

    def _train(self, words: Sequence[str], place: Path) -> None:
        program = Path(sys.executable).parent / "rlcore"
        logged([str(program), "train", *words], place)


def environment() -> dict[str, str]:
    """The variables of every party's process: those that rlcore sets for itself too."""
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    found = {**os.environ, **offline}
    kernels = run_kernels(compose(["run_dir=.", "model=tiny"]))
    if kernels is not None:
        kernels.set_in(found)
    return found


def logged(command: Sequence[str], place: Path) -> None:
    """Run a command with its output in `place`.log. Raises CalledProcessError, TimeoutExpired."""
    log = place.with_suffix(".log")
    with log.open("w") as out:
        try:
            subprocess.run(
                command, check=True, stdout=out, stderr=out, env=environment(), timeout=TIMEOUT_S
            )
        except subprocess.CalledProcessError:
            print(log.read_text()[-3000:], file=sys.stderr)
            raise


PEERS: dict[str, Callable[[Path], Peer]] = {"TRL": Trl}
# What keeps others from a machine without a GPU
REFUSALS: dict[str, str] = {
    "verl 0.9.1": "not run. Its trainer asks Ray for GPUs (`use_gpu=True`, read in "
    "`single_controller/ray/base.py`) and otherwise raises `ValueError: Total available GPUs 0 is "
    "less than total desired GPUs N`",
    "OpenRLHF 0.11.2": "not run. It requires flash-attn 2.8.3, which could not be installed "
    "here, where there is no CUDA compiler",
    "SkyRL 0.3.0 (the newest for Python 3.11)": "not run. Its trainer asks Ray for a placement "
    'group with `{"GPU": n}` for the policy (read in `train/trainer.py`)',
    "AReaL 1.0.4": "not tried: it pins torch below 2.11 and transformers to at most 5.3",
}
