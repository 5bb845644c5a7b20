"""Checks of a task's arguments, so that a wrong one is a sentence before anything starts."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rlcore.errors import UserError


class ArgumentError(UserError):
    """A task argument that is not accepted; `make_task` puts the config key of the task in front of its name."""

    def __init__(self, name: str, value: object, why: str) -> None:
        self.name, self.value, self.why = name, value, why
        super().__init__(self.sentence("task.args"))

    def sentence(self, prefix: str) -> str:
        return f"{prefix}.{self.name}={self.value} {self.why}"


def integer(name: str, value: object, low: int, high: int) -> int:
    """`value` if it is an int within [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ArgumentError(name, value, f"is not accepted: give an integer from {low} to {high}.")
    return value


def share(name: str, value: object) -> float:
    """`value` as a float within [0, 1]."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ArgumentError(name, value, "is not accepted: give a number from 0 to 1.")
    return float(value)


def one_of(name: str, value: object, choices: Iterable[str]) -> str:
    """`value` if it is one of the choices."""
    listed = list(choices)
    if not isinstance(value, str) or value not in listed:
        raise ArgumentError(name, value, f"is not accepted; choose one of: {', '.join(listed)}.")
    return value


class LoadError(ValueError):
    """A "module:name" that could not be loaded; the message continues the sentence "key=value ..."."""


def load_object(spec: str) -> Any:
    """The object that "package.module:name" or "path/to/file.py:name" stands for. Raises LoadError."""
    source, _, name = spec.rpartition(":")
    if not source or not name:
        raise LoadError("is not accepted: write package.module:name or path/to/file.py:name.")
    try:
        module = _load_file(Path(source).expanduser()) if source.endswith(".py") else importlib.import_module(source)
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
    spec.loader.exec_module(module)
    return module
