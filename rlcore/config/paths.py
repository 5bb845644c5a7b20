"""Paths in a run's settings, made absolute, so that every process and a resumed run finds them.

A setting says itself what its text names (`setting(names=...)`). Arguments of tasks and
environments are plain mappings, whose names are here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from rlcore.config.schema import SHADOW, CorrectionList
from rlcore.environments.specs import EnvironmentSpec
from rlcore.files import CACHED, HUB_NAME, hub_folders, prepared_set
from rlcore.spec import Spec
from rlcore.tasks.specs import EvalTaskSpec


def absolute(node: Any) -> Any:
    """The same specification, or mapping or tuple of them, with every path in it resolved against
    this process's working directory."""
    if isinstance(node, CorrectionList):
        entries = (e._replace(name=_code(e.name), spec=absolute(e.spec)) for e in node.entries)
        shadow = absolute(node.shadow)
        return node.model_copy(update={"entries": tuple(entries), SHADOW: shadow})
    if isinstance(node, Spec):
        update = {name: _setting(node, name) for name in type(node).model_fields}
        for name, own in node.own_sections("").items():
            update[name] = absolute(own).model_dump(mode="json", include=set(update[name]))
        return node.model_copy(update=update)
    return _each(absolute, node)


def _setting(spec: Spec, name: str) -> Any:
    value = getattr(spec, name)
    if name == "args" and isinstance(spec, EvalTaskSpec):
        return _arguments(value, TASK)
    if name == "args" and isinstance(spec, EnvironmentSpec):
        return _arguments(value, ENVIRONMENT)
    extra: Any = type(spec).model_fields[name].json_schema_extra or {}
    return _each(RESOLVE[extra["names"]], value) if "names" in extra else absolute(value)


def _each(change: Callable[[Any], Any], value: Any) -> Any:
    """`change` of a value, of each of a tuple or list, or of each that a mapping has; nothing
    stays."""
    if isinstance(value, dict):
        return {key: _each(change, one) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_each(change, one) for one in value)
    plain = change is absolute and not isinstance(value, Spec)
    return value if value is None or plain else change(value)


def _arguments(args: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    def resolve(name: str, value: Any) -> Any:
        """A class of a user's own resolves its own arguments; others' types are judged later."""
        plain = isinstance(value, dict) or name not in names
        how = RESOLVE.get(names.get(name, ""), str)
        return value if plain else _each(lambda v: how(v) if isinstance(v, str) else v, value)

    return {name: resolve(name, value) for name, value in args.items()}


def _model(path: str) -> str:
    """A folder; OWNER/NAME of the Hugging Face hub stands for its files in the local cache."""
    if not os.path.exists(path) and HUB_NAME.fullmatch(path):
        snapshot = hub_folders("models", path)[1]
        if snapshot.is_dir():
            return str(snapshot)
    return _path(path)


def _path(path: str) -> str:
    return path and os.path.abspath(path)


def _template(name: str) -> str:
    return name if name in ("auto", "off") else os.path.abspath(name)


def _data(path: str) -> str:
    """A file, folder or pattern; OWNER/NAME of a set in the local cache is `hf:OWNER/NAME`."""
    if path.startswith(CACHED):
        return path
    name = "/".join(path.split("/")[:2])
    if os.path.exists(path) or not HUB_NAME.fullmatch(name):
        return os.path.abspath(path)
    cached = prepared_set(name).is_dir() or hub_folders("datasets", name)[1].is_dir()
    return CACHED + path if cached else os.path.abspath(path)


def _code(name: str) -> str:
    """ "path/to/file.py:Object" with its file made absolute; anything else as it is."""
    file, colon, thing = name.rpartition(":")
    return f"{os.path.abspath(file)}:{thing}" if colon and file.endswith(".py") else name


RESOLVE: Mapping[str, Callable[[str], str]] = {
    "path": _path,
    "model": _model,
    "template": _template,
    "data": _data,
    "code": _code,
}
# arguments of shipped tasks and environments
TASK = {"train_path": "data", "heldout_path": "data", "grader": "code"}
ENVIRONMENT = {"rewards": "code", "program": "code", "keep": "path"}
