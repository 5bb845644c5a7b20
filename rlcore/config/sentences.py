"""Turns configuration errors into one sentence with the key, the value and the choices."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rlcore.config.schema import SHADOW, CorrectionList, RunConfig, shipped
from rlcore.corrections.specs import CORRECTIONS
from rlcore.errors import Faults, UserError
from rlcore.spec import Spec


def validate(data: Any) -> RunConfig:
    """A typed configuration from plain data, each specification checked by its own rules.

    Types are not converted into each other. Raises UserError.
    """
    try:
        # JSON mode: strict types (no "2" for 2, no true for 1) that still take a list for a tuple.
        config = RunConfig.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as e:
        _faults(e.errors(include_url=False)).end()
        raise
    # After the types of everything: a rule may rely on every setting of its specification.
    faults = Faults()
    for key, spec in specifications(config):
        faults.of(spec.check, key)
    faults.end()
    return config


def specifications(node: Any, key: str = "") -> Iterator[tuple[str, Spec]]:
    """Every specification below `node` with its dotted key, outer ones first."""
    if isinstance(node, Spec):
        yield key, node
    if isinstance(node, CorrectionList):
        shadows = ((f"{SHADOW}.{i}", one) for i, one in enumerate(node.shadow))
        inside: Iterable[tuple[str, Any]] = (*node.chosen().items(), *shadows)
    elif isinstance(node, Spec):
        inside = (*node, *node.own_sections(key).items())
    elif isinstance(node, dict):
        inside = node.items()
    else:
        return
    for name, value in inside:
        yield from specifications(value, f"{key}.{name}" if key else name)


def one_line(error: BaseException) -> str:
    """A library's message on one line, without OmegaConf's context dump and without a full stop."""
    return " ".join(str(error).partition("\n    full_key:")[0].split()).rstrip(".")


def closest(word: str, choices: Iterable[str], prefix: str = "") -> str:
    """'perhaps X is meant' if something is near, else ''."""
    # 0.6: one wrong or swapped letter in a short word still counts, another word does not
    near = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.6)
    return f"perhaps {prefix}{near[0]} is meant" if near else ""


def keys(model: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[str]:
    """Every dotted key of the schema; LABEL stands for a name that the user chooses."""
    for name, info in model.model_fields.items():
        key = f"{prefix}{name}"
        found = list(sections(info.annotation))
        for inner, labelled in found:
            yield from keys(inner, f"{key}.LABEL." if labelled else f"{key}.")
        if not found:
            yield key


def sections(annotation: Any) -> Iterator[tuple[type[BaseModel], bool]]:
    """(model that a field's annotation holds, whether the field maps labels to it), of each form
    that the field may have; nothing for a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, CorrectionList):
        yield shipped(), False
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, False
    else:
        labelled = get_origin(annotation) is dict
        for arg in get_args(annotation)[1:] if labelled else get_args(annotation):
            for inner, nested in sections(arg):
                yield inner, labelled or nested


def section(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """The first of `sections`, or (None, False)."""
    return next(sections(annotation), (None, False))


def is_text(key: str) -> bool:
    """Return whether a dotted key holds any text, such as a prompt or a path."""
    model: type[BaseModel] | None = RunConfig
    parts = key.split(".")
    while model is not None and parts:
        field = model.model_fields.get(parts.pop(0))
        if field is None:
            return False
        forms = list(sections(field.annotation))
        if not parts:
            return field.annotation is str or field.annotation == str | None
        if field.annotation == dict[str, str]:
            return len(parts) == 1
        model, labelled = forms[-1] if forms else (None, False)
        if model is not None and labelled and parts:
            parts.pop(0)
    return False


def _faults(errors: list[ErrorDetails]) -> Faults:
    """The first error of each key: the forms of `task` are tried one after another."""
    faults, first = Faults(), {_key(error): error for error in reversed(errors)}
    for key in dict.fromkeys(map(_key, errors)):
        faults.add(UserError(f"{_one(first[key])}."))
    return faults


def _key(error: ErrorDetails) -> str:
    place = [str(part) for part in error["loc"]]
    if place[:1] == ["task"]:
        place[1:2] = []  # pydantic's name of the form of `task`
    return ".".join(place)


def _one(error: ErrorDetails) -> str:
    key, value, kind = _key(error), _shown(error.get("input")), error["type"]
    if kind == "extra_forbidden":
        return _unknown_key(key, value)
    if kind == "missing":
        return f"{key} is required and was not given"
    if kind == "literal_error":
        # pydantic lists the choices in words
        choices = error["ctx"]["expected"].replace("'", "").replace(" or ", ", ")
        hint = closest(str(error["input"]), choices.split(", "))
        return (
            f"{key}={value} is not accepted: {hint + '; ' if hint else ''}choose one of: {choices}"
        )
    if kind == "string_type" and isinstance(error.get("input"), int | float):
        return f"{key}={value} is not accepted: it should be text, so write it in quotes"
    what = error["msg"].removeprefix("Value error, ")
    if " should have " in what:  # of a length
        counted = what.partition(" should have ")[2].partition(" after validation")[0]
        return f"{key}={value} is not accepted: it should have {counted}"
    return f"{key}={value} is not accepted: it should be {what.removeprefix('Input should be ')}"


# Keys that were renamed: the last part of the former name -> the present name
FORMER = {
    "whole_every": "cluster.full_weights_every",
    "keep_best": "algorithm.train_on_best",
    "keep_best_by": "algorithm.train_on_best_by",
    "keep_passes_mib": "learner.activation_cache_mib",
    "router": "learner.router_replay",
    "keep": "task.difficulty.resample_rate",
    "sparse_prompt": "sparse.prompt",
}
# the same, where the present one is in another section
MOVED = {"cpu_fast_path": "cluster.cpu_fast_paths"}


def _unknown_key(key: str, value: str) -> str:
    parent, _, leaf = key.rpartition(".")
    present = FORMER.get(leaf, "")
    if present and parent.rpartition(".")[2] == present.split(".")[-2]:
        name = f"{parent}.{present.rpartition('.')[2]}"
        return f"{key}={value} is not a key any more: it is called {name} now"
    if leaf in MOVED:
        return f"{key}={value} is not a key any more: it is called {MOVED[leaf]} now"
    siblings = _keys_under(parent)
    hint = closest(leaf, siblings, f"{parent}." if parent else "")
    # The same name in another section: the key's name is right and its section is not.
    elsewhere = sorted(
        (k for k in keys() if k.rpartition(".")[2] == leaf), key=lambda k: k.count(".")
    )
    if not hint and elsewhere:
        hint = f"perhaps {elsewhere[0]} is meant"
    if not siblings and parent.startswith(f"correction.{SHADOW}"):
        hint = hint or closest(leaf, CORRECTIONS)
        siblings = list(CORRECTIONS)
    place = f"keys of {parent}" if parent else "keys of a run"
    return (
        f"{key}={value} is not a key{': ' + hint if hint else ''}; {place}: {', '.join(siblings)}"
    )


def _keys_under(parent: str) -> list[str]:
    """Names of the keys directly below `parent`; none where a user's own class declares them."""
    model: type[BaseModel] = RunConfig
    parts = parent.split(".") if parent else []
    while parts:
        field = model.model_fields.get(parts.pop(0))
        forms = list(sections(field.annotation)) if field is not None else []
        if not forms:
            return []
        model, labelled = forms[0]
        if parts and parts[0] not in model.model_fields:
            model, labelled = forms[-1]
        if labelled and parts:
            parts.pop(0)  # the label
    return list(model.model_fields)


def written(value: Any) -> str:
    """A setting's value in the form of a command line."""
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
