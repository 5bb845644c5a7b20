"""Names of implementations: registries are literal dicts from a name to "package.module:Object".

An implementation of a user needs no entry: "my_package.module:Object" or "path/to/file.py:Object".
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from rlcore.errors import UserError


def resolve(registry: Mapping[str, str], name: str, *, key: str, like: type | None = None) -> Any:
    """The object that `name` stands for: an entry of the registry, or a user's own by path.

    `like`: the base class of what is named: see `require_whole`. Raises UserError, naming `key`,
    for an unknown name, an object that cannot be loaded, or a class that lacks a method.
    """
    if name not in registry and ":" not in name:
        choices = [*sorted(registry), "package.module:Object", "path/to/file.py:Object"]
        raise UserError.choice(key, name, choices)
    try:
        found = load_object(registry.get(name, name))
    except LoadError as error:
        raise UserError(f"{key}={name} {error}") from error
    if like is not None:
        require_whole(found, like, f"{key}={name}")
    return found


def require_whole(found: Any, like: type, word: str) -> None:
    """Raise UserError, with `word` ("key=value"), unless `found` is a class that has every method
    of the base class `like` that has no default.

    A class that does not inherit `like` needs the optional ones too. Where all are optional, one
    that inherits overrides at least one: it would otherwise do nothing.
    """
    base = f"{like.__module__}.{like.__name__}"
    if not isinstance(found, type):
        raise UserError(f"{word} is not accepted: it is not a class; give a subclass of {base}.")
    lacking = list(missing_methods(found, like))
    if not lacking and not issubclass(found, like):
        lacking = [n for n in _public(like) if not hasattr(found, n)]
    if lacking:
        listed = ", ".join(signature_of(like, name) for name in lacking)
        raise UserError(
            f"{word} is not accepted: the class {found.__name__} lacks {listed}; every class like "
            f"{base} has {'it' if len(lacking) == 1 else 'them'}."
        )
    hooks = _public(like)
    idle = all(getattr(found, n) is getattr(like, n) for n in hooks)
    if not inspect.isabstract(like) and idle and found is not like:
        raise UserError(
            f"{word} is not accepted: the class {found.__name__} overrides nothing of {base}, and "
            f"would do nothing; override at least one of: {', '.join(hooks)}."
        )


@lru_cache(maxsize=1000)  # a configuration's check asks again for every rule that reads a trait
def missing_methods(found: type, like: type) -> tuple[str, ...]:
    """Names of the abstract methods of `like` that a class has not, in order, inherited or not."""
    names = dict.fromkeys(name for base in like.__mro__ for name in vars(base))
    required = (n for n in names if _abstract(_defined(like, n)))
    return tuple(n for n in required if _abstract(_defined(found, n)))


def _defined(cls: type, name: str) -> Any:
    # not getattr: every class can be called, whether or not its instances can
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)


def _abstract(method: Any) -> bool:
    return method is None or bool(getattr(method, "__isabstractmethod__", False))


def _public(like: type) -> list[str]:
    return [name for name in vars(like) if not name.startswith("_")]


def signature_of(like: type, name: str) -> str:
    """A method's signature as a class must have it. Example: grad_norm(self) -> float"""
    method = inspect.getattr_static(like, name)
    if isinstance(method, property):
        return f"the property {name}"
    if not callable(getattr(like, name)):
        return name
    signature = str(inspect.signature(getattr(method, "__func__", method)))
    return name + signature.replace("'", "")


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
    # Dataclasses and pydantic models resolve their annotations through sys.modules. Only while it
    # loads: objects of a module that stays there are pickled by reference, and other processes
    # cannot import it by name.
    sys.modules[module.__name__] = module
    try:
        spec.loader.exec_module(module)
    finally:
        sys.modules.pop(module.__name__, None)
    return module
