"""The data-parallel ranks of a learner: their rendezvous and their reductions."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from rlcore.interfaces import Reduce
from rlcore.learner.specs import LearnerSpec, RankPlace
from rlcore.weights.group import rendezvous_store

if TYPE_CHECKING:
    from rlcore.learner.packing import MicroBatch


def join_ranks(place: RankPlace, device: torch.device) -> None:
    """Join the other ranks: gloo on CPU, NCCL on CUDA.

    A collective taking longer than `place.timeout_s` raises.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    os.environ["LOCAL_RANK"] = str(device.index or 0)
    if dist.is_initialized():
        return
    timeout = timedelta(seconds=place.timeout_s)
    # a single rank needs no port
    store = (
        dist.HashStore()
        if place.world_size == 1
        else rendezvous_store(place.host, place.port, place.rank, place.world_size, timeout)
    )
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "nccl",
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=timeout,
    )


def is_first_rank() -> bool:
    """Return whether this rank is the one that writes and publishes."""
    return dist.get_rank() == 0


def gather_objects(mine: Any) -> list[Any]:
    """Gather the object of every rank, in order of rank. Collective; for a few kilobytes."""
    world = dist.get_world_size()
    if world == 1:
        return [mine]
    found: list[Any] = [None] * world
    dist.all_gather_object(found, mine)
    return found


class RankReduce(Reduce):
    """Reductions over all ranks, or the ranks of a group; the identity on one."""

    def __init__(self, device: torch.device, group: Any = None) -> None:
        self.device = device
        self.group = group

    def __call__(self, values: Tensor) -> Tensor:
        return self._all(values, dist.ReduceOp.SUM)

    def max(self, values: Tensor) -> Tensor:
        return self._all(values, dist.ReduceOp.MAX)

    def _all(self, values: Tensor, op: Any) -> Tensor:
        if dist.get_world_size(self.group) == 1:
            return values
        moved = values.detach().to(self.device, copy=True)
        dist.all_reduce(moved, op=op, group=self.group)
        return moved.to(values.device)


# Sequences that several ranks hold in parts.
#
# The ranks of a group have the same micro-batches. Each computes the layers at its own positions, a
# contiguous part of every row, and the scores of the tokens that these predict; attention exchanges
# positions for heads (`split_attention`). Scores are then gathered, so that corrections and losses
# see whole sequences and every rank of a group has the same loss. The gradient at the scores of
# other ranks is dropped, so that the sum over all ranks counts the gradient of each sequence once.


@dataclass(frozen=True, slots=True)
class Shards:
    """The ranks that hold the same sequences, and which part is this one's."""

    group: Any  # torch's process group
    index: int
    count: int
    key: str  # of the setting that says so

    def padded(self, mb: MicroBatch) -> MicroBatch:
        """The micro-batch with rows padded to a multiple of `count`.

        Padding continues the last sequence of a row: causal attention keeps it out of the others.
        """
        width = mb.input_ids.shape[1]
        missing = -width % self.count
        if not missing:
            return mb
        last = mb.position_ids[:, -1:]
        counted = last + 1 + torch.arange(missing, device=last.device)
        return replace(
            mb,
            input_ids=F.pad(mb.input_ids, (0, missing)),
            position_ids=torch.cat([mb.position_ids, counted], dim=1),
            predict=mb.predict + mb.predict // width * missing,
        )

    def tokens(self, mb: MicroBatch) -> Tensor:
        """[n] int64: the tokens of a padded micro-batch that this rank predicts."""
        width = mb.input_ids.shape[1]
        return torch.nonzero(mb.predict % width // (width // self.count) == self.index)[:, 0]

    def own(self, mb: MicroBatch) -> MicroBatch:
        """This rank's positions [R, W / count] of a padded micro-batch, and the tokens that they
        predict; its episodes are unchanged."""
        width = mb.input_ids.shape[1]
        part, mine = width // self.count, self.tokens(mb)
        here = slice(self.index * part, (self.index + 1) * part)
        predict = mb.predict[mine]
        return replace(
            mb,
            input_ids=mb.input_ids[:, here].contiguous(),
            position_ids=mb.position_ids[:, here].contiguous(),
            predict=predict // width * part + predict % width - here.start,
            targets=mb.targets[mine],
            sharper=None if mb.sharper is None else mb.sharper[mine],
        )

    def joined(self, values: Tensor, tokens: Tensor, count: int) -> Tensor:
        """[count, ...] of every rank's `values` [n, ...] at its `tokens` [n]. Collective;
        differentiable where all ranks compute the same loss from it."""
        joined: Tensor = _Joined.apply(values, tokens, count, self.group)
        return joined


class _Joined(torch.autograd.Function):
    """Every entry is one rank's, so that a sum over the ranks is exact."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, tokens: Tensor, count: int, group: Any) -> Tensor:
        ctx.save_for_backward(tokens)
        whole = values.new_zeros((count, *values.shape[1:]))
        whole[tokens] = values
        if values.dtype == torch.bool:
            summed = whole.to(torch.uint8)
            dist.all_reduce(summed, group=group)
            return summed.bool()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (tokens,) = ctx.saved_tensors
        return grad.index_select(0, tokens), None, None, None


def join_groups(spec: LearnerSpec) -> tuple[Shards | None, Any]:
    """The ranks that hold the same sequences as this one, None where it holds them whole, and the
    group of the ranks that hold the same part of other shares. Collective."""
    parts = spec.parts
    if parts == 1:
        return None, None
    rank, world = dist.get_rank(), dist.get_world_size()
    same = [list(range(first, first + parts)) for first in range(0, world, parts)]
    others = [list(range(part, world, parts)) for part in range(parts)]
    own, _ = dist.new_subgroups_by_enumeration(same)
    across, _ = dist.new_subgroups_by_enumeration(others)
    for division in spec.divisions:
        if division.of == "sequences":
            return Shards(own, rank % parts, parts, f"learner.{division.name}"), across
    return None, across
