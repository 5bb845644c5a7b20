"""A disk that hangs: a file system of its own that is frozen, so that every write to it waits in
the kernel, as on a network disk whose server does not answer. Needs root."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

TOOLS = ("mkfs.ext4", "mount", "umount", "fsfreeze")
MIB = 256
TIMEOUT_S = 60.0


def _run(*words: str | Path) -> None:
    subprocess.run([str(w) for w in words], check=True, capture_output=True, timeout=TIMEOUT_S)


def may_freeze() -> bool:
    """Whether this machine lets a file system be mounted and frozen."""
    return os.geteuid() == 0 and all(shutil.which(tool) for tool in TOOLS)


class FrozenDisk:
    """An ext4 file system in a file, mounted on a folder."""

    def __init__(self, image: Path, folder: Path) -> None:
        """Raises CalledProcessError where mounting is not allowed."""
        with image.open("wb") as file:
            file.truncate(MIB * 2**20)
        _run("mkfs.ext4", "-q", image)
        folder.mkdir(exist_ok=True)
        _run("mount", "-o", "loop", image, folder)
        self._folder = folder

    def freeze(self) -> None:
        """From now on every write waits."""
        _run("fsfreeze", "-f", self._folder)

    def thaw(self) -> None:
        """What waits is done."""
        _run("fsfreeze", "-u", self._folder)

    def close(self) -> None:
        """Thaw it, if it is frozen, and unmount it."""
        with contextlib.suppress(subprocess.CalledProcessError):
            self.thaw()
        _run("umount", "-l", self._folder)
