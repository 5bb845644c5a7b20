"""Where the seconds of a step go: processor time of every process of a run, and what its code was
doing.

    python -m benchmarks.speed.profile_step --folder DIR [--loads short] [--py-spy PROGRAM]
        [--out PAGE]

Runs rlcore on the loads of `peers.py`. Between the first step that counts and the last it reads the
processor time of every thread from /proc, which other jobs lengthen little, and the steps' own
times from their metrics. With py-spy (`pip install py-spy`, in an environment of its own), a second
run of each is sampled, and samples are counted by the first rule of `PARTS` that a stack matches.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness import machine, read_rows, role, table
from benchmarks.peers.peer_adapters import Rlcore, environment
from benchmarks.peers.peer_loads import ASYNC, LOADS, ON_POLICY, job_of
from benchmarks.peers.peers import SKIPPED

SAMPLED = ("RolloutActor", "LearnerActor", "BufferActor", "ScorerActor")
RATE = 200  # samples a second
POLL_S = 0.05
TIMES = ("step_s", "wait_data_s", "learn_s", "learner_ref_s", "learner_update_s", "publish_s")
# Innermost frames of threads that wait, which py-spy takes for running ones in some sandboxes
WAITING = (
    "Condition.wait ",
    "Worker.main_loop ",
    "Delivery._next ",
    "EpollSelector.select ",
    "thread (",
)
# (what a stack has, what it is), the first that matches
PARTS: Mapping[str, Sequence[tuple[str, str]]] = {
    "RolloutActor": (
        ("cluster/delivery.py", "delivery: serialising, text, sending"),
        ("update_weights", "loading weights"),
        ("checksum", "loading weights"),
        ("_gather_logprobs", "sampling: top k"),
        ("sampling.py", "sampling: rest"),
        ("topk_topp_sampler.py", "sampling: seeds, log-softmax, drawing"),
        ("sample/sampler.py", "sampling: rest"),
        ("logits_processor.py", "model: head"),
        ("cpu_attn.py", "model: attention"),
        ("unified_attention", "model: attention"),
        ("rotary", "model: norms, activations, rotary"),
        ("layernorm", "model: norms, activations, rotary"),
        ("activation.py", "model: norms, activations, rotary"),
        ("layers/linear.py", "model: matrix products"),
        ("model_forward", "model: between"),
        ("_build_attention_metadata", "vLLM: attention's plan"),
        ("_prepare_inputs", "vLLM: inputs"),
        ("_update_states", "vLLM: inputs"),
        ("_bookkeeping_sync", "vLLM: inputs"),
        ("gpu_model_runner.py", "vLLM: rest of the model runner"),
        ("scheduler.py", "vLLM: scheduler"),
        ("process_inputs", "vLLM: new requests"),
        ("add_request", "vLLM: new requests"),
        ("request_book.py", "request book and trajectories"),
        ("rollout/worker.py", "worker's turn"),
        ("rollout/engines", "rest of the engine's wrapper"),
    ),
    "LearnerActor": (
        ("fetch", "fetching and decoding groups"),
        ("publish", "publishing"),
        ("torch/optim", "optimizer"),
        ("build_batch", "batch: tensors"),
        ("learner/packing.py", "batch: micro-batches"),
        ("learner/packing.py", "batch: micro-batches"),
        ("learner/lm_head.py", "head, both ways"),
        ("shared_prefix.py", "attention (backward: its gathering alone)"),
        ("sdpa_attention.py", "attention (backward: its gathering alone)"),
        ("graph.py", "layers backward"),
        ("learner/policy.py", "layers forward"),
        ("corrections/", "corrections and metrics"),
        ("objectives/", "loss and advantages"),
        ("deepspeed", "DeepSpeed's own"),
        ("grad_norm", "gradient norm"),
        ("learner/", "rest of the learner"),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--loads", nargs="+", default=["short", "long-tailed"])
    parser.add_argument("--who", nargs="+", default=[ASYNC, ON_POLICY])
    parser.add_argument("--py-spy", help="its program")
    parser.add_argument("--out", type=Path, help="a page for the tables")
    parser.add_argument("words", nargs="*", help="further overrides of rlcore")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    sections = []
    for load in LOADS:
        if load.key not in args.loads:
            continue
        job = job_of(load, args.folder, args.words)
        for who in args.who:
            watch = Watch(args.folder, job, who)
            sections.append(f"## {load.name}: {who}\n\n{watch.accounting()}")
            if args.py_spy:
                sections.append(watch.sampled(args.py_spy))
    text = "\n\n".join(sections)
    print(text)
    if args.out:
        args.out.write_text(f"# Where a step's seconds go\n\nOn {machine()}.\n\n{text}\n")


class Watch:
    """Runs of one load by one schedule."""

    def __init__(self, folder: Path, job: Mapping[str, Any], who: str) -> None:
        self._job = job
        self._who = who
        self._steps = job["steps"][who]
        name = f"{job['load']}-{who}".replace(" ", "_").replace(",", "")
        self._place = folder / f"{name}-{os.getpid()}"
        self._runs = 0

    def accounting(self) -> str:
        """Processor time a step of every process, by threads, beside the steps' own times."""
        run_dir, child = self._begin()
        before = after = cpu_times(child.pid)
        counted = SKIPPED[self._who]
        while child.poll() is None:
            seen = len(read_rows(run_dir))
            if seen <= counted:
                before = cpu_times(child.pid)
            elif seen < self._steps:
                after = cpu_times(child.pid)
            time.sleep(POLL_S)
        rows = read_rows(run_dir)[counted : self._steps - 1]
        # from the row of the last step not counted to that of the last but one
        spent = {k: (v - before.get(k, 0.0)) / (len(rows) - 1) for k, v in after.items()}
        times = {t: [r[f"time/{t}"] for r in rows if f"time/{t}" in r] for t in TIMES}
        means = {t: statistics.mean(v) for t, v in times.items() if v}
        return f"{table([means])}\n\n{by_role(spent)}"

    def sampled(self, program: str) -> str:
        """Shares of the sampled stacks."""
        run_dir, child = self._begin()
        while child.poll() is None and len(read_rows(run_dir)) <= SKIPPED[self._who]:
            time.sleep(POLL_S)
        spies = {}
        for name in SAMPLED:
            (pid,) = (p.pid for p in family(child.pid) if role(cmdline(p)) == name)
            out = run_dir.with_suffix(f".{name}.raw")
            words = ["record", "--pid", pid, "--rate", RATE, "--format", "raw", "--threads"]
            command = [program, *map(str, words), "--duration", "600", "--output", str(out)]
            spies[name] = subprocess.Popen(command, stdout=-3, stderr=-3), out
        while child.poll() is None and len(read_rows(run_dir)) < self._steps:
            time.sleep(POLL_S)
        for spy, _ in spies.values():
            spy.send_signal(2)
            spy.wait(60)
        child.wait()
        return "\n\n".join(shares(name, out.read_text()) for name, (_, out) in spies.items())

    def _begin(self) -> tuple[Path, subprocess.Popen[bytes]]:
        self._runs += 1
        run_dir = self._place.with_name(f"{self._place.name}-{self._runs}")
        on_policy = self._who == ON_POLICY
        words = Rlcore().words(self._job, self._steps, run_dir, on_policy=on_policy)
        program = Path(sys.executable).parent / "rlcore"
        log = run_dir.with_suffix(".log").open("w")
        command = [str(program), "train", *words]
        child = subprocess.Popen(command, stdout=log, stderr=log, env=environment())
        return run_dir, child


