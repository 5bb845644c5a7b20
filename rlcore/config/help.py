"""Text of `rlcore train --help`: groups, experiments and every key with type, default and meaning, from the schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from textwrap import shorten
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rlcore.config.compose import LABELLED, groups
from rlcore.config.schema import RunConfig
from rlcore.config.sentences import section

USAGE = """Usage: rlcore train [experiment=NAME] run_dir=DIR [group=option ...] [key=value ...]
       rlcore train run_dir=DIR resume=auto [key=value ...]
"""


def text(config_dir: str | Path | None = None) -> str:
    """The whole help, ready to print."""
    found = groups(config_dir)
    options = {name: files for name, files in sorted(found.items()) if name != "experiment"}
    lines = [
        USAGE,
        f"Groups, group=option ({' and '.join(LABELLED)} also take a list, e.g. correction=[dvp,mis,veto]):",
    ]
    for name, files in options.items():
        lines += [f"  {name}", *(f"    {option:<14}{_about(file)}" for option, file in files.items())]
    lines += ["", "Experiments, experiment=NAME:"]
    lines += [f"  {name:<22}{_about(file)}" for name, file in found.get("experiment", {}).items()]
    lines += ["", "Keys, key=value (LABEL: a name such as bf16 of the selected actor):", *_keys(RunConfig, "")]
    return "\n".join(lines) + "\n"


def _about(file: Path) -> str:
    """The first comment of an option's file that says what it is."""
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("# ") and not line.startswith("# @"):
            return line[2:]
    return ""


def _keys(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, info in model.model_fields.items():
        inner, labelled = section(info.annotation)
        if inner is not None:
            yield from _keys(inner, f"{prefix}{name}.LABEL." if labelled else f"{prefix}{name}.")
        else:
            head = f"{prefix}{name}: {_type(info.annotation)}{_default(info)}"
            yield f"  {head:<66} {info.description or ''}".rstrip()


def _type(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "|".join(json.dumps(a).strip('"') for a in args)
    if annotation is type(None):
        return "null"
    if origin in (list, dict, tuple):
        return f"{origin.__name__}[{', '.join(_type(a) for a in args)}]"
    if args:
        return "|".join(_type(a) for a in args)
    return getattr(annotation, "__name__", str(annotation))


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return " (required)"
    value = info.get_default(call_default_factory=True, validated_data={})
    return "" if value is PydanticUndefined else f" = {shorten(json.dumps(value), 40, placeholder=' ...')}"
