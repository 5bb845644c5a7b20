"""Bytes of tensors that are alive on the CPU, and the most there were: for comparisons with what
`rlcore/commands/memory.py` counts."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """A context that notes the storage of every tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.most = 0
        self._seen: dict[int, int] = {}  # address of a storage -> its bytes

    def note(self, tensors: Iterable[Any]) -> None:
        """Count tensors made before."""
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                self._note(tensor.untyped_storage())

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        size = storage.nbytes()
        if not size or key in self._seen:
            return
        self._seen[key] = size
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        self.now -= self._seen.pop(key, 0)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.note(tree_leaves(out))
        return out
