"""The names that transformers' models export, kept beside its compiled modules.

An import of transformers reads the 2,700 files of its models for them, which takes 0.26 s of
processor time, and an import of a model reads them again. What the first process found is kept as
Python keeps modules that it compiled, and is read instead while no file has changed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import marshal
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from rlcore.patching import Patch

SCAN = Patch(
    "transformers.utils.import_utils",
    "create_import_structure_from_path",
    "to read the files of all models once",
    ("5.",),
)
PATCHES = (SCAN,)
Scan = Callable[[str], dict[Any, Any]]  # a folder of models -> their exported names


def keep_exported_names() -> None:
    """Have the names kept, from the import of transformers on that follows."""
    if SCAN.owner not in sys.modules:
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Replaces the scan once its module has been executed, before transformers calls it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != SCAN.owner:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def then_replace(module: ModuleType) -> None:
            execute(module)
            SCAN.replace(kept(getattr(module, SCAN.name)))

        spec.loader.exec_module = then_replace  # type: ignore[method-assign]
        return spec


def kept(scan: Scan) -> Scan:
    """`scan`, with the result for transformers' folder `models` kept."""

    def read(path: str | Path) -> dict[Any, Any]:
        folder = Path(path)
        folder = folder.parent if folder.is_file() else folder
        if folder.parts[-2:] != ("transformers", "models"):
            return scan(str(path))  # of one model: few files
        file = Path(importlib.util.cache_from_source(str(folder / "exported.py")))
        stamp = _stamp(folder)
        with contextlib.suppress(OSError, ValueError, EOFError, TypeError):
            found, names = marshal.loads(file.read_bytes())
            if found == stamp:
                return dict(names)
        names = scan(str(folder))
        if not sys.dont_write_bytecode:
            with contextlib.suppress(OSError):  # as Python, which then compiles anew each time
                _write(file, marshal.dumps((stamp, names)))
        return names

    return read


def _stamp(folder: Path) -> tuple[int, int, int]:
    """Number, bytes and newest change of the files that the names are read from."""
    count = size = newest = 0
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in files:
            status = os.stat(os.path.join(place, name))
            count, size = count + 1, size + status.st_size
            newest = max(newest, status.st_mtime_ns)
    return count, size, newest


def _write(file: Path, data: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    own = file.with_name(f"{file.name}.{os.getpid()}")
    own.write_bytes(data)
    own.replace(file)
