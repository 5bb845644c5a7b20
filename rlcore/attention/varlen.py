"""Dense attention over packed sequences with torch's own variable-length kernel, or with the
FlashAttention 4 that is part of vLLM's wheel, as attention implementations of transformers. It
serves GPUs without flash-attn, which takes hours to build.

Load the model with `attn_implementation=register_varlen()` or `register_fa4()`; every forward needs
`sequences`, made once for a micro-batch and used by all layers:

    model(input_ids=ids, position_ids=pos, use_cache=False, sequences=Sequences.of(pos))

The tests put a plain implementation in place of the kernel, which CPUs lack, and call the kernel
itself on tensors without memory. On an H100 it equals SDPA, forward and backward, and learners of
whole runs attend by it (`benchmarks/results/gpu_h100.md`). FlashAttention 4 equals SDPA there, too;
no learner has attended by it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from rlcore.errors import UserError

# transformers tries to import any name that contains "flash" as a package or kernel
NAME = "torch_varlen"
FA4 = "packed_fa4"
NAMES = (NAME, FA4)
# torch 2.11, of the GPU kit, wants as many key heads as query heads
_TAKES_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters
FORWARD_ONLY = (-1, 0)  # torch's window of causal attention: everything before, nothing after


@dataclass(frozen=True, slots=True)
class Sequences:
    """Where sequences begin and end in a micro-batch's flattened positions.

    Example, two sequences of 5 and 3 tokens: Sequences(tensor([0, 5, 8], dtype=int32), 5)
    """

    bounds: Tensor  # [S+1] int32, on the device of the positions
    longest: int

    @classmethod
    def of(cls, position_ids: Tensor, starts: Iterable[int] | None = None) -> Sequences:
        """position_ids [R, W]: one row of packed sequences, each from 0 on, or R padded rows.

        `starts`: where the sequences of one row begin; without them the host waits for the device.
        """
        rows, width = position_ids.shape
        if rows == 1:
            found = starts
            if found is None:
                found = torch.nonzero(position_ids[0] == 0)[:, 0].tolist()
            ends = torch.tensor([*found, width], dtype=torch.int32)
            return cls(ends.to(position_ids.device), int(ends.diff().max()))
        # a row's padding follows its sequence and, as attention is causal, changes nothing in it
        bounds = torch.arange(rows + 1, device=position_ids.device, dtype=torch.int32) * width
        return cls(bounds, width)


#: (q [N, H, D], k and v [N, Hk, D], sequences, scale of scores, window or None) -> [N, H, D]
Kernel = Callable[[Tensor, Tensor, Tensor, Sequences, float | None, int | None], Tensor]


def register_varlen() -> str:
    """Register with transformers and return the implementation's name."""
    return _register(NAME, by_torch)


def register_fa4() -> str:
    """As `register_varlen`. Raises UserError where the kernel cannot be imported."""
    _fourth()
    return _register(FA4, by_fa4)


def _register(name: str, kernel: Kernel) -> str:
    AttentionInterface.register(name, partial(attend_packed, kernel))
    AttentionMaskInterface.register(name, no_mask)
    return name


def no_mask(*args: Any, **kwargs: Any) -> None:
    """Bounds separate packed sequences, and nothing attends to what follows it."""


# transformers' interface fixes the parameters
def attend_packed(
    kernel: Kernel,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [R, H, W, D], key and value [R, Hk, W, D] -> [R, W, H, D]."""
    sequences: Sequences | None = kwargs.get("sequences")
    if sequences is None or attention_mask is not None:
        raise RuntimeError("attention over packed sequences takes sequences, and no mask")
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise UserError(
            "learner.attention=varlen and fa4 compute neither soft-capped attention nor attention "
            "sinks, which this model has: choose another model."
        )
    rows, heads, width, dim = query.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    out = kernel(q, k, v, sequences, kwargs.get("scaling"), kwargs.get("sliding_window"))
    return out.view(rows, width, heads, dim), None


# `Kernel` fixes the parameters
def by_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: Sequences,
    scaling: float | None,
    sliding: int | None,
) -> Tensor:
    window = FORWARD_ONLY if sliding is None else (sliding - 1, 0)
    heads, key_heads = q.shape[1], k.shape[1]
    grouped: dict[str, Any] = {"enable_gqa": heads != key_heads}
    if not _TAKES_GROUPS:
        k, v = (x.repeat_interleave(heads // key_heads, dim=1) for x in (k, v))
        grouped = {}
    out = varlen_attn(
        q,
        k,
        v,
        sequences.bounds,
        sequences.bounds,
        sequences.longest,
        sequences.longest,
        scale=scaling,
        window_size=window,
        **grouped,
    )
    assert isinstance(out, Tensor)
    return out


@cache
def _fourth() -> Any:
    """FlashAttention 4, forward and backward, which is written in CUTLASS's Python."""
    try:
        from vllm.vllm_flash_attn.cute.interface import flash_attn_varlen_func
    except ImportError as e:
        raise UserError(
            f"learner.attention=fa4 needs the FlashAttention 4 of vLLM's CUDA wheel ({e}): choose "
            "varlen, torch's own kernel."
        ) from e
    return flash_attn_varlen_func


# `Kernel` fixes the parameters
def by_fa4(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: Sequences,
    scaling: float | None,
    sliding: int | None,
) -> Tensor:
    out, _ = _fourth()(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        cu_seqlens_q=sequences.bounds,
        cu_seqlens_k=sequences.bounds,
        max_seqlen_q=sequences.longest,
        max_seqlen_k=sequences.longest,
        softmax_scale=scaling,
        causal=True,
        window_size=(None if sliding is None else sliding - 1, None),
    )
    assert isinstance(out, Tensor)
    return out
