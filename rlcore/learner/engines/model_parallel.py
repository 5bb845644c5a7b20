"""Models and sequences of which each of several ranks holds a part: matrices by DeepSpeed's tensor
parallelism, experts, and attention over parts of sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from rlcore.attention.varlen import no_mask
from rlcore.errors import UserError
from rlcore.learner.policy import IN_PARTS
from rlcore.learner.ranks import Shards

TENSOR_KEY = "learner.tensor_parallel"
_BY_OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_BY_INPUTS = ("o_proj", "down_proj")
# norms over one head: a rank's gradient is from its own heads alone
_OF_HEADS = ("q_norm", "k_norm")


# Matrices of the layers of which each of several ranks holds a part: DeepSpeed's AutoTP.
#
# Query, key, value, gate and up projections are divided by outputs, so that a rank has whole heads;
# output and down projections by inputs, whose products are summed over the ranks. Everything else
# is whole on every rank, embedding and head included.


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
    """Raise UserError for a model whose layers hold a parameter that this division does not know,
    or whose heads or MLP cannot be divided evenly among the ranks."""
    odd = [name for name, p in lm.named_parameters() if not _known(name, p, lm)]
    if odd:
        raise UserError.choice(
            TENSOR_KEY, count, ("1",), f"it does not know how to divide {odd[0]}"
        )
    config = lm.config.get_text_config()
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    inner = getattr(config, "intermediate_size", None) or 1
    sizes = (heads, key_heads, inner)
    fits = [n for n in range(1, key_heads + 1) if not any(size % n for size in sizes)]
    if count not in fits:
        raise UserError.choice(
            TENSOR_KEY,
            count,
            tuple(map(str, fits)),
            f"the model has {heads} heads, {key_heads} key heads and {inner} inner units",
        )


def _known(name: str, p: Tensor, lm: Any) -> bool:
    """Return whether a parameter is divided, or whole and outside of the divided modules."""
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
        """See `ModelParts`."""
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
        """See `ModelParts`: all ranks of the group hold the parameters that are not divided, and
        their partitions."""
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


EXPERT_KEY = "learner.expert_parallel"
# what AutoEP makes of a stacked parameter, in the order of its rows
_PIECES = {"experts.gate_up_proj": ("w1", "w3"), "experts.down_proj": ("w2",)}
_ROUTER, _MOVED = ".mlp.gate.weight", ".mlp.router.gate.weight"


# Experts of which each of several ranks holds a part: DeepSpeed's AutoEP.
#
# A rank has E / N of the E experts of every layer; their tokens come to it from the other ranks of
# its group, by an all-to-all around the experts, and go back. Everything else is whole on every
# rank. AutoEP holds a layer's experts as w1 (gate), w3 (up) [E / N, I, H] and w2 (down) [E / N, H,
# I], and the router's weight one module deeper. Parameters without storage, in the shapes of whole
# tensors, have the names that transformers gives them, for publications and checkpoints.
#
# DeepSpeed's clipping is not used: it averages norms over ranks with different experts, which would
# then scale their gradients unequally.


def check_experts(lm: Any, count: int) -> None:
    """Raise UserError for a model whose experts AutoEP cannot divide."""
    config = lm.config.get_text_config()
    reason = None
    if config.model_type != "qwen3_moe":
        reason = f"experts are known of model_type qwen3_moe, not {config.model_type}"
    elif any(not hasattr(layer.mlp, "experts") for layer in lm.base_model.layers):
        reason = "the model has layers without experts"
    if reason is not None:
        raise UserError.choice(EXPERT_KEY, count, ("1",), reason)
    experts = config.num_experts
    fits = [n for n in range(1, experts + 1) if experts % n == 0]
    if count not in fits:
        raise UserError.choice(
            EXPERT_KEY, count, tuple(map(str, fits)), f"the model has {experts} experts in a layer"
        )


def autoep_config(lm: Any, count: int) -> dict[str, Any]:
    """DeepSpeed's section `expert_parallel`. It sees the policy around the model, whose
    configuration it cannot read."""
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
        """Shape of the whole parameter, which stand-ins have."""
        return p.shape

    def whole(self, p: Tensor, read: Callable[[Any], Tensor]) -> Tensor:
        """[E, rows, columns] of all ranks' experts; for any other parameter the result of
        `read`."""
        if p not in self._pieces:
            return read(p)
        mine = torch.cat([read(piece).detach() for piece in self._pieces[p]], dim=1)
        found = [torch.empty_like(mine) for _ in range(self.count)]
        dist.all_gather(found, mine, group=self.group)
        return torch.cat(found)

    def own(self, p: nn.Parameter, whole: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
        """This rank's experts of a stacked parameter, by the parameters that AutoEP holds."""
        if p not in self._pieces:
            return [(p, whole)]
        pieces = self._pieces[p]
        mine = whole.chunk(self.count)[self.index]
        return list(zip(pieces, mine.chunk(len(pieces), dim=1), strict=True))

    def squares(self, pairs: Iterator[tuple[Tensor, Tensor]], *, all_held: bool) -> Tensor:
        """See `ModelParts`: all ranks of the group hold the parameters that are not of experts."""
        each = [
            g.detach().float().square().sum()
            / (self.count if all_held and p not in self._divided else 1)
            for p, g in pairs
        ]
        return torch.stack(each).sum() if each else torch.zeros(())


