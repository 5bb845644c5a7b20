"""What is wrong with a configuration, in one sentence that names the key, the value and the choices."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rlcore.config.schema import RunConfig
from rlcore.errors import UserError


def validate(data: Any) -> RunConfig:
    """Plain data to a typed configuration, without coercing one type into another. Raises UserError."""
    try:
        # JSON mode: strict types (no "2" for 2, no true for 1) that still take a list for a tuple.
        return RunConfig.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as e:
        raise UserError(_sentence(e.errors(include_url=False))) from None


def one_line(error: BaseException) -> str:
    """A library's message on one line, without OmegaConf's dump of where it was and without a full stop."""
    return " ".join(str(error).partition("\n    full_key:")[0].split()).rstrip(".")


def closest(word: str, choices: Iterable[str], prefix: str = "") -> str:
    """'perhaps X is meant' if something is near, else ''."""
    near = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.6)
    return f"perhaps {prefix}{near[0]} is meant" if near else ""


def keys(model: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[str]:
    """Every dotted key of the schema; LABEL stands for a name that the user makes up."""
    for name, info in model.model_fields.items():
        key = f"{prefix}{name}"
        inner, labelled = section(info.annotation)
        if inner is None:
            yield key
        else:
            yield from keys(inner, f"{key}.LABEL." if labelled else f"{key}.")


def section(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """The model that a field's annotation holds, if any, and whether it is a mapping from labels to it."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    args = get_args(annotation)
    labelled = getattr(annotation, "__origin__", None) is dict
    for arg in args[1:] if labelled else args:
        inner, nested = section(arg)
        if inner is not None:
            return inner, labelled or nested
    return None, False


def _sentence(errors: list[ErrorDetails]) -> str:
    first, rest = errors[0], errors[1:]
    others = [_key(e) for e in rest if _key(e) != _key(first)]
    tail = f" (also wrong: {', '.join(dict.fromkeys(others))})" if others else ""
    return f"{_one(first)}{tail}."


def _key(error: ErrorDetails) -> str:
    return ".".join(str(part) for part in error["loc"])


def _one(error: ErrorDetails) -> str:
    key, value, kind = _key(error), _shown(error.get("input")), error["type"]
    if kind == "extra_forbidden":
        return _unknown_key(key, value)
    if kind == "missing":
        return f"{key} is required and was not given"
    if kind == "literal_error":
        choices = error["ctx"]["expected"].replace("'", "").replace(" or ", ", ")
        hint = closest(str(error["input"]), choices.split(", "))
        return f"{key}={value} is not accepted: {hint + '; ' if hint else ''}choose one of: {choices}"
    what = error["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    return f"{key}={value} is not accepted: it should be {what}"


def _unknown_key(key: str, value: str) -> str:
    parent, _, leaf = key.rpartition(".")
    siblings = _keys_under(parent)
    hint = closest(leaf, siblings, f"{parent}." if parent else "")
    elsewhere = sorted((k for k in keys() if k.rpartition(".")[2] == leaf), key=lambda k: k.count("."))
    if not hint and elsewhere:
        hint = f"perhaps {elsewhere[0]} is meant"
    place = f"keys of {parent}" if parent else "keys of a run"
    return f"{key}={value} is not a key{': ' + hint if hint else ''}; {place}: {', '.join(siblings)}"


def _keys_under(parent: str) -> list[str]:
    model: type[BaseModel] = RunConfig
    parts = parent.split(".") if parent else []
    while parts:
        inner, labelled = section(model.model_fields[parts.pop(0)].annotation)
        if labelled and parts:
            parts.pop(0)
        if inner is None:
            return []
        model = inner
    return list(model.model_fields)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
