"""Computes the common prefixes of an engine step's requests once, on the CPU.

A group's samples have one prompt, and after new weights every running request is computed again
from its prompt on. vLLM's prefix cache shares whole blocks of 128 tokens there, so a step that
computes prompts holds the same positions many times. Here the model computes every distinct prefix
once, and only attention treats requests separately: keys and values are written to the blocks of
every request, as without sharing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from rlcore.rollout.engines.vllm.patches import ATTENTION, CACHE_UPDATE, MODEL_FORWARD, is_second

_WORTH = 0.8  # share of the positions above which a step is computed as it is


@dataclass(frozen=True, slots=True)
class Positions:
    """The distinct positions of a step.

    Example, two requests [5, 9, 4] and [5, 9, 7]: Positions([0, 1, 2, 5], [0, 1, 2, 0, 1, 3])
    """

    kept: Tensor  # [U] int64, of each distinct position one that has it
    of_each: Tensor  # [N] int64, 0..U-1

    @classmethod
    def of(
        cls, tokens: np.ndarray, bounds: Sequence[int], before: Sequence[tuple[int, ...]]
    ) -> Positions:
        """Built from the tokens [N] of requests, each from one bound to the next. `before`: a key
        for each request's positions that were computed in earlier steps."""
        nodes: dict[tuple[Any, int], int] = {}  # (node before it, token) -> node
        paths: dict[tuple[Any, bytes], np.ndarray] = {}
        kept: list[int] = []
        of_each = np.empty(len(tokens), np.int64)
        for start, end, root in zip(bounds, bounds[1:], before):
            whole = root, tokens[start:end].tobytes()
            if whole not in paths:
                at: Any = root
                for position, token in enumerate(tokens[start:end].tolist(), start):
                    key = at, token
                    at = nodes.setdefault(key, len(kept))
                    if at == len(kept):
                        kept.append(position)
                    of_each[position] = at
                paths[whole] = of_each[start:end]
            of_each[start:end] = paths[whole]
        return cls(torch.tensor(kept, dtype=torch.int64), torch.from_numpy(of_each))


class SharedPrompts:
    """Makes a model runner share positions, unless `reason` says why it cannot."""

    def __init__(self, runner: Any) -> None:
        #: of the pass that runs; None: it computes all positions
        self.positions: Positions | None = None
        self.reason = _unshared(runner)
        if self.reason is not None:
            return
        self._block_size: int = runner.cache_config.block_size
        layers = runner.compilation_config.static_forward_context
        for layer in layers.values():
            impl = layer.impl
            ATTENTION.replace(self._attending(impl.forward), of=impl)
            CACHE_UPDATE.replace(self._storing(impl.do_kv_cache_update), of=impl)
        self._layer = next(iter(layers))
        self._forward = MODEL_FORWARD.replace(self._run, of=runner)

    def _run(self, input_ids: Tensor, positions: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The runner's forward pass over N positions: [N, D]."""
        self.positions = found = self._distinct(input_ids)
        if found is None:
            return self._forward(input_ids, positions, *args, **kwargs)
        try:
            states = self._forward(input_ids[found.kept], positions[found.kept], *args, **kwargs)
        finally:
            self.positions = None
        return states[found.of_each]

    def _distinct(self, input_ids: Tensor) -> Positions | None:
        """The positions to compute; None: all of them."""
        metadata = get_forward_context().attn_metadata
        its: Any = metadata.get(self._layer) if isinstance(metadata, dict) else None
        # one token a request: no two can be known to follow the same tokens
        if its is None or its.max_query_len == 1 or its.num_actual_tokens != len(input_ids):
            return None
        bounds = its.query_start_loc.tolist()
        lengths = its.seq_lens.tolist()
        computed = [n - (b - a) for n, a, b in zip(lengths, bounds, bounds[1:])]
        before = [self._computed(its, request, n) for request, n in enumerate(computed)]
        found = Positions.of(input_ids.numpy(), bounds, before)
        return found if len(found.kept) <= _WORTH * len(input_ids) else None

    def _computed(self, metadata: Any, request: int, tokens: int) -> tuple[int, ...]:
        """A key that two requests share only if their first `tokens` positions hold the same
        tokens."""
        if tokens % self._block_size:
            return (-1 - request,)  # its last block is its own
        return tuple(metadata.block_table[request, : tokens // self._block_size].tolist())

    def _attending(self, attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def forward(
            layer: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any
        ) -> Tensor:
            if (found := self.positions) is None:
                return attend(layer, query, key, value, *rest, **named)
            output = named["output"]
            whole = output.new_empty(len(found.of_each), *output.shape[1:])
            # keys and values are read from their blocks
            named["output"] = whole
            attend(layer, query.index_select(0, found.of_each), key, value, *rest, **named)
            return torch.index_select(whole, 0, found.kept, out=output)

        return forward

    def _storing(self, store: Callable[..., None]) -> Callable[..., None]:
        def update(layer: Any, key: Tensor, value: Tensor, *rest: Any) -> None:
            if (found := self.positions) is not None:
                key, value = (t.index_select(0, found.of_each) for t in (key, value))
            store(layer, key, value, *rest)

        return update


def _unshared(runner: Any) -> str | None:
    """Why a runner's positions cannot be shared; None: they can."""
    if is_second(runner):
        return "the second runner calls the model in other ways"
    if not runner.cache_config.enable_prefix_caching:
        return "prefix caching is off"
    if runner.lora_config is not None:
        return "adapters count the positions of their requests"
    if runner.uses_mrope:
        return "positions have several dimensions"
    for name, layer in runner.compilation_config.static_forward_context.items():
        if type(layer) is not Attention or type(layer.impl) is not CPUAttentionBackendImpl:
            return f"{name} is not vLLM's own attention on the CPU"
    return None
