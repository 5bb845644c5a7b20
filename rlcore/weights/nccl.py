"""Weights by broadcast from the learner's first rank to every actor, GPU to GPU.

The NCCL path is UNPROVEN: written and type-checked; the tests run the same code over gloo on CPU.
It uses torch's process groups directly, outside the default group, so that neither DeepSpeed's nor
vLLM's own groups are affected.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from rlcore.errors import DeadlineExceeded
from rlcore.interfaces import WeightTransport
from rlcore.types import WeightManifest
from rlcore.weights.manifest import verify_tensors
from rlcore.weights.rendezvous import Rendezvous, rendezvous_store

# the tensors of one buffer: (name, shape, first byte)
_Part = list[tuple[str, tuple[int, ...], int]]


class NcclTransport(WeightTransport):
    """Rank 0 publishes, ranks 1.. receive; all of them take part in every version.

    A receiver that dies breaks the group: every side then gets DeadlineExceeded or a torch error,
    and all of them build a new transport on another port.
    """

    def __init__(
        self,
        place: Rendezvous,
        *,
        backend: Literal["nccl", "gloo"],
        join_timeout_s: float,
        timeout_s: float,
        buffer_bytes: int = 256 << 20,
    ) -> None:
        """Join the group; blocks until all ranks have.

        `timeout_s` bounds every broadcast. `buffer_bytes`: tensors are packed into buffers of about
        this size. Raises DeadlineExceeded if the ranks do not join within `join_timeout_s`.
        """
        self._device = torch.device("cuda" if backend == "nccl" else "cpu")
        self._buffer_bytes = buffer_bytes
        self._timeout = timedelta(seconds=timeout_s)
        self._sending: list[tuple[Any, torch.Tensor]] = []  # work in flight and the buffer it reads
        try:
            self._group = self._join(place, backend, timedelta(seconds=join_timeout_s))
        except (dist.DistStoreError, dist.DistNetworkError) as e:
            raise DeadlineExceeded(
                f"waited {join_timeout_s:g} s for {place.world_size} ranks to join at "
                f"{place.host}:{place.port} (cluster.start_timeout_s): {e}"
            ) from e

    def _join(self, place: Rendezvous, backend: str, timeout: timedelta) -> Any:
        shared = rendezvous_store(place.host, place.port, place.rank, place.world_size, timeout)
        store = dist.PrefixStore("rlcore/weights", shared)
        if backend == "gloo":
            return dist.ProcessGroupGloo(store, place.rank, place.world_size, self._timeout)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        return dist.ProcessGroupNCCL(store, place.rank, place.world_size, options)

    def publish(self, manifest: WeightManifest, tensors: Mapping[str, torch.Tensor]) -> int:
        """Start the broadcast and return at once; the handle is the version.

        Waits for the previous broadcast first.
        """
        verify_tensors(manifest, tensors)
        self.wait_sent()
        # Bytes, not values: one buffer may hold any dtype, and nothing is converted on the way.
        for part, size in _pack(manifest, self._buffer_bytes):
            buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
            for name, _, start in part:
                source = tensors[name].detach().reshape(-1).view(torch.uint8)
                buffer[start : start + source.numel()].copy_(source)
            self._sending.append((self._broadcast(buffer), buffer))
        return manifest.version

    def wait_sent(self) -> None:
        """Block until the last publish was sent. Raises DeadlineExceeded after the timeout."""
        sending, self._sending = self._sending, []
        for work, _ in sending:
            self._wait(work)

    def receive(self, manifest: WeightManifest, handle: int) -> dict[str, torch.Tensor]:
        """Tensors on this rank's device, views into the buffers.

        Raises DeadlineExceeded, or ArrivalError if they are not as announced.
        """
        dtype = getattr(torch, manifest.dtype)
        out: dict[str, torch.Tensor] = {}
        for part, size in _pack(manifest, self._buffer_bytes):
            buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
            self._wait(self._broadcast(buffer))
            for name, shape, start in part:
                stop = start + _bytes(shape, manifest.dtype)
                out[name] = buffer[start:stop].view(dtype).reshape(shape)
        verify_tensors(manifest, out)
        return out

    def _broadcast(self, buffer: torch.Tensor) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        return self._group.broadcast([buffer], options)

    def _wait(self, work: Any) -> None:
        try:
            work.wait(self._timeout)
            # NCCL's wait only orders the stream: the buffer is complete when the stream is done
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
        except RuntimeError as e:
            raise DeadlineExceeded(
                f"a weight broadcast did not end within {self._timeout.total_seconds():g} s "
                f"(schedule.publish_timeout_s) or a rank was lost: {str(e).splitlines()[0]}"
            ) from e

    def close(self) -> None:
        """Leave the group."""
        self._sending = []
        self._group = None


def _bytes(shape: tuple[int, ...], dtype: str) -> int:
    return torch.Size(shape).numel() * getattr(torch, dtype).itemsize


def _pack(manifest: WeightManifest, limit: int) -> Iterator[tuple[_Part, int]]:
    """Tensors in order, packed into buffers of at most `limit` bytes, 16-byte aligned.

    A larger tensor has a buffer of its own.
    """
    part: _Part = []
    at = 0
    for name, shape in zip(manifest.names, manifest.shapes, strict=True):
        size = _bytes(shape, manifest.dtype)
        if part and at + size > limit:
            yield part, at
            part = []
            at = 0
        part.append((name, shape, at))
        # Aligned, so that a view of the bytes as any dtype is possible.
        at += -(-size // 16) * 16
    if part:
        yield part, at