# Attention over sequences that several ranks hold in parts: DeepSpeed's Ulysses (S. A. Jacobs and
# others, arXiv:2309.14509).
#
# Two all-to-all exchanges a layer. Before attention each rank gives its positions of all heads and
# receives all positions of its share of the heads; after attention, the reverse. Between them runs
# the attention that the model was loaded with, over whole sequences.


Attend = Callable[..., tuple[Tensor, Any]]


def split_attention(lm: Any, shards: Shards) -> None:
    """Let a model's attention exchange positions for heads, in place; each forward is then given
    this rank's part. Raises UserError where heads cannot be divided."""
    config = lm.config.get_text_config()
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    # a rank has whole key heads, or a copy of one
    fits = [
        n
        for n in range(1, heads + 1)
        if heads % n == 0 and (key_heads % n == 0 or n % key_heads == 0)
    ]
    if shards.count not in fits:
        raise UserError.choice(
            shards.key,
            shards.count,
            tuple(map(str, fits)),
            f"the model has {heads} attention heads and {key_heads} key heads",
        )
    core = lm.config._attn_implementation
    name = IN_PARTS + core
    AttentionInterface.register(name, _exchanging(ALL_ATTENTION_FUNCTIONS[core], shards))
    AttentionMaskInterface.register(name, no_mask)
    lm.set_attn_implementation(name)


def _exchanging(core: Attend, shards: Shards) -> Attend:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    # transformers' interface fixes the parameters
    def over_whole_rows(
        module: Any, query: Tensor, key: Tensor, value: Tensor, _: Any, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        mask = kwargs.pop("whole_mask", None)
        out, weights = core(module, query, key, value, mask, **kwargs)
        # rows of shared prefixes have no outputs for padding
        return F.pad(out, (0, 0, 0, 0, 0, query.shape[2] - out.shape[1])), weights

    made: dict[tuple[int, ...], UlyssesSPAttentionHF] = {}  # each module serves one number of rows

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, _: Any, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        rows, heads, _, width = query.shape
        key_heads = key.shape[1]
        shape = rows, heads, key_heads, width
        if shape not in made:
            made[shape] = UlyssesSPAttentionHF(
                attn=over_whole_rows,
                batch_size=rows,
                attn_head_count=heads,
                attn_head_size=width,
                kv_head_count=key_heads,
                num_hidden_layers=1,  # read by a debugging mode alone
                process_group=shards.group,
                seq_length_is_variable=True,
            )
        exchanged: tuple[Tensor, Any] = made[shape](module, query, key, value, None, **kwargs)
        return exchanged

    return attend
