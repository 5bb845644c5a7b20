"""Names of implementations: registries are literal dicts from a name to "package.module:Object".

A user's own needs no entry: "my_package.module:Object" or "path/to/file.py:Object".
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlcore.errors import UserError


def resolve(registry: Mapping[str, str], name: str, *, key: str, like: type | None = None) -> Any:
    """The object that `name` stands for: an entry of the registry, or a user's own by path.

    `like`: what a user's own must be a class with all public names of, inherited or not. Raises
    UserError, naming `key`, for an unknown name or an object that cannot be loaded or is no such
    class.
    """
    if name not in registry and ":" not in name:
        choices = [*sorted(registry), "package.module:Object", "path/to/file.py:Object"]
        raise UserError.choice(key, name, choices)
    try:
        found = load_object(registry.get(name, name))
    except LoadError as error:
        raise UserError(f"{key}={name} {error}") from error
    if like is not None and name not in registry:
        _require_like(found, like, f"{key}={name}")
    return found


def _require_like(found: Any, like: type, word: str) -> None:
    missing = [n for n in vars(like) if not n.startswith("_") and not hasattr(found, n)]
    if isinstance(found, type) and not missing:
        return
    what = f"lacks {', '.join(missing)}" if isinstance(found, type) else "is no class"
    raise UserError(
        f"{word} is not accepted: it {what}; give a class like {like.__module__}.{like.__name__}."
    )


class LoadError(ValueError):
    """Why an object cannot be loaded; the message continues a sentence that begins "key=value"."""


def load_object(spec: str) -> Any:
    """The object of "package.module:name" or "path/to/file.py:name". Raises LoadError."""
    source, _, name = spec.rpartition(":")
    if not source or not name:
        raise LoadError("is not accepted: write package.module:name or path/to/file.py:name.")
    try:
        module = (
            _load_file(Path(source).expanduser())
            if source.endswith(".py")
            else importlib.import_module(source)
        )
    except (ImportError, OSError, SyntaxError) as error:
        raise LoadError(f"cannot be loaded: {type(error).__name__}: {error}.") from error
    if not hasattr(module, name):
        public = ", ".join(n for n in vars(module) if not n.startswith("_"))
        raise LoadError(f"is not accepted: {source} has no {name}; choose one of: {public}.")
    return getattr(module, name)


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"rlcore_user_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pydantic models resolve their annotations through sys.modules. Only meanwhile:
    # what stays there is pickled by reference, and other processes cannot import it by name.
    sys.modules[module.__name__] = module
    try:
        spec.loader.exec_module(module)
    finally:
        sys.modules.pop(module.__name__, None)
    return module
