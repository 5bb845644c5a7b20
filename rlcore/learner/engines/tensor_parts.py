"""Matrices of the layers of which each of several ranks holds a part: DeepSpeed's AutoTP.

Query, key, value, gate and up projections are divided by outputs, so that a rank has whole heads;
output and down projections by inputs, whose products are summed over the ranks. Everything else is
whole on every rank, embedding and head included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlcore.errors import UserError

KEY = "learner.tensor_parallel"
_BY_OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_BY_INPUTS = ("o_proj", "down_proj")
# norms over one head: a rank's gradient is that of its own heads
_OF_HEADS = ("q_norm", "k_norm")


def autotp_config(count: int) -> dict[str, Any]:
    """DeepSpeed's section `tensor_parallel`. Its own table of models would divide the head too,
    whose weight the head pass reads whole."""

    def spec(names: tuple[str, ...], kind: str, **more: Any) -> dict[str, Any]:
        pattern = rf".*\.layers\.\d+\..*\.({'|'.join(names)})\.(weight|bias)$"
        return {"patterns": [pattern], "partition_type": kind, **more}

    specs = [
        spec(_BY_OUTPUTS, "column"),
        spec(_BY_INPUTS, "row"),
        spec(_OF_HEADS, "skip", grad_allreduce=True),
    ]
    partition = {"use_default_specs": False, "layer_specs": specs}
    return {"autotp_size": count, "partition_config": partition}


def check_layers(lm: Any, count: int) -> None:
    """Raise UserError for a model whose layers hold anything that this division does not know, or
    whose heads or MLP the ranks do not divide evenly."""
    odd = [name for name, p in lm.named_parameters() if not _known(name, p, lm)]
    if odd:
        raise UserError.choice(KEY, count, ("1",), f"it does not know how to divide {odd[0]}")
    config = lm.config.get_text_config()
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    inner = getattr(config, "intermediate_size", None) or 1
    sizes = (heads, key_heads, inner)
    fits = [n for n in range(1, key_heads + 1) if not any(size % n for size in sizes)]
    if count not in fits:
        raise UserError.choice(
            KEY,
            count,
            tuple(map(str, fits)),
            f"the model has {heads} heads, {key_heads} key heads and {inner} inner units",
        )


def _known(name: str, p: Tensor, lm: Any) -> bool:
    """Whether a parameter is divided, or whole and outside of what is divided."""
    *path, kind = name.split(".")
    if "layers" not in path:
        return True
    layer = path[-1]
    if layer in _OF_HEADS:
        config = lm.config.get_text_config()
        width = getattr(config, "head_dim", None)
        return tuple(p.shape) == (width or config.hidden_size // config.num_attention_heads,)
    if layer in _BY_OUTPUTS + _BY_INPUTS:
        return kind in ("weight", "bias") and p.dim() <= 2
    inside = path[path.index("layers") + 2 :]
    return p.dim() == 1 and len(inside) == 1 and layer.endswith("norm")


class TensorParts:
    """The parts of matrices that this rank holds (`parts.Parts`)."""

    def __init__(self, trained: Mapping[str, nn.Parameter], count: int) -> None:
        """`trained`: by Hugging Face name, already divided."""
        from deepspeed.utils import groups

        self.count = count
        self.group = groups.get_tensor_model_parallel_group()
        self.index = dist.get_rank(self.group)
        dims = {p: _divided(name) for name, p in trained.items()}
        self._dims: dict[Tensor, int] = {p: dim for p, dim in dims.items() if dim is not None}

    def shape(self, p: Tensor) -> torch.Size:
        """Of the whole parameter."""
        sizes = list(p.shape)
        if p in self._dims:
            sizes[self._dims[p]] *= self.count
        return torch.Size(sizes)

    def whole(self, p: Tensor, read: Callable[[Any], Tensor]) -> Tensor:
        """All ranks' parts of what `read` gives for the parameter, in its shape."""
        part = read(p)
        if p not in self._dims:
            return part
        part = part.detach().contiguous()
        found = [torch.empty_like(part) for _ in range(self.count)]
        dist.all_gather(found, part, group=self.group)
        return torch.cat(found, dim=self._dims[p])

    def own(self, p: nn.Parameter, whole: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
        """The parameter, and this rank's part of it."""
        if p not in self._dims:
            return [(p, whole)]
        return [(p, whole.chunk(self.count, dim=self._dims[p])[self.index])]

    def squares(self, pairs: Iterator[tuple[Tensor, Tensor]], *, all_held: bool) -> Tensor:
        """See `Parts`: what is not divided, all ranks of the group hold, of a partition as well."""
        del all_held
        each = [
            g.detach().float().square().sum() / (1 if p in self._dims else self.count)
            for p, g in pairs
        ]
        return torch.stack(each).sum() if each else torch.zeros(())


def _divided(name: str) -> int | None:
    """The dimension by which a parameter is divided."""
    *_, layer, kind = name.split(".")
    if layer in _BY_OUTPUTS:
        return 0
    return 1 if layer in _BY_INPUTS and kind == "weight" else None


def whole_shape(p: nn.Parameter) -> torch.Size:
    """Shape of a parameter, also of one that ZeRO-3 has partitioned."""
    return getattr(p, "ds_shape", p.shape)
