"""How near a step is to the limit of this machine: the time that its best matrix product would need
for the operations of engine and learner on all cores, over the time of a step.

    python -m benchmarks.speed.limit --folder DIR [--loads short long-tailed smollm2] [--rounds 1]
                               [--out benchmarks/results/limit_cpu.md] [key=value ...]

First torch's own product (MKL, with the kernels of the run's trial) and oneDNN's are timed on the
matrices of each load's model, with all cores; the faster is the limit's. Then rlcore runs the loads
of `peers.py`, asynchronously and in turns. Operations are counted as the planner counts them
(`rlcore/metrics/limit.py`). Figures count on a machine that does nothing else: the page says how
busy it was. A run takes one to two minutes. Needs cache/models/smollm2-135m for `smollm2`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.harness import machine, table
from benchmarks.peers.peer_adapters import Rlcore, environment
from benchmarks.peers.peers import ASYNC, LOADS, ON_POLICY, QUIET, SKIPPED, Load, job_of
from rlcore.cluster.cpu.kernels import KERNELS, Shape, common_shapes
from rlcore.cores import cores
from rlcore.metrics.limit import limit_share
from rlcore.metrics.rows import run_rows
from rlcore.models.folder import read_shapes

SMOLLM2 = Path("cache/models/smollm2-135m")
ROWS = 1024  # of the products, as of a learner's micro-batch
TRIED_S = 0.5  # for each shape and library
REAL = Load("SmolLM2-135M", 16, 16, 128, 0, {ASYNC: 9, ON_POLICY: 8})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--loads", nargs="+", default=["short", "long-tailed", "smollm2"])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path, help="a page for the table")
    parser.add_argument("words", nargs="*", help="further overrides of rlcore")
    args = parser.parse_args()
    folder: Path = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    rows, busiest = [], 0.0
    for job, steps in jobs(args.loads, folder, args.words):
        speeds = products(common_shapes(read_shapes(job["model"]).values()))
        print(f"{job['load']}: {shown(speeds)}", flush=True)
        for round_ in range(args.rounds):
            for who in (ASYNC, ON_POLICY):
                busy = psutil.cpu_percent(interval=2.0) / 100 * (os.cpu_count() or 1)
                busiest = max(busiest, busy)
                found = measure(job, steps[who], folder, f"{who}-{round_}", max(speeds.values()))
                rows.append({"load": job["load"], "who": who, **found, "busy cores": busy})
                print(f"  {who}: {found}", flush=True)
    text = page(rows, busiest)
    print(f"\n{text}")
    if args.out and busiest > QUIET:
        print(f"{args.out} stays as it was: the machine was busy")
    elif args.out:
        args.out.write_text(text)


def jobs(
    loads: Sequence[str], folder: Path, words: Sequence[str]
) -> list[tuple[dict[str, Any], Mapping[str, int]]]:
    """The jobs of these loads, each with its steps by schedule."""
    found = [
        (job_of(load, folder, words), load.steps) for load in LOADS if load.name.split()[0] in loads
    ]
    if "smollm2" in loads:
        described = {k: v for k, v in asdict(REAL).items() if k != "name"}
        model = str(SMOLLM2.resolve())
        job = {**described, "load": REAL.name, "model": model, "words": list(words)}
        found.append((job, REAL.steps))
    return found


def products(shapes: Sequence[Shape]) -> dict[str, float]:
    """GFLOP/s of all cores by library: the geometric mean over the shapes of the fastest product
    each, by the clock."""
    torch.set_num_threads(cores())
    fused = torch.ops.mkldnn._linear_pointwise
    libraries: dict[str, Callable[[Any, Any], Any]] = {
        "MKL": torch.nn.functional.linear,
        "oneDNN": lambda x, w: fused(x, w, None, "none", [], ""),
    }
    rates: dict[str, list[float]] = {name: [] for name in libraries}
    for outputs, inputs in shapes:
        x, w = torch.randn(ROWS, inputs), torch.randn(outputs, inputs)
        for name, product in libraries.items():
            best = fastest(product, x, w)
            rates[name].append(2e-9 * ROWS * outputs * inputs / best)
    return {name: math.exp(statistics.mean(map(math.log, of))) for name, of in rates.items()}


def fastest(product: Callable[[Any, Any], object], x: Any, w: Any) -> float:
    """Seconds of the fastest of many calls."""
    product(x, w)
    best, end = math.inf, time.perf_counter() + TRIED_S
    while time.perf_counter() < end:
        begun = time.perf_counter()
        product(x, w)
        best = min(best, time.perf_counter() - begun)
    return best


def shown(speeds: Mapping[str, float]) -> str:
    """Example: "MKL 180, oneDNN 195 GFLOP/s on 2 cores" """
    found = ", ".join(f"{name} {rate:.0f}" for name, rate in speeds.items())
    return f"{found} GFLOP/s on {cores()} core{'s' if cores() > 1 else ''}"


def measure(
    job: Mapping[str, Any], steps: int, folder: Path, name: str, gflops: float
) -> dict[str, float]:
    """One run: seconds of a step, those at the limit, and their ratio."""
    who = ON_POLICY if name.startswith(ON_POLICY) else ASYNC
    place = folder / f"{job['load']}-{name}".replace(" ", "_").replace(",", "")
    found = Rlcore().run(job, steps, place, on_policy=who == ON_POLICY)
    run_dir = place.with_name(f"{place.name}-{os.getpid()}")
    about = json.loads((run_dir / "about.json").read_text())
    about["limit"] |= {"gflops": gflops}
    share = limit_share(about, run_rows(run_dir), SKIPPED[who])
    step_s = statistics.mean(found["step_s"][SKIPPED[who] :])
    return {"step_s": step_s, "limit_s": share * step_s, "limit / step": share}


def page(rows: Sequence[Mapping[str, Any]], busiest: float) -> str:
    """The whole result."""
    valid = "" if busiest <= QUIET else " **The machine was busy: these figures do not count.**"
    return (
        "# The limit of a step\n\n`python -m benchmarks.speed.limit`, "
        f"{machine()}.{valid} `limit_s`: the operations of a step at the speed of the best matrix "
        "product on all cores.\n\n"
        f"{table([dict(row) for row in rows])}\n"
    )


if __name__ == "__main__":
    os.environ |= {n: v for n, v in environment().items() if n == KERNELS}  # read once by MKL
    main()
