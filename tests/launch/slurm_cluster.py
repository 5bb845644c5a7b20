"""A real Slurm of three nodes on this machine, each a set of namespaces (tests/launch/slurm/), and
runs that `rlcore launch` gives to it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from timing import deadline, wait_until

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).parent / "slurm"
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "nsenter", "unshare", "setpriv")
SMALL = (
    "experiment=quickstart",
    "model.fresh.hidden_size=64",
    "model.fresh.layers=2",
    "model.fresh.intermediate_size=192",
    "model.warmup=null",
    "task.args.min_digits=2",
    "task.args.max_digits=3",
    "schedule.groups_per_step=8",
    "rollout.samples_per_prompt=4",
    "evaluation.prompts=8",
    "evaluation.every=100000",
    "logging.report=false",
    "logging.wandb=disabled",
    "logging.console=plain",
    "cluster=slurm",
    "cluster.heartbeat_s=1",
    "cluster.launch.cpus_per_node=2",
    f"+cluster.launch.env.PYTHONPATH={ROOT}",
)
TWO = ("cluster.launch.nodes=2", "cluster.launch.learner_nodes=1")
THREE = (
    "cluster.launch.nodes=3",
    "cluster.launch.learner_nodes=1",
    "actor.bf16.count=2",
    "actor.bf16.num_cpus=2",
)


def lacks() -> str:
    """A sentence on why this machine cannot have the cluster; "" if it can."""
    if os.getuid():
        return "a Slurm cluster of namespaces needs root"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"a Slurm cluster needs {', '.join(missing)} (slurm-wlm, munge, iproute2)"
    if subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode:
        return "this machine allows no network namespaces"
    return ""


class Cluster:
    """The cluster; `state` is a short folder below /tmp."""

    def __init__(self, state: Path) -> None:
        self.state = state
        python = Path(sys.executable).resolve()
        closed = next((p for p in python.parents if str(p.parent) == "/root"), None)
        self._env = os.environ | {
            "RLC_STATE": str(state),
            "RLC_SHARED": str(ROOT) if ROOT.is_relative_to("/tmp") else "",
            "RLC_OPEN": str(closed or ""),
            "RLC_SHM": "4g",
            "RLC_NICE": "0",
        }
        self.run([str(SCRIPTS / "up.sh")], check=True)

    def close(self) -> None:
        self.run([str(SCRIPTS / "down.sh")])

    def run(self, command, *, check=False, cwd=None, seconds=120):
        done = subprocess.run(
            command,
            env=self._env,
            cwd=cwd,
            text=True,
            capture_output=True,
            timeout=deadline(seconds),
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def start(self, command) -> subprocess.Popen[bytes]:
        """Start a command and leave it running; it ends with the cluster."""
        log = (self.state / "log/started.log").open("ab")
        return subprocess.Popen(command, env=self._env, stdout=log, stderr=log)

    def on(self, node: str, *command: str, user: str | None = None, cwd=None):
        """Run a command on a node."""
        return self.run(self.command(node, *command, user=user), cwd=cwd)

    def command(self, node: str, *command: str, user: str | None = None) -> list[str]:
        """The words that run a command on a node."""
        who = ("-u", user) if user else ()
        path = f"PATH={Path(sys.executable).parent}:/usr/sbin:/usr/bin:/bin"
        home = () if user else (f"HOME={self.state}",)
        words = [node, *who, "env", path, f"PYTHONPATH={ROOT}", *home, *command]
        return [str(SCRIPTS / "on.sh"), *words]

    def kill(self, node: str) -> None:
        """A power failure."""
        os.kill(int((self.state / f"run/{node}.init").read_text()), signal.SIGKILL)
        self.cut(node)

    def cut(self, node: str) -> None:
        """Take a node off the network."""
        self._link(node, "down")

    def connect(self, node: str) -> None:
        self._link(node, "up")

    def _link(self, node: str, state: str) -> None:
        words = ("ip", "-n", f"{self.state.name}-{node}", "link", "set", "eth0", state)
        self.run(words, check=True)

    def allow_silence(self, seconds: int) -> None:
        """Set how long a node may be silent before Slurm takes it from its jobs (SlurmdTimeout)."""
        path = self.state / "etc/slurm.conf"
        text = re.sub(r"SlurmdTimeout=\d+", f"SlurmdTimeout={seconds}", path.read_text())
        path.write_text(text)
        self.on("login", "scontrol", "reconfigure")

    def boot(self, node: str) -> None:
        self.run([str(SCRIPTS / "node.sh"), node, f"10.77.0.{node[1:]}"], check=True)

    def home(self, user: str | None) -> Path:
        return self.state / "home" / user if user else self.state

    def words(self, *more: str, steps: int = 100000) -> tuple[str, ...]:
        """The words of a small run."""
        limits = (
            f"cluster.hang_timeout_s={deadline(30):.0f}",
            f"cluster.start_timeout_s={deadline(300):.0f}",
        )
        return *SMALL, *limits, f"schedule.steps={steps}", *more

    def launch(self, name: str, *words: str, user: str | None = None, steps: int = 100000) -> Job:
        """Launch a small run from the login node."""
        home = self.home(user)
        every = self.words(*words, steps=steps)
        command = ("python", "-m", "rlcore.cli", "launch", *every)
        run_dir = home / name
        done = self.on("login", *command, f"run_dir={run_dir}", user=user, cwd=home)
        found = re.search(r"batch job (\d+)", done.stdout)
        assert found, done.stdout + done.stderr
        return Job(self, found[1], run_dir)


@contextlib.contextmanager
def small_cluster() -> Iterator[Cluster]:
    state = Path(tempfile.mkdtemp(prefix="rlc-", dir="/tmp"))
    state.chmod(0o755)
    cluster = None
    try:
        cluster = Cluster(state)
        yield cluster
    finally:
        if cluster is not None:
            cluster.close()
        shutil.rmtree(state, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Job:
    """A run and its job."""

    cluster: Cluster
    id: str
    run_dir: Path

    @property
    def rows(self) -> int:
        path = self.run_dir / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    @property
    def newest(self) -> int:
        """The step of the newest checkpoint."""
        found = sorted(self.run_dir.glob("checkpoints/step_*"))
        return int(found[-1].name.removeprefix("step_")) if found else 0

    @property
    def text(self) -> str:
        """The job's log."""
        return "".join(p.read_text() for p in self.run_dir.glob("launch/slurm-*.out"))

    def notes(self) -> list[str]:
        """What the run has said."""
        path = self.run_dir / "log.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [str(json.loads(line).get("text", "")) for line in lines]

    def shown(self, key: str) -> str:
        """A value of `scontrol show job`."""
        said = self.cluster.on("login", "scontrol", "show", "job", self.id).stdout
        found = re.search(rf"\b{key}=(\S+)", said)
        return found[1] if found else ""

    def wait_rows(self, more: int = 5, seconds: float = 240) -> int:
        """Wait for further steps; returns how many there are."""
        least = self.rows + more
        wait_until(lambda: self.rows >= least, seconds, f"{more} steps: {self.text[-3000:]}", 0.5)
        return self.rows

    def wait(self, key: str, *values: str, seconds: float = 120) -> str:
        """Wait until Slurm shows one of these values."""

        def found() -> str:
            now = self.shown(key)
            return now if now in values else ""

        return str(wait_until(found, seconds, f"{key} to be {values}", 0.5))

    def end(self) -> None:
        """Cancel it, and wait until its processes are gone."""
        self.cluster.on("login", "scancel", self.id)
        self.wait("JobState", "CANCELLED", "FAILED", "COMPLETED", "NODE_FAIL")
