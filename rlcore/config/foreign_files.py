"""Reads the settings of another trainer from a YAML file or from the script that starts it."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from rlcore.config.foreign_keys import ENTRIES, SOURCES, SWITCHES, Source
from rlcore.config.sentences import one_line
from rlcore.errors import UserError

Given = dict[str, Any]


def read(path: str) -> tuple[Source, Given]:
    """Whose settings a file holds, and the settings by dotted key; those that are null, left out.

    Raises UserError for a file that cannot be read, or that is of none of the three.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        data = yaml.safe_load(text) if Path(path).suffix in (".yaml", ".yml", ".json") else None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as e:
        raise UserError(f"{path} cannot be read: {one_line(e)}.") from e
    given = dict(_flat(data)) if isinstance(data, dict) else _of_script(text, path)
    given = {key: value for key, value in given.items() if value is not None}
    return _source(given, text, path), given


def _flat(node: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in node.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        elif name != "_target_":
            yield f"{prefix}{name}", value


def _of_script(text: str, path: str) -> Given:
    """Words `a.b=value` (verl) and `--key value ...` (TRL, OpenRLHF) of a shell script."""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as e:
        raise UserError(f"{path} cannot be read as a shell script: {e}.") from e
    given: Given = {}
    key = ""
    for word in words:
        dotted = re.fullmatch(r"\+{0,2}([\w]+(?:\.\w+)+)=(.*)", word, re.DOTALL)
        if dotted:
            given[dotted[1]], key = _value(dotted[2]), ""
        elif word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            key = key.replace("-", "_")
            given[key] = _value(value) if equals else True
        elif key:
            given[key] = _joined(given[key], _value(word))
    return given


def _joined(before: Any, value: Any) -> Any:
    """Several words after one option are a list."""
    if before is True:
        return value
    return [*before, value] if isinstance(before, list) else [before, value]


def _value(text: str) -> Any:
    text = os.path.expandvars(text)
    try:
        # YAML reads 1e-6 as a text
        return float(text) if re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", text) else _plain(text)
    except yaml.YAMLError:
        return text


def _plain(text: str) -> Any:
    value = yaml.safe_load(text)
    return value if isinstance(value, bool | int | float | str | list | None) else text


def _source(given: Given, text: str, path: str) -> Source:
    known = {
        source: {entry.of(source) for entry in ENTRIES} | set(SWITCHES[source])
        for source in SOURCES
    }
    if "openrlhf" in text.lower():
        return "openrlhf"
    found = max(SOURCES, key=lambda source: len(known[source] & set(given)))
    if len(known[found] & set(given)) < 2:
        raise UserError(
            f"{path} is not accepted: it holds no settings of verl, TRL's GRPO or OpenRLHF; give "
            "a YAML file, or the script that starts the training."
        )
    return found
