"""Text of `rlcore train --help`: groups, experiments and every key with type, default and meaning,
from the schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from textwrap import shorten
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rlcore.config.groups import LISTED, groups
from rlcore.config.names import registered
from rlcore.config.schema import RunConfig
from rlcore.config.sentences import sections

USAGE = """Usage: rlcore train [experiment=NAME] run_dir=DIR [group=option ...] [key=value ...]
       rlcore train run_dir=DIR resume=auto [key=value ...]
"""


def text(config_dir: str | Path | None = None) -> str:
    """The whole help, ready to print."""
    found = groups(config_dir)
    options = {name: files for name, files in sorted(found.items()) if name != "experiment"}
    *first, last = LISTED
    lists = f"{', '.join(first)} and {last}"
    lines = [
        USAGE,
        f"Groups, group=option ({lists} also take a list, e.g. correction=[dvp,mis,veto]):",
    ]
    for name, files in options.items():
        lines += [
            f"  {name}",
            *(f"    {option:<14}{_about(file)}" for option, file in files.items()),
        ]
    lines += ["", "Experiments, experiment=NAME:"]
    lines += [f"  {name:<22}{_about(file)}" for name, file in found.get("experiment", {}).items()]
    lines += [
        "",
        "A correction of your own: correction.LABEL={name: path/to/file.py:MySpec, key: value}",
        "",
        "Keys, key=value (LABEL: a name such as bf16 of the selected actor):",
        *_keys(RunConfig, ""),
    ]
    return "\n".join(lines) + "\n"


def _about(file: Path) -> str:
    """The first comment of an option's file that says what it is."""
    for line in file.read_text(encoding="utf-8").splitlines():
        # "# @package" is Hydra's
        if line.startswith("# ") and not line.startswith("# @"):
            return line[2:]
    return ""


def _keys(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, info in model.model_fields.items():
        found = list(sections(info.annotation))
        for inner, labelled in found:
            yield from _keys(inner, f"{prefix}{name}.LABEL." if labelled else f"{prefix}{name}.")
        if not found:
            key = f"{prefix}{name}"
            default = written_default(info)
            after = " (required)" if default is None else f" = {default}"
            shown = f"{key}: {kind_of(key, info)}{after}"
            yield f"  {shown:<66} {meaning_of(info)}".rstrip()


def kind_of(key: str, info: FieldInfo) -> str:
    """Type or choices of a key."""
    # Their type is a string, since a user's own name may stand there.
    names = registered(key)
    return "|".join([*names, "file.py:Class"]) if names else _type(info.annotation)


def meaning_of(info: FieldInfo) -> str:
    """Meaning and unit of a key."""
    extra = info.json_schema_extra
    unit = extra.get("unit") if isinstance(extra, dict) else None
    return f"{info.description or ''}{f' [{unit}]' if unit else ''}"


def _type(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "|".join(json.dumps(a).strip('"') for a in args)
    if annotation is type(None):
        return "null"
    if origin is tuple and args[-1] is ...:
        return f"list[{_type(args[0])}]"  # as YAML and the command line write it
    if origin in (list, dict, tuple):
        return f"{origin.__name__}[{', '.join(_type(a) for a in args)}]"
    if origin in (Union, UnionType):
        return "|".join(_type(a) for a in args)
    return getattr(annotation, "__name__", str(annotation))


def written_default(info: FieldInfo) -> str | None:
    """The default as one would write it, shortened; None if the key is required."""
    if info.is_required():
        return None
    value = info.get_default(call_default_factory=True, validated_data={})
    return "" if value is PydanticUndefined else shorten(json.dumps(value), 40, placeholder=" ...")
