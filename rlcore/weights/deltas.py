"""Publications that send only the entries whose bits have changed since the version before.

At the small learning rates of reinforcement learning most weights keep their bfloat16 value from
one version to the next. A patch of a tensor is the flat indices of what changed and the new values;
a tensor is sent whole where a patch would be larger. Every few versions a whole set is
sent. A handle names the newest whole set and all patches since, so that a process that has just
started, or that skipped versions, catches up from the same handle.

Each end keeps a copy of the set on the CPU: the sender to compare with, the receiver to patch. An
engine is always given whole tensors, which the usual checksums verify.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from rlcore.interfaces import TransportEnds, WeightTransport
from rlcore.types import WeightManifest
from rlcore.weights.blob import from_blob, to_blob
from rlcore.weights.manifest import ArrivalError
from rlcore.weights.sending import DeltaHandle, Sending
from rlcore.weights.stream import Pairs, arriving, in_buckets, in_order

_INDEX, _VALUES, _WHOLE = "i", "v", "w"  # after the name of a tensor and a "#"
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class DeltaTransport(WeightTransport):
    """Patches through an object store's `put` and `get`."""

    def __init__(
        self,
        put: Callable[[np.ndarray], Any] | None,
        get: Callable[[Any], np.ndarray] | None,
        *,
        bucket_bytes: int,
        full_weights_every: int,
    ) -> None:
        """`full_weights_every`: versions from one whole set to the next. Only the learner's side
        needs `put`, only the actor's side `get`."""
        self._put = put
        self._get = get
        self._bucket_bytes = bucket_bytes
        self._whole_every = full_weights_every
        self._handle: DeltaHandle | None = None  # of the newest version sent
        self._held: dict[str, torch.Tensor] = {}  # the newest version sent or received
        self._version: int | None = None  # received; None: nothing that could be patched

    @classmethod
    def between(cls, ends: TransportEnds) -> DeltaTransport:
        sizes = {"bucket_bytes": ends.bucket_bytes, "full_weights_every": ends.full_weights_every}
        return cls(ends.put, ends.get, **sizes)

    def publish(self, manifest: WeightManifest, tensors: Pairs) -> DeltaHandle:
        """Put what has changed, or a whole set. Raises ArrivalError if tensors and manifest
        disagree."""
        last, self._handle = self._handle, None  # none to go on from, should this fail
        passing = in_order(manifest, tensors)
        if last is None or len(last.patches) + 1 >= self._whole_every:
            handle = DeltaHandle(self._send(manifest.version, self._copied(passing)), ())
        else:
            patch = self._send(manifest.version, self._patched(passing))
            handle = DeltaHandle(last.whole, (*last.patches, patch))
        self._handle = handle
        return handle

    def _copied(self, tensors: Pairs) -> Iterator[tuple[str, torch.Tensor, int]]:
        for name, tensor in tensors:
            self._held[name] = tensor.detach().to("cpu", copy=True).contiguous()
            yield f"{name}#{_WHOLE}", tensor, tensor.numel()

    def _patched(self, tensors: Pairs) -> Iterator[tuple[str, torch.Tensor, int]]:
        for name, tensor in tensors:
            held = self._held[name].view(-1)
            new = tensor.detach().to("cpu").contiguous().view(-1)
            index = changed_entries(held, new)
            count = index.numel()
            if not count:
                continue
            values = new[index.long()]
            if count * (index.element_size() + values.element_size()) >= new.nbytes:
                yield f"{name}#{_WHOLE}", tensor, count
            else:
                yield f"{name}#{_INDEX}", index, count
                yield f"{name}#{_VALUES}", values, 0
            held[index.long()] = values

    def _send(self, version: int, entries: Iterator[tuple[str, torch.Tensor, int]]) -> Sending:
        if self._put is None:
            raise RuntimeError("this side of the transport was built without put: it only receives")
        changed = 0

        def counted() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal changed
            for name, tensor, count in entries:
                changed += count
                yield name, tensor

        parts, size = [], 0
        for bucket in in_buckets(counted(), self._bucket_bytes):
            blob = to_blob(bucket)
            bucket.clear()
            size += blob.nbytes
            parts.append(self._put(blob))
            del blob
        return Sending(version, parts, size, changed)

    def receive(
        self, manifest: WeightManifest, handle: DeltaHandle
    ) -> Iterator[Mapping[str, torch.Tensor]]:
        """Bring the copy here up to date, then give it in buckets: CPU tensors, not to be changed.

        Raises ArrivalError if they are not as announced.
        """
        # an engine may fail while it takes the buckets, but the copy held here is whole by then
        self._catch_up(handle)
        given = ((name, self._held[name]) for name in manifest.names if name in self._held)
        return arriving(manifest, in_buckets(given, self._bucket_bytes))

    def _catch_up(self, handle: DeltaHandle) -> None:
        chain = (handle.whole, *handle.patches)
        known = [sending.version for sending in chain]
        begin = known.index(self._version) + 1 if self._version in known else 0
        self._version = None  # half patched from here on
        if begin == 0:
            self._held = {}
        for sending in chain[begin:]:
            waiting: dict[str, torch.Tensor] = {}  # indices whose values come in the next bucket
            for part in sending.parts:
                self._take(part, waiting)
            if waiting:
                raise ArrivalError(f"the patch of {next(iter(waiting))} came without its values")
        self._version = known[-1]

    def _take(self, part: Any, waiting: dict[str, torch.Tensor]) -> None:
        if self._get is None:
            raise RuntimeError("this side of the transport was built without get: it only sends")
        arrived = from_blob(self._get(part))
        # the wider dtype comes first, so a bucket's indices stand before or behind its values
        for label, tensor in sorted(arrived.items(), key=lambda item: item[0].rpartition("#")[2]):
            name, _, kind = label.rpartition("#")
            if kind == _WHOLE:
                self._held[name] = tensor.clone()
            elif kind == _INDEX:
                waiting[name] = tensor.clone()
            else:
                self._patch(name, waiting.pop(name, None), tensor)

    def _patch(self, name: str, where: torch.Tensor | None, values: torch.Tensor) -> None:
        held = self._held[name].view(-1)
        if where is None or where.numel() != values.numel() or int(where.max()) >= held.numel():
            raise ArrivalError(f"the patch of {name} does not fit what it is to change")
        held[where.long()] = values


def changed_entries(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Flat indices of the entries whose bits differ, ascending: [n] int32, or int64 where int32 is
    too small. Both [m], of one dtype."""
    bits = _BITS[before.element_size()]
    found = torch.nonzero(before.view(bits) != after.view(bits)).view(-1)
    return found if before.numel() > 2**31 - 1 else found.to(torch.int32)
