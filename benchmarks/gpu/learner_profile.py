"""Where the time of a learner's update goes, and what it launches, waits for and writes.

    python benchmarks/gpu/learner_profile.py [--shapes 0.6b 1.7b 8b] [--layers torch] [--out FILE]
    python benchmarks/gpu/learner_profile.py --device cpu        # dry run: a tiny shape, and counts

One learner rank of random weights (ZeRO-2, bfloat16, TIS, the top 20 log-probs) takes whole updates
of 32 x 8 answers to prompts of 256 tokens, of 192 tokens in the mean and 512 at most. Shape 8b has
two layers of an 8B model. Rows: the update (time, rate, launches, times that the host waits for the
device); its regions, in place; embedding, attention, layers and head alone, forward and backward;
and each line of rlcore at which the host waits. `rest` is what no region has: mostly the host.

Waits are counted where a tensor is read (`item`, `tolist`, `bool`, ...), where a result's size
depends on values (`nonzero`, masks as indices), and where a tensor goes to the host. On a CPU,
where all tensors are the host's, the count is an upper bound.
"""

from __future__ import annotations

import argparse
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any
from unittest import mock

import numpy as np
import runs
import torch
from layers import PEAKS
from offload import rank_of
from random_model import FIRST, QWEN, SHAPES, random_model, tokenizer
from setting import Row
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

LAYER_8B = {
    **QWEN,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
}
PROFILED = {**SHAPES, "8b": LAYER_8B}
GIB = 2**30
TOPK = 20
# how a tensor is read; what they cause below is not counted again
READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__")
SIZED = ("nonzero", "masked_select", "_unique2", "unique_consecutive", "equal", "unique_dim")
VIEWS = ("view", "expand", "permute", "transpose", "t", "select", "slice", "detach", "alias")
VIEWS += ("unsqueeze", "squeeze", "split", "unbind", "as_strided", "_unsafe_view", "lift_fresh")


def here() -> str:
    """The innermost line of rlcore that is being run."""
    frames = [f for f in traceback.extract_stack() if "/rlcore/" in f.filename]
    if not frames:
        return "outside rlcore"
    last = frames[-1]
    return f"rlcore/{last.filename.rpartition('/rlcore/')[2]}:{last.lineno}"


class Reads(TorchFunctionMode):
    """Counts reads of tensors by the host, by place."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READS:
            self.waits[f"{here()} {name}"] += 1
            with torch._C.DisableTorchFunction():
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    """Counts operations that launch a kernel, the bytes of their results, and those whose results'
    sizes depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.launches, self.bytes = 0, 0
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in SIZED or (name.startswith("index") and _by_mask(args)):
            self.waits[f"{here()} {name}"] += 1
        if name not in VIEWS and not func.is_view:
            parts = found if isinstance(found, tuple | list) else (found,)
            sizes = [t.numel() * t.element_size() for t in parts if isinstance(t, torch.Tensor)]
            self.launches, self.bytes = self.launches + bool(sizes), self.bytes + sum(sizes)
        return found


def _by_mask(args: Any) -> bool:
    indices = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
    return any(isinstance(t, torch.Tensor) and t.dtype == torch.bool for t in indices)


