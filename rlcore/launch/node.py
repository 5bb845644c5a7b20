"""Ray on one node of a Slurm job, started and kept running: `python -m rlcore.launch.node`.

The batch script (launchers/slurm.sh) starts one such process a node, as a job step. It ends on
SIGUSR1. SIGTERM, which Slurm sends to every process of a job that it wants to end, is blocked here
and in all of Ray's processes. The run needs them for its last checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

STARTED = b"Ray runtime started"  # what `ray start` prints once its node is up
ATTEMPTS = 3  # failed starts in a row, before the first that succeeds, that end the node
PAUSE_S = 2.0
NEWS_S = 60.0  # a node that waits for the head says so this often
STORE_SHARE = 0.3  # of the job's memory on a node, as Ray takes it of the machine's
STYLE = re.compile(r"\x1b\[[0-9;]*m")
PR_SET_CHILD_SUBREAPER = 36
TOLD = (signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD)


@dataclass(frozen=True, slots=True)
class JobNode:
    """The node's place in the job. `address`: HOST:PORT of Ray's head, which the first node is."""

    address: str
    cpus: int
    gpus: int
    resources: str
    folder: Path  # run_dir/launch, on the disk that all nodes share
    start_timeout_s: float
    script: int  # process of the batch script, on the first node
    index: int
    name: str
    job: str
    part: int  # of a job whose learner's nodes are a part for themselves, and come first

    @property
    def temporary(self) -> Path:
        """Ray's folder, short because sockets are in it; another user's job has another one."""
        return Path(f"/tmp/rlcore-{self.job}")

    @property
    def log(self) -> Path:
        return self.folder / f"{self.job}-{self.name}.log"

    @property
    def failed(self) -> Path:
        """The job's file of nodes that do not start."""
        return self.folder / f"{self.job}.failed"

    def command(self) -> list[str]:
        """`ray start` of this node."""
        host, _, port = self.address.rpartition(":")
        if self.index == 0:
            words = ["--head", f"--node-ip-address={host}", f"--port={port}"]
            words += ["--include-dashboard=false", f"--temp-dir={self.temporary}"]
            if importlib.util.find_spec("grpc"):
                # Ray's Client, which nothing uses, would take the same port in every job of a node
                words += [f"--ray-client-server-port={int(port) + 20000}"]
        else:
            words = [f"--address={self.address}", f"--temp-dir={self.temporary}"]
        store = _store_bytes(self.part)
        return [
            *("ray", "start", *words, f"--num-cpus={self.cpus}", f"--num-gpus={self.gpus}"),
            f"--resources={self.resources}",
            # any free ports: jobs that share a node would try the same ones
            *("--min-worker-port=0", "--max-worker-port=0"),
            *([f"--object-store-memory={store}"] if store else []),
            *("--disable-usage-stats", "--block"),
        ]


def _store_bytes(part: int) -> int | None:
    """Bytes of Ray's object store: a share of the memory that the job has on this node, where Slurm
    says how much that is. Ray itself would take that share of the machine's."""
    end = f"_HET_GROUP_{part}" if "SLURM_HET_SIZE" in os.environ else ""  # "": the first part's
    per_node, per_cpu = (os.environ.get(f"SLURM_MEM_PER_{n}{end}") for n in ("NODE", "CPU"))
    mib = int(per_node or 0) or int(per_cpu or 0) * int(os.environ.get("SLURM_CPUS_ON_NODE", "0"))
    room = shutil.disk_usage("/dev/shm").total * 0.9
    return int(min(mib * 2**20 * STORE_SHARE, room)) if mib else None


def main(words: Sequence[str] | None = None) -> int:
    node = _asked(sys.argv[1:] if words is None else words)
    signal.pthread_sigmask(signal.SIG_BLOCK, TOLD)
    # Ray would have its processes at nice 15: nothing else of this node may take a role's CPU
    os.environ.setdefault("RAY_worker_niceness", "0")
    # what Ray's processes leave behind becomes a child of this one
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        return Keeper(node).keep()
    finally:
        end_descendants()
        shutil.rmtree(node.temporary, ignore_errors=True)


