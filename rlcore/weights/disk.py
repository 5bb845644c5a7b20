"""Weights through a shared folder: one safetensors file a version."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from rlcore.files import new_file
from rlcore.interfaces import WeightTransport
from rlcore.types import WeightManifest
from rlcore.weights.blob import write_blob
from rlcore.weights.manifest import verify_tensors


class DiskTransport(WeightTransport):
    """A folder that learner and actors share. Keeps the newest `keep` versions."""

    def __init__(self, folder: str | Path, *, keep: int = 2) -> None:
        self._folder = Path(folder)
        self._keep = keep
        self._written: list[Path] = []

    def publish(self, manifest: WeightManifest, tensors: Mapping[str, torch.Tensor]) -> str:
        """Write one version; the handle is the file's path.

        Raises OSError (a full disk) and leaves no partial file, or ArrivalError if tensors and
        manifest disagree.
        """
        verify_tensors(manifest, tensors)
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"weights-{manifest.version:08d}.safetensors"
        # Flushed, since another node may read it as soon as it has the path.
        with new_file(path, durable=True) as file:
            write_blob(file, tensors)
        self._remove_old(path)
        return str(path)

    def _remove_old(self, newest: Path) -> None:
        # A version that is published again (after a recovery) counts as the newest once.
        self._written = [p for p in self._written if p != newest] + [newest]
        for old in self._written[: -self._keep]:
            old.unlink(missing_ok=True)
        self._written = self._written[-self._keep :]

    def receive(self, manifest: WeightManifest, handle: str) -> dict[str, torch.Tensor]:
        """CPU tensors of one version. Raises ArrivalError if they are not as announced, OSError
        if there is no such file."""
        from safetensors.torch import load_file

        tensors = load_file(handle)
        verify_tensors(manifest, tensors)
        return tensors
