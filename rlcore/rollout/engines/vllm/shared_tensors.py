"""Tensors that the rank processes of an engine read without a copy. Imports no vLLM."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from rlcore.weights.blob import write_blob


@contextmanager
def shared_file(tensors: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """The path of a safetensors file in memory, for processes on this machine to map.

    An anonymous file: it has no name in /dev/shm, so a process that is killed leaves nothing
    behind, and the size of /dev/shm (64 MiB in many containers) does not limit it.
    """
    with os.fdopen(os.memfd_create("rlcore-weights"), "wb") as file:
        write_blob(file, tensors)
        file.flush()
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}"
