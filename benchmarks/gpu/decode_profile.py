"""How fast requests decode together, and where a step's time goes on a GPU."""

from __future__ import annotations

import cProfile
import pstats
import time
from collections.abc import Callable
from typing import Any

from setting import Row

STEPS = 20  # of a profile
SHOWN = 12  # kernels and host operations by name
Ask = Callable[[Any, int], None]  # queues the requests, for so many new tokens


def prefilled(llm: Any, ask: Ask) -> tuple[int, float]:
    """Engine steps and seconds until every request has its first token."""
    ask(llm, 1)
    begun, steps = time.monotonic(), 0
    while llm.unfinished():
        llm.step()
        steps += 1
    return steps, time.monotonic() - begun


def decoding(llm: Any, ask: Ask, steps: int, prefill: int) -> tuple[list[Any], float]:
    """Finished trajectories, and tokens a second of `steps` steps in which all requests decode.

    `prefill`: steps that their prompts take. Prompts are not part of the time: those of long
    contexts take longer than all of the decoding, and not twice the same.
    """
    ask(llm, prefill + steps + steps // 2 + 4)
    done = [t for _ in range(prefill + steps // 2) for t in llm.step()]
    tokens, seconds = 0, 0.0
    for _ in range(steps):
        tokens += llm.running()
        begun = time.monotonic()
        done += llm.step()
        seconds += time.monotonic() - begun
    while llm.unfinished():
        done += llm.step()
    return done, tokens / max(seconds, 1e-9)


def decode_profile(llm: Any, ask: Ask, prefill: int) -> Row:
    """Of `STEPS` decode steps: milliseconds, the thread's processor microseconds a token, the
    busiest kernels, the host's operations, and the Python functions that take most by themselves.

    The step is timed without the profilers, which slow the host.
    """
    import torch

    ask(llm, prefill + 4 * STEPS)
    for _ in range(prefill + STEPS // 2):
        llm.step()
    began, running = time.thread_time(), llm.running()
    step_ms = _milliseconds_a_step(llm)
    host_us = 1e6 * (time.thread_time() - began) / STEPS / max(running, 1)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as found:
        _milliseconds_a_step(llm)
    python = cProfile.Profile()
    python.runcall(_milliseconds_a_step, llm)
    while llm.unfinished():
        llm.step()
    events = found.key_averages()
    cuda = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
    kernels = {e.key: e.self_device_time_total / STEPS / 1e3 for e in cuda}
    host = {e.key: e.self_cpu_time_total / STEPS / 1e3 for e in events}
    counts = {e.key: e.count / STEPS for e in events}
    return {
        "step ms": step_ms,
        "host us a token": host_us,
        "GPU busy ms": sum(kernels.values()),
        "graph launches": counts.get("cudaGraphLaunch", 0.0),
        "kernel launches": sum(n for key, n in counts.items() if "LaunchKernel" in key),
        "kernels ms": _largest(kernels),
        "host ms": _largest(host),
        "Python ms": _largest(_by_function(python)),
    }


def _by_function(profile: cProfile.Profile) -> dict[str, float]:
    """Milliseconds a step that each function takes without those it calls."""
    found: dict[str, float] = {}
    functions = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    for (file, _, name), numbers in functions.items():
        place = f"{file.rpartition('/')[2]}:{name}"
        found[place] = found.get(place, 0.0) + numbers[2] / STEPS * 1e3
    return found


def _milliseconds_a_step(llm: Any) -> float:
    import torch

    torch.cuda.synchronize()
    begun = time.monotonic()
    for _ in range(STEPS):
        llm.step()
    torch.cuda.synchronize()
    return (time.monotonic() - begun) / STEPS * 1e3


def _largest(shares: dict[str, float]) -> dict[str, float]:
    ordered = sorted(shares.items(), key=lambda item: -item[1])[:SHOWN]
    return {name[:80]: round(ms, 4) for name, ms in ordered if ms > 0}