def family(pid: int) -> list[psutil.Process]:
    """A process and all its descendants."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def cmdline(process: psutil.Process) -> list[str]:
    """Its words; none of one that has ended."""
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return []


def cpu_times(pid: int) -> dict[tuple[str, str], float]:
    """Processor seconds of a process and its descendants, by role and thread name."""
    tick = os.sysconf("SC_CLK_TCK")
    used: Counter[tuple[str, str]] = Counter()
    for process in family(pid):
        who = role(cmdline(process))
        for stat in Path(f"/proc/{process.pid}/task").glob("*/stat"):
            try:
                text = stat.read_text()
            except OSError:  # the thread has ended
                continue
            name = text[text.index("(") + 1 : text.rindex(")")]
            fields = text[text.rindex(")") + 2 :].split()
            used[who, name] += (int(fields[11]) + int(fields[12])) / tick
    return dict(used)


def by_role(spent: Mapping[tuple[str, str], float]) -> str:
    """A table of processes, largest first, with their threads."""
    roles: dict[str, Counter[str]] = {}
    for (who, thread), seconds in spent.items():
        roles.setdefault(who, Counter())[thread] += seconds
    rows = []
    for who, threads in sorted(roles.items(), key=lambda item: -item[1].total()):
        if threads.total() < 0.002:
            continue
        named = [f"{t} {s:.3f}" for t, s in threads.most_common(5) if s >= 0.002]
        rows.append({"process": who, "CPU s a step": threads.total(), "threads": ", ".join(named)})
    total = sum(c.total() for c in roles.values())
    return table([*rows, {"process": "all", "CPU s a step": total, "threads": ""}])


def shares(name: str, stacks: str) -> str:
    """A table of what a process was doing, from py-spy's raw output."""
    counts: Counter[str] = Counter()
    for line in stacks.splitlines():
        stack, _, count = line.rpartition(" ")
        if not stack.rpartition(";")[2].startswith(WAITING):
            counts[part(name, stack)] += int(count)
    total = counts.total()
    rows = [
        {"part": what, "s": n / RATE, "share": f"{n / total:.1%}"}
        for what, n in counts.most_common(25)
    ]
    return f"{name}, samples of running threads:\n\n{table(rows)}"


def part(name: str, stack: str) -> str:
    """The first rule that matches; else the last frame."""
    for words, what in PARTS.get(name, ()):
        if words in stack:
            return what
    return "other" if name in PARTS else stack.rpartition(";")[2]


if __name__ == "__main__":
    main()
