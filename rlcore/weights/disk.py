"""Weights through a shared folder: a safetensors file written beside, fsynced, then renamed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from rlcore.types import WeightManifest
from rlcore.weights.manifest import verify_tensors


class DiskTransport:
    """`WeightTransport` over a folder that learner and actors share. Keeps the newest `keep` versions."""

    def __init__(self, folder: str | Path, *, keep: int = 2) -> None:
        self._folder = Path(folder)
        self._keep = keep
        self._written: list[Path] = []

    def publish(self, manifest: WeightManifest, tensors: Mapping[str, torch.Tensor]) -> str:
        """Write one version; the handle is the file's path. Raises OSError (a full disk) with nothing half-written."""
        from safetensors.torch import save_file

        verify_tensors(manifest, tensors)
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"weights-{manifest.version:08d}.safetensors"
        beside = path.with_suffix(".partial")
        try:
            save_file({n: t.detach().to("cpu").contiguous() for n, t in tensors.items()}, beside)
            _fsync(beside)
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)
        _fsync(self._folder)
        self._forget_old(path)
        return str(path)

    def _forget_old(self, newest: Path) -> None:
        self._written = [p for p in self._written if p != newest] + [newest]
        for old in self._written[: -self._keep]:
            old.unlink(missing_ok=True)
        self._written = self._written[-self._keep :]

    def receive(self, manifest: WeightManifest, handle: str) -> dict[str, torch.Tensor]:
        """CPU tensors of one version. Raises ArrivalError if they are not as announced, OSError without the file."""
        from safetensors.torch import load_file

        tensors = load_file(handle)
        verify_tensors(manifest, tensors)
        return tensors


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