def _asked(words: Sequence[str]) -> JobNode:
    parser = argparse.ArgumentParser(prog="python -m rlcore.launch.node")
    for name, kind in (("address", str), ("cpus", int), ("gpus", int), ("script", int)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--start-timeout-s", type=float, required=True)
    parser.add_argument("--learner-nodes", type=int, required=True)
    parser.add_argument("--learner-resources", required=True)
    parser.add_argument("--actor-resources", required=True)
    asked = vars(parser.parse_args(words))
    index = int(os.environ["SLURM_NODEID"])
    learners, of_learner = asked.pop("learner_nodes"), asked.pop("learner_resources")
    of_actors = asked.pop("actor_resources")
    return JobNode(
        resources="{}" if not learners else of_learner if index < learners else of_actors,
        index=index,
        name=os.environ["SLURMD_NODENAME"],
        job=os.environ["SLURM_JOB_ID"],
        part=int(index >= learners),
        **asked,
    )


class Ended(Exception):
    """The batch script has asked the node to end."""


class Keeper:
    """Starts Ray on a node, and starts it again whenever it ends, until SIGUSR1."""

    def __init__(self, node: JobNode) -> None:
        self._node = node
        self._was_up = False
        self._failures = 0

    def keep(self) -> int:
        """Return 0 when it was asked to end, 1 if Ray has never started here."""
        try:
            while self._failures < ATTEMPTS or self._was_up:
                self._wait_for_head()
                self._once()
                self._pause(PAUSE_S)
        except Ended:
            return 0
        return 1

    def _once(self) -> None:
        """One life of Ray on this node."""
        node = self._node
        shutil.rmtree(node.temporary, ignore_errors=True)
        with node.log.open("ab") as log:
            began = log.tell()
            # Ray inherits SIGTERM blocked, and other signals as usual
            process = subprocess.Popen(
                node.command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=_leave_term_blocked,
            )
        up = self._wait_up(process, began)
        while process.poll() is None:
            self._pause(1.0)
        end_descendants()
        why = f"exit code {process.returncode}: {self._last_line(began)}"
        if up:
            self._say(f"Ray ended ({why}); it is started again, {node.log} has more")
            return
        self._failures += 1
        last = self._failures >= ATTEMPTS and not self._was_up
        said = self._say(f"Ray did not start ({why}){'' if last else '; it is tried again'}")
        if last:
            with node.failed.open("a") as file:
                file.write(f"{said}\n")

    def _wait_up(self, process: subprocess.Popen[bytes], began: int) -> bool:
        """Wait until Ray is up or has ended; one that takes too long is ended."""
        until = time.monotonic() + self._node.start_timeout_s
        while process.poll() is None:
            if STARTED in self._written(began):
                self._was_up, self._failures = True, 0
                return True
            if time.monotonic() > until:
                process.kill()
            self._pause(0.2)
        return STARTED in self._written(began)

    def _wait_for_head(self) -> None:
        """Return once the head's port can be reached; the head itself does not wait."""
        host, _, port = self._node.address.rpartition(":")
        news = time.monotonic() + NEWS_S
        while self._node.index:
            with contextlib.suppress(OSError):
                socket.create_connection((host, int(port)), timeout=5.0).close()
                return
            if time.monotonic() > news:
                self._say(f"Ray's head at {self._node.address} does not answer; waiting for it")
                news += NEWS_S
            self._pause(0.5)

    def _pause(self, seconds: float) -> None:
        """Wait, at most until a child ends; raise Ended on SIGUSR1. The first node passes SIGTERM
        on to the batch script, which Slurm leaves out where it preempts a job."""
        told = signal.sigtimedwait(TOLD, seconds)
        if told is None or told.si_signo == signal.SIGCHLD:
            return
        if told.si_signo == signal.SIGUSR1:
            raise Ended
        if self._node.index == 0:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._node.script, signal.SIGTERM)

    def _written(self, began: int) -> bytes:
        with self._node.log.open("rb") as log:
            log.seek(began)
            return log.read()

    def _last_line(self, began: int) -> str:
        text = STYLE.sub("", self._written(began).decode(errors="replace"))
        return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")

    def _say(self, text: str) -> str:
        said = f"rlcore: {self._node.name}: {text}"
        print(said, flush=True)
        return said


def _leave_term_blocked() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGTERM})


def end_descendants() -> None:
    """Kill every process that this one has started, and those that they have started."""
    for _ in range(10):  # a process may start others while it is ended
        found = psutil.Process().children(recursive=True)
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(found, timeout=2.0)
        if not found:
            return


if __name__ == "__main__":
    sys.exit(main())
