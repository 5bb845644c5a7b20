"""Help on the settings of a run: what `rlcore train --help` lists, and its topics."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from textwrap import shorten, wrap
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rlcore.config import help
from rlcore.config.groups import LISTED, groups
from rlcore.config.help import WIDTH, beside, form, meaning
from rlcore.config.names import registered
from rlcore.config.schema import RunConfig
from rlcore.config.sentences import sections
from rlcore.config.verbs import Verb, nearest
from rlcore.errors import UserError

OWN_CORRECTION = "Your own correction: correction.LABEL={name: path/to/file.py:MySpec, key: value}"


def of_verb(verb: Verb, topics: Sequence[str] = (), config_dir: str | Path | None = None) -> str:
    """`rlcore VERB --help [TOPIC ...]`. Raises UserError for an unknown topic."""
    if topics:
        return "\n\n".join(_topic(verb, topic, config_dir) for topic in topics)
    if verb.name == "train":
        return "\n".join([help.of_verb(verb), "", *_settings(config_dir)])
    return help.of_verb(verb)


def _settings(config_dir: str | Path | None) -> Iterator[str]:
    """Groups, experiments and sections of a run, each by name."""
    found = groups(config_dir)
    experiments = found.pop("experiment", {})
    *first, last = LISTED
    lists = f"{', '.join(first)} and {last} also take a list, correction=[dvp,mis]"
    yield f"Groups, group=option ({lists}):"
    yield from beside({name: ", ".join(options) for name, options in sorted(found.items())})
    yield from ["", "Experiments, experiment=NAME:", *_columns(experiments)]
    yield from ["", "Settings, key=value:"]
    yield from beside(
        {
            "run": ", ".join(key for key, _ in settings() if "." not in key),
            **{name: ", ".join(_below(name)) for name in _sections()},
        }
    )
    yield from ["", "One of them with defaults and meanings: rlcore train --help TOPIC, such as"]
    yield "  rlcore train --help algorithm     options and keys of a group (run: keys without one)"
    yield "  rlcore train --help learner.lora  a part of one, or a single key"
    yield "  rlcore train --help experiment    what the experiments are"
    yield "  rlcore train --help all           every key"


def _topic(verb: Verb, topic: str, config_dir: str | Path | None) -> str:
    found = groups(config_dir)
    own = verb.key(topic)
    parts = []
    if own is not None and topic not in RunConfig.model_fields:
        parts.append([f"rlcore {verb.name}:", *beside({form(own): meaning(own)})])
    if verb.settings and topic in found:
        options = {name: about(file) for name, file in found[topic].items()}
        parts.append([f"{topic}=NAME:", *beside(options)])
    keys = list(_described(topic)) if verb.settings else []
    if keys:
        title = "The keys of a run" if topic in ("run", "all") else f"Keys of {topic}"
        parts.append([f"{title} (LABEL: a name such as bf16 of the selected actor):", *keys])
    if verb.settings and topic == "correction":
        parts.append([OWN_CORRECTION])
    if not parts:
        choices = [key.name for key in verb.keys]
        if verb.settings:
            choices += [*found, "run", "all", *_sections(), *(key for key, _ in settings())]
        shown = [*(key.name for key in verb.keys)]
        shown += ["run", "all", *dict.fromkeys([*found, *_sections()])] if verb.settings else []
        raise UserError(
            f"rlcore {verb.name} --help {topic} is not a topic: {nearest(topic, choices)}the "
            f"topics are {', '.join(shown)}."
        )
    return "\n\n".join("\n".join(part) for part in parts)


def _described(topic: str) -> Iterator[str]:
    """Two lines or more for each key below a topic: the key with its default, then its meaning."""
    for key, info in settings():
        if not _within(key, topic):
            continue
        default = written_default(info)
        yield f"  {key}{' (required)' if default is None else f' = {default}'}"
        meaning = meaning_of(info)
        text = f"{kind_of(key, info)}{f': {meaning}' if meaning else ''}"
        yield from wrap(text, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)


def _within(key: str, topic: str) -> bool:
    """Return whether a key of the schema is the topic or below it; any word stands for LABEL."""
    if topic in ("run", "all"):
        return topic == "all" or "." not in key
    parts, asked = key.split("."), topic.split(".")
    return len(parts) >= len(asked) and all(p in (a, "LABEL") for p, a in zip(parts, asked))


def settings() -> Iterator[tuple[str, FieldInfo]]:
    """Every key of a run with its declaration; a key of two forms of a section is listed once."""
    seen: set[str] = set()
    for key, info in _keys(RunConfig, ""):
        if key not in seen:
            seen.add(key)
            yield key, info


def _keys(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, info in model.model_fields.items():
        found = list(sections(info.annotation))
        for inner, labelled in found:
            yield from _keys(inner, f"{prefix}{name}.LABEL." if labelled else f"{prefix}{name}.")
        if not found:
            yield f"{prefix}{name}", info


def _sections() -> list[str]:
    return [n for n, info in RunConfig.model_fields.items() if list(sections(info.annotation))]


def _below(section: str) -> list[str]:
    """The names directly below a section, or below its labels."""
    inner = list(sections(RunConfig.model_fields[section].annotation))
    return list(inner[0][0].model_fields)


def _columns(names: Iterable[str]) -> list[str]:
    """Names in columns, read downwards."""
    found = list(names)
    width = max(map(len, found), default=0) + 2
    count = max(1, WIDTH // width)  # indented by two, and two spaces between columns
    rows = -(-len(found) // count)
    return ["  " + "".join(f"{n:<{width}}" for n in found[i::rows]).rstrip() for i in range(rows)]


def about(file: Path) -> str:
    """The first sentence of the comment that describes an option, in its file."""
    found = ""
    for line in file.read_text(encoding="utf-8").splitlines():
        # "# @package" is Hydra's
        if line.startswith("# ") and not line.startswith("# @"):
            found = f"{found} {line[2:]}".strip()
        elif found:
            break
        if found.endswith("."):
            break
    return found


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


def choices_of(key: str, info: FieldInfo) -> tuple[str, ...]:
    """The values of a key, where they are few: for completion."""
    if names := registered(key):
        return names
    found = re.split(r"\|", _type(info.annotation))
    if "bool" in found:
        return ("true", "false")
    forms = get_args(info.annotation) if get_origin(info.annotation) is not Literal else ()
    literal = get_origin(info.annotation) is Literal or any(get_origin(f) is Literal for f in forms)
    return tuple(found) if literal else ()


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
