"""Publications of changes from GPU to GPU, by vLLM's `sparse_nccl` sender: flat indices and values
of whole tensors in checkpoint coordinates, which each engine's own loader takes apart.

UNPROVEN on GPUs; with a group whose collectives block as NCCL's do it is tested on CPU
(tests/weights/test_vllm_patches.py). Whole sets go by `nccl` as ever, over the same communicator.
vLLM marks entries that stay with NaN and writes into the parameters as they are
(vllm/model_executor/model_loader/checkpoint_weight_patch.py), so NaN cannot be sent, and engines
that lay weights out anew cannot be patched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from vllm.distributed.weight_transfer.sparse_nccl_engine import (
    SparseNCCLTrainerWeightTransferEngine,
    SparseWeightPatch,
)

from rlcore.errors import UserError
from rlcore.types import WeightManifest
from rlcore.weights.deltas import changed_entries
from rlcore.weights.group import GroupSender, Receivers
from rlcore.weights.sendings import Sending
from rlcore.weights.stream import in_order
from rlcore.weights.vllm_transfer import Pairs, VllmSender

REACH = 2**31 - 1  # entries of a tensor that vLLM's indices, int32, can name


class PatchSender(GroupSender):
    """A learner rank's end. Rank 0 keeps the set that was sent last on its host, and sends what
    differs from it; a whole set every few versions, to a group that is new, and after a failure."""

    def __init__(self, rank: int, sender: VllmSender, *, bucket_bytes: int, whole_every: int):
        """`sender`: of whole sets, by nccl. `whole_every`: versions from one to the next."""
        self._rank = rank
        self._sender = sender
        self._bucket_bytes = bucket_bytes
        self._whole_every = whole_every
        self._held: dict[str, torch.Tensor] = {}  # on the host, as the receivers hold them
        self._since: int | None = None  # versions sent since a whole one; None: none to go on from

    def send(
        self, manifest: WeightManifest, receivers: Receivers, read: Callable[[], Pairs]
    ) -> Sending | None:
        """Raises ValueError if a changed entry is NaN."""
        if self._rank != 0:
            self._sender.send(manifest, receivers, read)  # gathers, once in either case
            return None
        since, self._since = self._since, None  # should this fail, receivers are half patched
        due = since is None or since + 1 >= self._whole_every
        if since is None or due or not self._sender.reaches(receivers):
            _refuse_beyond_reach(manifest, self._whole_every)
            self._sender.send(manifest, receivers, lambda: self._keeping(read()))
            self._since = 0
            return None
        sent = self._send_patches(manifest, receivers, read)
        self._since = since + 1
        return sent

    def _keeping(self, tensors: Pairs) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            if (held := self._held.get(name)) is None:
                held = self._held[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
            held.copy_(tensor.detach())
            yield name, tensor

    def _send_patches(
        self, manifest: WeightManifest, receivers: Receivers, read: Callable[[], Pairs]
    ) -> Sending:
        client = self._sender.client
        client.receivers = receivers
        trainer = SparseNCCLTrainerWeightTransferEngine(client=client)
        trainer.model_update_group = self._sender.communicator
        size, changed = 0, 0
        # the calls between are ours to make: by itself vLLM would not call the receivers at all
        # when nothing has changed
        client.start_patches()
        for patches in self._buckets(manifest, in_order(manifest, read())):
            size += sum(p.indices.nbytes + p.values.nbytes for p in patches)
            changed += sum(p.indices.numel() for p in patches)
            trainer.send_weight_chunk(patches)
            patches.clear()
        client.finish_weight_update()
        return Sending(manifest.version, [], size, changed)

    def _buckets(
        self, manifest: WeightManifest, tensors: Pairs
    ) -> Iterator[list[SparseWeightPatch]]:
        """Patches of about a bucket's bytes; one of a single tensor may be larger."""
        bucket: list[SparseWeightPatch] = []
        size = 0
        for name, tensor in tensors:
            patch = self._patch(manifest.version, name, tensor.detach())
            if patch is None:
                continue
            bucket.append(patch)
            size += patch.indices.nbytes + patch.values.nbytes
            if size >= self._bucket_bytes:
                yield bucket
                bucket, size = [], 0
        if bucket:
            yield bucket

    def _patch(self, version: int, name: str, tensor: torch.Tensor) -> SparseWeightPatch | None:
        """What changed of a tensor, on its device; notes it as sent."""
        held, new = self._held[name], tensor.contiguous().view(-1)
        index = changed_entries(held.view(-1).to(new.device), new)
        if not index.numel():
            return None
        values = new[index.long()]
        if bool(values.isnan().any()):
            raise ValueError(
                f"{name} of version {version} has become NaN in part, which vLLM's patches cannot "
                "carry (cluster.transport=nccl with cluster.whole_every above 1)"
            )
        held.copy_(tensor)
        return SparseWeightPatch(name, index, values, tuple(tensor.shape))

    def close(self) -> None:
        self._since = None
        self._sender.close()


def _refuse_beyond_reach(manifest: WeightManifest, whole_every: int) -> None:
    for name, shape in zip(manifest.names, manifest.shapes, strict=True):
        if torch.Size(shape).numel() > REACH:
            raise UserError(
                f"cluster.whole_every={whole_every} with cluster.transport=nccl names entries by "
                f"int32, and {name} {tuple(shape)} has more than {REACH}: use whole_every=1, or "
                "cluster.transport=object_store."
            )
