"""The learner's end of vLLM's weight transfer: `nccl` (packed broadcast, loaded while receiving,
every tensor-parallel rank in the group) and `ipc` (processes that share GPUs).

`ipc` has run on one H100 with one receiver; `nccl` is UNPROVEN on GPUs. The only file of this
package that imports vLLM, whose sender classes make the calls (vllm/distributed/weight_transfer).
The order of the calls on CPU, with a group whose collectives block as NCCL's do, is tested in
tests/weights/test_vllm_transfer.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.sparse_nccl_engine import (
    SparseNCCLTrainerWeightTransferEngine,
    SparseWeightPatch,
)

from rlcore.errors import UserError
from rlcore.types import WeightManifest
from rlcore.weights.arrival import FINISH, PATCHES
from rlcore.weights.deltas import changed_entries
from rlcore.weights.group import GroupSender
from rlcore.weights.sending import Receivers, Sending
from rlcore.weights.stream import in_order

Pairs = Iterable[tuple[str, torch.Tensor]]
Trainer = Any  # vLLM's TrainerWeightTransferEngine


class VllmSender(GroupSender):
    """A learner rank's end. Rank 0 sends; with ipc every rank offers what its GPU holds."""

    def __init__(
        self,
        backend: str,
        rank: int,
        address: Callable[[], tuple[str, int]],
        *,
        bucket_bytes: int,
    ) -> None:
        """`backend`: nccl or ipc. `address`: a host and a free port here, for each group."""
        self._backend = backend
        self._rank = rank
        self._address = address
        self._bucket_bytes = bucket_bytes
        self._source = _Source()
        self.client = Client()
        self._trainer: Trainer | None = None
        self._members: tuple[str, ...] = ()

    def send(
        self, manifest: WeightManifest, receivers: Receivers, read: Callable[[], Pairs]
    ) -> None:
        self._source.manifest = manifest
        self._source.read = read
        self.client.receivers = receivers
        with _own_stream():
            if not self.reaches(receivers):
                self.close()
                # vLLM's constructor starts the receivers' joining first, then joins, and ends with
                # a one-element all-reduce of the new group
                self._trainer = self._form(manifest, receivers)
                self._members = tuple(receivers.members)
            assert self._trainer is not None
            self._trainer.send_weights()

    def reaches(self, receivers: Receivers) -> bool:
        """Return whether the current group consists of exactly these receivers."""
        return self._trainer is not None and self._members == tuple(receivers.members)

    @property
    def communicator(self) -> Any:
        """nccl, rank 0: vLLM's, of the group there is."""
        assert self._trainer is not None, "no group has been formed"
        return self._trainer.model_update_group

    def _form(self, manifest: WeightManifest, receivers: Receivers) -> Trainer:
        largest = max(torch.Size(s).numel() for s in manifest.shapes)
        largest *= getattr(torch, manifest.dtype).itemsize
        if self._backend == "ipc":
            from vllm.distributed.weight_transfer import ipc_engine

            # one tensor must fit into its buffer
            shared = ipc_engine.IPCTrainerInitInfo(
                rank=self._rank,
                packed=True,
                packed_buffer_size_bytes=max(self._bucket_bytes, largest),
            )
            return ipc_engine.IPCTrainerWeightTransferEngine.trainer_init(
                shared, client=self.client, source=self._source
            )
        from vllm.distributed.weight_transfer import nccl_engine

        host, port = self._address() if self._rank == 0 else ("", 0)
        joined = nccl_engine.NCCLTrainerInitInfo(
            rank=self._rank,
            master_address=host,
            master_port=port,
            world_size=1 + sum(receivers.ranks),
            packed_buffer_size_bytes=self._bucket_bytes,
        )
        return nccl_engine.NCCLTrainerWeightTransferEngine.trainer_init(
            joined, client=self.client, source=self._source
        )

    def close(self) -> None:
        # aborts NCCL's communicator: it may have members that died
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            trainer.shutdown()


