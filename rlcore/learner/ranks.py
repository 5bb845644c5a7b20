"""The data-parallel ranks of a learner: their rendezvous and their reductions."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlcore.interfaces import Reduce
from rlcore.learner.specs import RankPlace
from rlcore.weights.rendezvous import rendezvous_store


def join_ranks(place: RankPlace, device: torch.device) -> None:
    """Join the other ranks: gloo on CPU, NCCL on CUDA.

    A collective that waits longer than `place.timeout_s` raises.
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
    """Whether this is the rank that writes and publishes."""
    return dist.get_rank() == 0


def gather_objects(mine: Any) -> list[Any]:
    """What every rank gives, in order of rank. Collective; for a few kilobytes."""
    world = dist.get_world_size()
    if world == 1:
        return [mine]
    found: list[Any] = [None] * world
    dist.all_gather_object(found, mine)
    return found


class RankReduce(Reduce):
    """Reductions over all ranks, or those of a group; the identity on one."""

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
