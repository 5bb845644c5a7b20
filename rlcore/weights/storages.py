"""Memory of tensors that is freed for a while: the tensors and every view of them stay valid
objects, whose storage is empty meanwhile."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class _Emptied:
    storage: torch.UntypedStorage
    size: int  # bytes
    copy: Tensor | None  # uint8 [size] on the host; None: the content was dropped


class EmptiedStorages:
    """The storages of some tensors, empty until `restore`."""

    def __init__(
        self, tensors: Iterable[Tensor], *, keep: bool, copies: dict[int, Tensor] | None = None
    ) -> None:
        """Empty them. `keep`: copy their content to the host first; without it, they come back as
        zeros. Storages that torch does not own are left as they are.

        `copies`: host memory that an earlier call gave the same storages, and this one leaves here;
        other storages' memory is dropped. New memory costs more than the copy: the host clears each
        page at its first use.
        """
        copies = {} if copies is None else copies
        found = {s._cdata: s for s in (t.untyped_storage() for t in tensors)}
        for key in copies.keys() - found.keys():
            del copies[key]
        self._emptied: list[_Emptied] = []
        for storage in found.values():
            size = storage.nbytes()
            if size and storage.resizable():
                copy = None
                if keep:
                    copy = copies.get(storage._cdata)
                    if copy is None or len(copy) != size:
                        copy = copies[storage._cdata] = torch.empty(size, dtype=torch.uint8)
                    copy.copy_(_bytes_of(storage))
                self._emptied.append(_Emptied(storage, size, copy))
                storage.resize_(0)

    @property
    def size(self) -> int:
        """Bytes that were freed."""
        return sum(e.size for e in self._emptied)

    def restore(self) -> None:
        """Take the memory back, with its content or zeros."""
        for e in self._emptied:
            e.storage.resize_(e.size)
            if e.copy is None:
                _bytes_of(e.storage).zero_()
            else:
                _bytes_of(e.storage).copy_(e.copy)
        self._emptied = []

    def read(self, tensor: Tensor) -> Tensor:
        """`tensor`, on the host if it is kept there."""
        storage = tensor.untyped_storage()
        for e in self._emptied:
            if e.storage._cdata == storage._cdata and e.copy is not None:
                host = torch.empty(0, dtype=tensor.dtype)
                return host.set_(
                    e.copy.untyped_storage(),
                    tensor.storage_offset(),
                    tensor.size(),
                    tensor.stride(),
                )
        return tensor


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