@contextlib.contextmanager
def _own_stream() -> Iterator[None]:
    """The caller's CUDA stream, kept. vLLM's communicator leaves the thread that forms it on its
    own stream, on which the next training step would run. The packed sender reads the weights on
    further streams, which do not wait for the optimizer's."""
    if not torch.cuda.is_available():
        yield
        return
    before = torch.cuda.current_stream()
    before.synchronize()
    try:
        yield
    finally:
        torch.cuda.set_stream(before)


class _Source(WeightSource):
    """The set that is being published, as vLLM's sender reads it."""

    manifest: WeightManifest
    read: Callable[[], Pairs]

    def metadata(self) -> list[ParamMeta]:
        dtype = getattr(torch, self.manifest.dtype)
        described = zip(self.manifest.names, self.manifest.shapes, strict=True)
        return [ParamMeta(name, dtype, tuple(shape)) for name, shape in described]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.read())


class Client:
    """vLLM's VLLMWeightSyncClient over our receivers: each call goes to all of them."""

    receivers: Receivers

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        payloads = []
        offset = init_info.get("rank_offset", 0)
        # each engine counts its ranks from 0
        for ranks in self.receivers.ranks:
            placed = {"rank_offset": offset} if "rank_offset" in init_info else {}
            payloads.append(init_info | placed)
            offset += ranks
        self.receivers.start("join", payloads)()

    def start_weight_update(self) -> None:
        self._all("begin", None)

    def start_patches(self) -> None:
        """As `start_weight_update`, where patches follow."""
        self._all("begin", PATCHES)

    def update_weights(self, update_info: Any) -> None:
        self._all("receive", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._all(FINISH, None)

    def _all(self, verb: str, payload: Any) -> None:
        self.receivers.start(verb, [payload] * len(self.receivers.members))()


REACH = 2**31 - 1  # entries of a tensor that vLLM's indices, int32, can name


# Publications of changes from GPU to GPU, by vLLM's `sparse_nccl` sender: flat indices and values
# of whole tensors in checkpoint coordinates, which each engine's own loader takes apart.
#
# UNPROVEN on GPUs; with a group whose collectives block as NCCL's do it is tested on CPU
# (tests/weights/test_vllm_patches.py). Whole sets go by `nccl`, over the same communicator.
# vLLM marks entries that stay with NaN and writes into the parameters as they are
# (vllm/model_executor/model_loader/checkpoint_weight_patch.py), so NaN cannot be sent, and engines
# that change the layout of weights cannot be patched.


class PatchSender(GroupSender):
    """A learner rank's end. Rank 0 keeps the set that was sent last on its host, and sends what
    differs from it. It sends a whole set every few versions, to a group that is new, and after a
    failure."""

    def __init__(
        self, rank: int, sender: VllmSender, *, bucket_bytes: int, full_weights_every: int
    ):
        """`sender`: of whole sets, by nccl. `full_weights_every`: versions from one to the next."""
        self._rank = rank
        self._sender = sender
        self._bucket_bytes = bucket_bytes
        self._whole_every = full_weights_every
        self._held: dict[str, torch.Tensor] = {}  # on the host, as the receivers hold them
        self._since: int | None = None  # versions sent since a whole one; None: a whole one is due

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
        """Return a tensor's changes since the last publication, on its device, and note them as
        sent."""
        held, new = self._held[name], tensor.contiguous().view(-1)
        index = changed_entries(held.view(-1).to(new.device), new)
        if not index.numel():
            return None
        values = new[index.long()]
        if bool(values.isnan().any()):
            raise ValueError(
                f"{name} of version {version} has become NaN in part, which vLLM's patches cannot "
                "carry (cluster.transport=nccl with cluster.full_weights_every above 1)"
            )
        held.copy_(tensor)
        return SparseWeightPatch(name, index, values, tuple(tensor.shape))

    def close(self) -> None:
        self._since = None
        self._sender.close()


def _refuse_beyond_reach(manifest: WeightManifest, full_weights_every: int) -> None:
    for name, shape in zip(manifest.names, manifest.shapes, strict=True):
        if torch.Size(shape).numel() > REACH:
            raise UserError(
                f"cluster.full_weights_every={full_weights_every} with cluster.transport=nccl "
                f"names entries by int32, and {name} {tuple(shape)} has more than {REACH}: "
                "use full_weights_every=1, or cluster.transport=object_store."
            )
