"""Speed of a learner on CPU: RMS norms with a backward pass of their own, and compute threads that
follow the machine's load."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rlcore.learner.engines.patches import NORM

_EPSILONS = ("variance_epsilon", "eps")  # what transformers' norms call it
_PROBE = (5, 24)  # rows and width of the input that a kind of norm is tried with


# RMS norms of float32 models on CPU, with a backward pass of their own.
#
# Autograd takes transformers' norm apart into eight operations, each of which reads and writes the
# whole activations again on the way back. The forward pass here is the same to the bit.


def own_norms(lm: nn.Module) -> int:
    """Have the modules of `lm` that compute exactly `rms_norm` use it, in place; returns their
    number. Each class of modules is tried by running it: a class that computes anything else
    (Gemma's multiplies by 1 + weight) is not changed.
    """
    kinds: dict[type[nn.Module], bool] = {}
    found = 0
    for module in lm.modules():
        kind = type(module)
        if not kind.__name__.endswith("RMSNorm"):
            continue
        if kind not in kinds:
            kinds[kind] = _is_plain(kind)
        if kinds[kind]:
            module.own_epsilon = _epsilon(module)  # type: ignore[assignment]
            # bound, so that a copy of the model has a method of its own
            NORM.replace(MethodType(_forward, module), of=module)
            found += 1
    return found


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight over the last dimension.

    x [..., D] float32, weight [D] float32 -> [..., D] (Zhang and Sennrich 2019, eq. 4).
    """
    normed: Tensor = _RmsNorm.apply(x, weight, epsilon)
    return normed


def _is_plain(kind: type[nn.Module]) -> bool:
    """Return whether a fresh module of this kind with random weights computes the result of
    `rms_norm`."""
    rows, width = _PROBE
    generator = torch.Generator().manual_seed(0)
    try:
        module = kind(width)
        epsilon = _epsilon(module)
        if epsilon is None or [n for n, _ in module.named_parameters()] != ["weight"]:
            return False
        weight = torch.randn(width, generator=generator)
        x = torch.randn(rows, width, generator=generator)
        with torch.no_grad():
            module.weight.copy_(weight)  # type: ignore[operator]
            return torch.equal(module(x), rms_norm(x, weight, epsilon))
    except (TypeError, RuntimeError):  # a module that is made or called in another way
        return False


def _epsilon(module: nn.Module) -> float | None:
    found = [getattr(module, name) for name in _EPSILONS if hasattr(module, name)]
    return float(found[0]) if found else None


def _forward(module: Any, x: Tensor) -> Tensor:
    return rms_norm(x, module.weight, module.own_epsilon)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out = rows * rows
        # the operations of transformers, in their order: sums round alike
        scale = out.mean(1, keepdim=True).add_(epsilon).rsqrt_()
        torch.mul(rows, scale, out=out).mul_(weight)
        ctx.save_for_backward(rows, weight, scale)
        return out.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """With s = 1 / sqrt(mean(x^2) + epsilon) and y = g * weight, the gradient of x is s * y -
        s^3 * x * mean(x * y), that of the weight the sum of g * x * s."""
        rows, weight, scale = ctx.saved_tensors
        g = grad.reshape(rows.shape)
        product = g * rows
        scales = scale.view(-1)
        d_weight = torch.mv(product.t(), scales) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, d_weight, None
        along = torch.mv(product, weight) * scales.pow(3).div_(-rows.shape[1])
        d_rows = torch.mul(g, scale, out=product).mul_(weight)
        d_rows.addcmul_(rows, along.unsqueeze(1))
        return d_rows.view(grad.shape), d_weight, None


STAT = Path("/proc/stat")
WINDOW_S = 0.04  # four ticks of the clock that /proc/stat counts in
FREE = 0.7  # of a core: what must have been free for one more thread


# Compute threads of a rank on CPU that follow the machine's load.
#
# In an asynchronous run, engines that wait for the learner leave their cores idle. A rank can use
# these, and has to give them back within a fraction of a step. The number of threads changes how
# sums round, so this is only for runs whose results depend on timing anyway.


@dataclass(frozen=True, slots=True)
class Usage:
    """Processor time of this machine and process, since some moment of the past.

    Example: Usage(at_s=12.0, own_s=3.5, idle_s=7.0)
    """

    at_s: float
    own_s: float  # processor seconds of this process, over all of its threads
    idle_s: float  # seconds that cores of this process idled, added up


def usage(cores: Collection[int], path: Path = STAT) -> Usage:
    """The present usage, by the times that Linux counts for each core."""
    names = {f"cpu{core}" for core in cores}
    lines = [line.split() for line in path.read_text().splitlines()]
    ticks = sum(int(words[4]) for words in lines if words and words[0] in names)
    return Usage(time.monotonic(), time.process_time(), ticks / os.sysconf("SC_CLK_TCK"))


def threads_for(before: Usage, now: Usage, *, fewest: int, most: int) -> int:
    """Threads for as many cores as this process used between the two moments, plus the idle ones.

    Example: with one core used and 0.8 of another idle it is 2."""
    free = now.own_s - before.own_s + now.idle_s - before.idle_s
    free /= now.at_s - before.at_s
    return max(fewest, min(most, int(free + 1.0 - FREE)))


class SpareCores:
    """Sets the number of torch's threads while a model computes."""

    def __init__(
        self,
        fewest: int,
        most: int,
        *,
        read: Callable[[], Usage] | None = None,
        set_threads: Callable[[int], None] = torch.set_num_threads,
    ) -> None:
        """`read`: the usage of the cores that this process may run on, which also bound `most`."""
        cores = os.sched_getaffinity(0)
        self._fewest, self._most = fewest, max(fewest, min(most, len(cores)))
        self._read = read or (lambda: usage(cores))
        self._set_threads = set_threads
        self._threads = fewest
        self._before = self._read()

    def follow(self, *_: Any) -> None:
        """Measure the load again and set the threads, unless that was a moment ago. A hook of
        modules and of gradients."""
        if time.monotonic() - self._before.at_s < WINDOW_S:
            return
        now = self._read()
        threads = threads_for(self._before, now, fewest=self._fewest, most=self._most)
        self._before = now
        if threads != self._threads:
            self._threads = threads
            self._set_threads(threads)

    def attach(self, lm: nn.Module) -> None:
        """Measure the load before each layer of a causal LM, forward and backward."""

        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            states = output if isinstance(output, Tensor) else output[0]
            if states.requires_grad:
                states.register_hook(self.follow)

        # the first list of modules, whatever its name
        modules = lm.base_model.modules()  # type: ignore[union-attr]
        for layer in next(m for m in modules if isinstance(m, nn.ModuleList)):
            layer.register_forward_pre_hook(self.follow)
            layer.register_forward_hook(after)