class Regions:
    """Seconds of methods, in place: by events of the GPU's stream, or by the clock of a CPU."""

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        self._marks: list[tuple[str, Any, Any]] = []

    def mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def of(self, methods: dict[str, tuple[Any, str]]) -> Iterator[None]:
        """Time methods (an object and a name) of these regions meanwhile."""
        with ExitStack() as patched:
            for region, (owner, name) in methods.items():
                method = getattr(type(owner), name)
                patched.enter_context(
                    mock.patch.object(type(owner), name, self._timed(region, method))
                )
            yield

    def _timed(self, region: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            begun = self.mark()
            found = method(*args, **kwargs)
            self._marks.append((region, begun, self.mark()))
            return found

        return run

    def milliseconds(self) -> dict[str, float]:
        """By region, over all calls."""
        found: Counter[str] = Counter()
        for region, begun, end in self._marks:
            found[region] += begun.elapsed_time(end) if self._cuda else 1e3 * (end - begun)
        return dict(found)


def now(device: str) -> float:
    """Milliseconds, when the device has done what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()
    return 1e3 * time.perf_counter()


def groups(vocabulary: int, small: bool) -> list[Any]:
    """32 x 8 answers, or 2 x 4 on a CPU, whose ends come by chance; rewards are random."""
    from rlcore.testing.records import make_group, make_trajectory

    rng = np.random.default_rng(0)
    count, samples, prompt, mean, most = (2, 4, 8, 8, 16) if small else (32, 8, 256, 192, 512)
    found = []
    for g in range(count):
        asked = rng.integers(FIRST, vocabulary, prompt).tolist()
        parts = [
            make_trajectory(
                g,
                i,
                turns=[(asked, rng.integers(FIRST, vocabulary, length).tolist())],
                k=TOPK,
            )
            for i, length in enumerate(np.minimum(rng.geometric(1 / mean, samples), most))
        ]
        found.append(make_group(parts, rng.random(samples).tolist()))
    return found


def regions(one: Any) -> dict[str, tuple[Any, str]]:
    """What is timed in place: parts that do not lie within one another."""
    update, engine = one._update, one.engine
    return {
        "masks": (engine.policy, "attending"),
        "embedding and layers, forward": (engine.policy, "_hidden"),
        "head, forward": (engine.policy.head, "forward"),
        "corrections and metrics": (update.pipeline, "correct"),
        "loss": (update, "_loss_of"),
        "backward": (engine, "backward"),
        "gradient norm": (engine, "grad_norm"),
        "optimizer": (engine, "step"),
    }


def updated(one: Any, batch: list[Any], step: int, device: str) -> tuple[float, float]:
    """Milliseconds until the batch is laid out, and of the update."""
    begun = now(device)
    one.begin_phase([batch])
    laid = now(device)
    one.train_step(step)
    return laid - begun, now(device) - laid


def counted(one: Any, batch: list[Any], step: int, *, small: bool) -> tuple[Row, Counter[str]]:
    """The places where the host waits in one update; on a CPU also its operations and the bytes of
    their results, which a mode counts that compiled attention does not pass."""
    one.begin_phase([batch])
    operations = Operations()
    with ExitStack() as modes:
        reads = modes.enter_context(Reads())
        if small:
            modes.enter_context(operations)
        one.train_step(step)
    waits = reads.waits + operations.waits
    row: Row = {"host waits, at most": sum(waits.values())}
    if small:
        row |= {"operations": operations.launches, "GiB of results": operations.bytes / GIB}
    return row, waits


def on_gpu(one: Any, batch: list[Any], step: int) -> Row:
    """What the profiler sees of an update: launches, copies that wait, and how long kernels run."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    one.begin_phase([batch])
    with torch.profiler.profile(activities=activities) as found:
        one.train_step(step)
        torch.cuda.synchronize()
    events = found.key_averages()
    counts = {e.key: e.count for e in events}
    busy = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
    return {
        "GPU busy ms": sum(e.self_device_time_total for e in busy) / 1e3,
        "launches": sum(n for key, n in counts.items() if "LaunchKernel" in key),
        "waits": sum(n for key, n in counts.items() if "Synchronize" in key),
    }


def called(module: Any, run: Callable[[], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a module's first call in a forward pass."""
    kept: list[Any] = []
    hook = module.register_forward_pre_hook(
        lambda _, args, kwargs: kept.append((args, kwargs)), with_kwargs=True
    )
    with torch.no_grad():
        run()
    hook.remove()
    args, kwargs = kept[0]
    return args, kwargs


def alone(module: Any, call: tuple[tuple[Any, ...], dict[str, Any]], device: str) -> float:
    """Milliseconds of a module's forward and backward pass, the median of five."""
    args, kwargs = call

    def leaf(value: Any) -> Any:
        floats = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.detach().requires_grad_() if floats else value

    taken = []
    for _ in range(6):
        given = [leaf(a) for a in args]
        named = {k: leaf(v) if k == "hidden_states" else v for k, v in kwargs.items()}
        begun = now(device)
        found = module(*given, **named)
        out = found[0] if isinstance(found, tuple) else found
        inputs = [v for v in (*given, *named.values()) if isinstance(v, torch.Tensor)]
        by = [t for t in (*inputs, *module.parameters()) if t.requires_grad]
        # gradients go nowhere: an engine's hooks of its parameters are not called
        torch.autograd.grad(out.sum(), by, allow_unused=True)
        taken.append(now(device) - begun)
    return float(np.median(taken[1:]))


def parts(one: Any, device: str) -> dict[str, float]:
    """Milliseconds of parts alone, of all layers and micro-batches of an update."""
    update, policy = one._update, one.engine.policy
    batch = one._phase[0]
    mb = batch.micro[0]
    base, count = policy.lm.base_model, len(batch.micro)
    layer = base.layers[0]
    forward = partial(policy.hidden, mb)
    found = {
        "embedding": alone(base.embed_tokens, called(base.embed_tokens, forward), device),
        "attention with its products, all layers": len(base.layers)
        * alone(layer.self_attn, called(layer.self_attn, forward), device),
        "layers": len(base.layers) * alone(layer, called(layer, forward), device),
    }
    with torch.no_grad():
        hidden = forward().to(policy.head.weight.dtype)
    from rlcore.learner.update import _actor_ids

    for name, topk in (("head", 0), (f"head, top {update.topk}", update.topk)):
        spec = replaced(update.head, topk)
        ids = _actor_ids(batch, mb, spec)
        found[name] = alone(Scored(policy.head, mb.targets, ids, spec), ((hidden,), {}), device)
    return {name: ms * count for name, ms in found.items()}


def replaced(head: Any, topk: int) -> Any:
    from dataclasses import replace

    return replace(head, topk=topk, sketch=bool(topk))


class Scored(torch.nn.Module):
    """The head's pass over hidden states, as an update asks for it; its first output is log p."""

    def __init__(self, head: Any, targets: torch.Tensor, ids: Any, spec: Any) -> None:
        super().__init__()
        self.head, self.asked = head, (targets, ids, spec)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        targets, ids, spec = self.asked
        found: torch.Tensor = self.head(hidden, targets, ids, spec, None)[1]
        return found


def rate(shape: dict[str, int], positions: float, tokens: float, ms: float) -> Row:
    """TFLOP/s of an update, without its attention: 6 FLOPs a weight and position, the head's a
    sampled token; and the share of the card's peak."""
    width, heads = shape["hidden_size"], shape["num_attention_heads"]
    keys, dim = shape["num_key_value_heads"], shape["head_dim"]
    layer = width * dim * (2 * heads + 2 * keys) + 3 * width * shape["intermediate_size"]
    flops = 6 * (shape["num_hidden_layers"] * layer * positions)
    flops += 6 * width * shape["vocab_size"] * tokens
    speed = flops / (ms / 1e3)
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    peak = next((p for name, p in PEAKS.items() if name in card), None)
    return {"TFLOP/s": speed / 1e12, "share of peak": speed / peak if peak else None}


def profile(shape: str, args: argparse.Namespace, add: Callable[[Row], None]) -> None:
    """Measure one shape, a row at a time."""
    folder = args.work / f"model-{shape}"
    if not (folder / "config.json").exists():
        random_model(PROFILED[shape], args.device).save_pretrained(folder)
        tokenizer(folder, PROFILED[shape]["vocab_size"])
    small = args.device == "cpu"
    one = rank_of(str(folder), small=small, layers=args.layers, micro_batch_tokens=args.micro)
    batch = groups(PROFILED[shape]["vocab_size"], small)
    for step in range(2):
        updated(one, batch, step, args.device)
    if not small:
        torch.cuda.reset_peak_memory_stats()
    laid, ms = updated(one, batch, 2, args.device)
    mine = one._phase[0]
    positions = sum(mb.tokens for mb in mine.micro)
    row: Row = {"shape": shape, "layers": args.layers, "micro-batches": len(mine.micro)}
    row |= {"positions": positions, "tokens": mine.tokens, "laid out ms": laid, "update ms": ms}
    row |= rate(PROFILED[shape], positions, mine.tokens, ms)
    row["peak GiB"] = None if small else torch.cuda.max_memory_allocated() / GIB
    clock = Regions(args.device)
    with clock.of(regions(one)):
        _, whole = updated(one, batch, 3, args.device)
    timed = clock.milliseconds()
    counts, waits = counted(one, batch, 4, small=small)
    row |= counts | ({} if small else on_gpu(one, batch, 5))
    add(row)
    for name, took in {**timed, "rest": whole - sum(timed.values())}.items():
        add({"shape": shape, "region": name, "ms": took, "share": took / whole})
    for name, took in parts(one, args.device).items():
        add({"shape": shape, "alone": name, "ms": took, "times the update": took / ms})
    for place, times in waits.most_common():
        add({"shape": shape, "the host waits at": place, "times": times})


def options(words: list[str] | None = None) -> argparse.Namespace:
    p = runs.parser(__doc__, 100.0)
    p.add_argument("--shapes", nargs="+", choices=[*PROFILED], default=["0.6b", "1.7b", "8b"])
    p.add_argument("--layers", choices=("torch", "liger", "compiled"), default="torch")
    p.add_argument("--micro", type=int, default=16384, help="tokens of a micro-batch")
    args = p.parse_args(words)
    if args.device == "cpu":
        args.shapes, args.micro = ["tiny"], 64
    return args


def main() -> None:
    args = options()
    clock = runs.Clock(args.budget)
    args.work.mkdir(parents=True, exist_ok=True)
    rows = runs.opened(args, "learner", ",".join(args.shapes))
    for shape in args.shapes:
        if clock.left < 15:
            rows.add({"part": "learner", "what": f"skipped: time, {shape}"})
            continue
        profile(shape, args, lambda row: rows.add({"part": "learner", **row}))
    clock.say(f"rows in {rows.path}")


if __name__ == "__main__":
    main()
