"""Experts of which each of several ranks holds a part: DeepSpeed's AutoEP.

A rank has E / N of the E experts of every layer; their tokens come to it from the other ranks of
its group, by an all-to-all around the experts, and go back. Everything else is whole on every rank.
AutoEP holds a layer's experts as w1 (gate), w3 (up) [E / N, I, H] and w2 (down) [E / N, H, I], and
the router's weight one module deeper. Under the names that transformers gives them, which
publications and checkpoints know, stand parameters without storage, in the shapes of whole tensors.

DeepSpeed's clipping is not used: it averages norms over ranks that have other experts, so that
these would scale their gradients unequally.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlcore.errors import UserError
from rlcore.weights.experts import FAMILIES

KEY = "learner.expert_parallel"
# what AutoEP makes of a stacked parameter, in the order of its rows
_PIECES = {"experts.gate_up_proj": ("w1", "w3"), "experts.down_proj": ("w2",)}
_ROUTER, _MOVED = ".mlp.gate.weight", ".mlp.router.gate.weight"


def check_experts(lm: Any, count: int) -> None:
    """Raise UserError for a model whose experts cannot be divided so."""
    config = lm.config.get_text_config()
    reason = None
    if config.model_type not in FAMILIES:
        reason = f"experts are known of model_type {', '.join(FAMILIES)}, not {config.model_type}"
    elif any(not hasattr(layer.mlp, "experts") for layer in lm.base_model.layers):
        reason = "the model has layers without experts"
    if reason is not None:
        raise UserError.choice(KEY, count, ("1",), reason)
    experts = config.num_experts
    fits = [n for n in range(1, experts + 1) if experts % n == 0]
    if count not in fits:
        raise UserError.choice(
            KEY, count, tuple(map(str, fits)), f"the model has {experts} experts in a layer"
        )


def autoep_config(lm: Any, count: int) -> dict[str, Any]:
    """DeepSpeed's section `expert_parallel`. It sees the policy around the model, and reads no
    configuration of that."""
    config = lm.config.get_text_config()
    return {
        "enabled": True,
        "autoep_size": count,
        "preset_model": config.model_type,
        "moe_layer_pattern": r"lm\.model\.layers\.\d+\.mlp",
        "top_k": config.num_experts_per_tok,
        "route_norm": config.norm_topk_prob,
    }


class ExpertParts:
    """The experts that this rank holds (`parts.Parts`)."""

    def __init__(self, names: list[str], held: Mapping[str, nn.Parameter], count: int) -> None:
        """`names`: of the model's parameters before AutoEP, `held`: those after it."""
        from deepspeed.utils import groups

        self.count = count
        self.group = groups._get_expert_parallel_group(f"ep_size_{count}")
        self.index = dist.get_rank(self.group)
        self._pieces: dict[Tensor, tuple[nn.Parameter, ...]] = {}
        #: parameters under their usual names, in the usual order
        self.named = {name: self._under(name, held) for name in names}
        self._divided = {piece for pieces in self._pieces.values() for piece in pieces}

    def _under(self, name: str, held: Mapping[str, nn.Parameter]) -> nn.Parameter:
        if name.endswith(_ROUTER):
            return held[name.removesuffix(_ROUTER) + _MOVED]
        for ending, kinds in _PIECES.items():
            if name.endswith(ending):
                experts = name.removesuffix(ending) + "experts"
                return self._stand_in(tuple(held[f"{experts}.{kind}"] for kind in kinds))
        return held[name]

    def _stand_in(self, pieces: tuple[nn.Parameter, ...]) -> nn.Parameter:
        experts, rows, columns = pieces[0].shape
        shape = (experts * self.count, rows * len(pieces), columns)
        p = nn.Parameter(torch.empty(shape, dtype=pieces[0].dtype, device="meta"))
        self._pieces[p] = pieces
        return p

    def shape(self, p: Tensor) -> torch.Size:
        """Of the whole parameter, which stand-ins have."""
        return p.shape

    def whole(self, p: Tensor, read: Callable[[Any], Tensor]) -> Tensor:
        """[E, rows, columns] of all ranks' experts; of any other parameter what `read` gives."""
        if p not in self._pieces:
            return read(p)
        mine = torch.cat([read(piece).detach() for piece in self._pieces[p]], dim=1)
        found = [torch.empty_like(mine) for _ in range(self.count)]
        dist.all_gather(found, mine, group=self.group)
        return torch.cat(found)

    def own(self, p: nn.Parameter, whole: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
        """This rank's experts of it, by what AutoEP holds them as."""
        if p not in self._pieces:
            return [(p, whole)]
        pieces = self._pieces[p]
        mine = whole.chunk(self.count)[self.index]
        return list(zip(pieces, mine.chunk(len(pieces), dim=1), strict=True))

    def squares(self, pairs: Iterator[tuple[Tensor, Tensor]], *, all_held: bool) -> Tensor:
        """See `Parts`: what is no expert's, all ranks of the group hold."""
        each = [
            g.detach().float().square().sum()
            / (self.count if all_held and p not in self._divided else 1)
            for p, g in pairs
        ]
        return torch.stack(each).sum() if each else torch.zeros(())
