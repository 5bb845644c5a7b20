"""How a step's time and memory grow, one size at a time, with the exponents.

    python benchmarks/growth.py [--parts learner,fleet] [--rounds 2] [--out FILE]

`learner`: forward and backward of a step with the learner's own micro-batches and head pass, on one
thread; each row of sizes changes one of them. `fleet`: controller, buffer, admission and assignment
of `rlcore plan` with more and more actors, each of which has as much work; simulated time is free,
so that what is measured is the control plane and its fakes.

Seconds are of processor time, the shortest round. The exponent is that of the last doubling: where
a part that does not grow is small by then.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import machine, table

SIZES: dict[str, tuple[float, ...]] = {
    "groups": (4, 8, 16, 32),
    "samples": (2, 4, 8, 16),
    "response": (64, 128, 256, 512),
    "prompt": (64, 128, 256, 512),
    "vocabulary": (4096, 16384, 65536, 131072),
    "layers": (2, 4, 8, 16),
    "width": (64, 128, 256, 512),
}
BASE = {
    "groups": 8,
    "samples": 8,
    "response": 128,
    "prompt": 64,
    "vocabulary": 4096,
    "layers": 4,
    "width": 128,
}
ACTORS = (1, 4, 16, 64, 256)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--parts", default="learner,fleet")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", help="sizes as JSON: measure a learner step and print it as JSON")
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(learner_step(json.loads(args.one), args.rounds)))
        return
    tables = []
    if "learner" in args.parts:
        tables.append(series(SIZES, lambda name, size: one_process(name, size, args.rounds)))
    if "fleet" in args.parts:
        tables.append(series({"actors": ACTORS}, lambda _, size: fleet_step(int(size))))
    text = "\n".join(f"\n{t}" for t in tables)
    print(f"{machine()}\n{text}")
    if args.out is not None:
        args.out.write_text(text)


def series(
    sizes: Mapping[str, Sequence[float]], measure: Callable[[str, float], tuple[float, float]]
) -> str:
    """A table: for every size, seconds and MiB at each of its values and the last exponents."""
    rows = []
    for name, values in sizes.items():
        found = [measure(name, v) for v in values]
        seconds, memory = zip(*found)
        rows.append(
            {
                "size": name,
                "values": ", ".join(f"{v:g}" for v in values),
                "CPU s a step": ", ".join(f"{s:.3g}" for s in seconds),
                "exponent": exponent(values, seconds),
                "MiB": ", ".join(f"{m:.0f}" for m in memory),
                "exponent ": exponent(values, memory),
            }
        )
        print(rows[-1], flush=True)
    return table(rows)


def exponent(sizes: Sequence[float], found: Sequence[float]) -> str:
    """By the last two values."""
    grows = math.log(max(found[-1], 1e-9) / max(found[-2], 1e-9))
    return f"{grows / math.log(sizes[-1] / sizes[-2]):.2f}"


def one_process(name: str, size: float, rounds: int) -> tuple[float, float]:
    """(seconds, MiB beyond the model and its libraries) of a learner step, in a process of its
    own."""
    sizes = json.dumps(BASE | {name: size})
    command = [sys.executable, __file__, "--one", sizes, "--rounds", str(rounds)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds, mib = json.loads(done.stdout.splitlines()[-1])
    return float(seconds), float(mib)


def learner_step(sizes: dict[str, Any], rounds: int) -> tuple[float, float]:
    """(seconds, MiB that the peak lies above the memory before) of a step of the learner."""
    import psutil
    import torch
    from prefix_sharing import ALPHABET, Load, episodes_of, step

    from rlcore.learner.costs import PassCosts
    from rlcore.learner.packing import pack
    from rlcore.learner.policy import Policy, load_causal_lm
    from rlcore.learner.sharing import share_prefixes
    from rlcore.models.fresh import build_fresh_model
    from rlcore.models.specs import FreshModelSpec

    torch.set_num_threads(1)
    spec = FreshModelSpec(
        hidden_size=sizes["width"],
        intermediate_size=3 * sizes["width"],
        layers=sizes["layers"],
        heads=4,
        kv_heads=2,
        head_dim=sizes["width"] // 4,
        vocab_size=sizes["vocabulary"],
    )
    load = Load(
        "", sizes["groups"], sizes["samples"], sizes["prompt"], sizes["response"], 1.0, 4096
    )
    with tempfile.TemporaryDirectory() as folder:
        path = build_fresh_model(Path(folder) / "m", ALPHABET, spec, seed=0, max_len=2048)
        lm = load_causal_lm(path, "float32", "sdpa")
    assert share_prefixes(lm) is None
    policy, episodes = Policy(lm.train()), episodes_of(load)
    micro = pack(episodes, load.micro_batch_tokens, "sorted", costs=PassCosts.of(lm))
    tokens = sum(s.scored for (s,) in episodes)
    before = psutil.Process().memory_info().rss
    seconds = min(step(policy, micro, tokens) for _ in range(rounds))
    return seconds, (peak_rss() - before) / 2**20


def peak_rss() -> int:
    """Bytes, of this process so far."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def fleet_step(actors: int) -> tuple[float, float]:
    """(seconds, MiB of the whole process) of a simulated step with so many actors."""
    from rlcore.loop.specs import ScheduleSpec
    from rlcore.planner.forecast import forecast
    from rlcore.planner.run import PlannedFleet
    from rlcore.planner.specs import ActorRates, LearnerRates, LengthSpec, Rates

    rates = Rates(
        learner=LearnerRates(step_s=1.0, token_s=0.0),
        lengths=LengthSpec(prompt=64, median=32),
        grade_s=1e-6,
    )
    steps = 8
    schedule = ScheduleSpec(
        steps=steps, groups_per_step=4 * actors, max_staleness=1, on_publish="in_flight"
    )
    fleet = PlannedFleet(
        {"bf16": actors}, {"bf16": ActorRates()}, rates, schedule, samples=8, max_tokens=64
    )
    fleet = replace(fleet, schedule=schedule.model_copy(update={"wait_data_timeout_s": 1e9}))
    begun = time.process_time()
    forecast(fleet)
    return (time.process_time() - begun) / steps, peak_rss() / 2**20


if __name__ == "__main__":
    main()
