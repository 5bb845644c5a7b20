"""Files of other trainers: YAML and TOML, shell scripts with their variables and arrays, and Python
scripts that build a trainer, read without running them."""

from __future__ import annotations

import ast
import math
import os
import re
import shlex
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from rlcore.config.sentences import one_line
from rlcore.errors import UserError
from rlcore.extras.foreign_keys import ENTRIES, SOURCES, Source
from rlcore.extras.foreign_meanings import SWITCHES

Given = dict[str, Any]
PACKAGES = {"openrlhf": "openrlhf", "skyrl": "skyrl", "prime_rl": "prime_rl", "verl": "verl."}


def read(path: str) -> tuple[Source, Given]:
    """The trainer of a file, and its settings by dotted key, under their newest names, without null
    ones.

    Raises UserError for a file that cannot be read, or that is of none of the trainers.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        given = _settings(text, path)
    except (OSError, ValueError, yaml.YAMLError, SyntaxError, RecursionError) as e:
        raise UserError(f"{path} cannot be read: {one_line(e)}.") from e
    given = {key: value for key, value in given.items() if value is not None}
    source = _source(given, text, path)
    newest = {old: names[0] for names in _names(source) for old in names}
    return source, {newest.get(key, key): value for key, value in given.items()}


def _settings(text: str, path: str) -> Given:
    suffix = Path(path).suffix
    if suffix == ".py":
        return _of_python(text, path)
    data = None
    if suffix in (".yaml", ".yml", ".json"):
        data = yaml.safe_load(text)
    elif suffix == ".toml":
        data = tomllib.loads(text)
    return dict(_flat(data)) if isinstance(data, dict) else dict(_of_script(text))


def _names(source: Source) -> Iterator[list[str]]:
    for entry in ENTRIES:
        yield entry.names(source)
    for names in SWITCHES[source]:
        yield names.split("|")


def _source(given: Given, text: str, path: str) -> Source:
    known = {source: {n for names in _names(source) for n in names} for source in SOURCES}
    for source in ("openrlhf", "skyrl"):  # verl has names of the same form
        if source in text.lower() and len(known[source] & set(given)) > 1:
            return source
    found = max(SOURCES, key=lambda source: len(known[source] & set(given)))
    if len(known[found] & set(given)) < 2:
        raise UserError(
            f"{path} is not accepted: it holds no settings of verl, TRL's GRPO, OpenRLHF, SkyRL or "
            "prime-rl; give a YAML or TOML file, or the script that starts the training."
        )
    return found


def _flat(node: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in node.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        elif name != "_target_":
            yield f"{prefix}{name}", value


# -- shell scripts ---------------------------------------------------------------------------------

_ASSIGNED = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?[-=]([^}]*))?\}|(\w+))")
_ARRAY = re.compile(r"\$\{(\w+)\[[@*]\]\}")
_PRODUCT = re.compile(r"\$\(\(\s*(\d+(?:\s*\*\s*\d+)*)\s*\)\)")
_STARTS = re.compile(r".*\.py|-m|grpo|rloo")  # words behind which the trainer's own begin


def _of_script(text: str) -> Iterator[tuple[str, Any]]:
    """Words `a.b=value` (verl, SkyRL) and `--key value ...` (TRL, OpenRLHF) of a script's commands,
    with its variables and arrays put in their places."""
    given: Given = {}
    key = ""
    for word in _words(text):
        dotted = re.fullmatch(r"\+{0,2}([\w]+(?:\.\w+)+)=(.*)", word, re.DOTALL)
        if dotted:
            given[dotted[1]], key = _value(dotted[2]), ""
        elif word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            key = key.replace("-", "_")
            given[key] = _value(value) if equals else True
        elif not key and _STARTS.fullmatch(word):
            given.clear()
        elif key and word not in ("--", "$@", "python", "python3", "-m"):
            given[key] = _joined(given[key], _value(word))
        elif word in ("python", "python3", "-m"):
            given.clear()
            key = ""
    yield from given.items()


def _words(text: str) -> Iterator[str]:
    """The words of a script's commands; raises ValueError for quotes that are not closed."""
    variables: dict[str, str] = {}
    arrays: dict[str, list[str]] = {}
    filling: list[str] | None = None
    text = _PRODUCT.sub(lambda found: str(math.prod(map(int, found[1].split("*")))), text)
    for word in shlex.split(text.replace("\\\n", " "), comments=True):
        assigned = _ASSIGNED.fullmatch(word)
        if filling is not None:
            ends = word.endswith(")") and "(" not in word
            filling += [w for w in [word[:-1] if ends else word] if w]
            filling = None if ends else filling
        elif assigned and assigned[2].startswith("("):
            filling = arrays[assigned[1]] = [w for w in [assigned[2][1:].rstrip(")")] if w]
            filling = None if assigned[2].endswith(")") else filling
        elif assigned:
            variables[assigned[1]] = _expanded(assigned[2], variables)
        else:
            array = _ARRAY.fullmatch(word)
            listed = arrays.get(array[1], []) if array else [word]
            yield from (_expanded(w, variables) for w in listed)


def _expanded(word: str, variables: dict[str, str]) -> str:
    """Put variables in their places; what is not known stays as `$NAME`."""

    def value(found: re.Match[str]) -> str:
        name = found[1] or found[3]
        known = variables.get(name, os.environ.get(name))
        if known is None and found[2] is not None:
            known = variables[name] = _expanded(found[2], variables)
        return found[0] if known is None else known

    return _VARIABLE.sub(value, word)


def _joined(before: Any, value: Any) -> Any:
    """Several words after one option are a list."""
    if before is True:
        return value
    return [*before, value] if isinstance(before, list) else [before, value]


def _value(text: str) -> Any:
    if re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", text):
        return float(text)  # YAML reads 1e-6 as a text
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return value if isinstance(value, bool | int | float | str | list | None) else text


# -- Python scripts --------------------------------------------------------------------------------

_COMPUTED = "$computed"  # in the place of a value that only running the script would give


def _of_python(text: str, path: str) -> Given:
    """Arguments of a script's `GRPOConfig(...)`, `GRPOTrainer(...)`, `load_dataset(...)` and
    `LoraConfig(...)`, and assignments to fields of a configuration."""
    tree = ast.parse(text)
    names = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    given: Given = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            given |= _of_call(node, names, tree, path)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
            field = node.targets[0]
            if isinstance(field.value, ast.Name) and field.value.id in ("training_args", "args"):
                given[field.attr] = _literal(node.value, names)
    return given


def _of_call(node: ast.Call, names: dict[str, ast.expr], tree: ast.Module, path: str) -> Given:
    called = ast.unparse(node.func).rpartition(".")[2]
    given = {k.arg: _literal(k.value, names) for k in node.keywords if k.arg is not None}
    if re.fullmatch(r"\w*(GRPO|RLOO)Config", called):
        return given
    if called == "LoraConfig":
        return {"use_peft": True} | {
            name: given[key] for key, name in _LORA.items() if key in given
        }
    if called == "load_dataset" and node.args:
        return {"dataset_name": _literal(node.args[0], names)}
    if re.fullmatch(r"\w*(GRPO|RLOO)Trainer", called):
        found = {"model_name_or_path": given["model"]} if "model" in given else {}
        for functions in (k.value for k in node.keywords if k.arg == "reward_funcs"):
            found["reward_funcs"] = _functions(functions, tree, path)
        return found
    return {}


_LORA = {"r": "lora_r", "lora_alpha": "lora_alpha"}


def _functions(node: ast.expr, tree: ast.Module, path: str) -> Any:
    """Reward functions as "file.py:name" or "package.module:name"."""
    listed: Iterable[ast.expr] = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
    places = {n.name: path for n in tree.body if isinstance(n, ast.FunctionDef)}
    for imported in (n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)):
        places |= {a.asname or a.name: str(imported.module) for a in imported.names}
    found = [f"{places.get(name)}:{name}" for name in map(ast.unparse, listed) if name in places]
    if len(found) < len(list(listed)):
        return _COMPUTED
    return found if isinstance(node, ast.List | ast.Tuple) else found[0]


def _literal(node: ast.expr, names: dict[str, ast.expr]) -> Any:
    """The value of an expression, of a name that is assigned one, or `_COMPUTED`."""
    if isinstance(node, ast.Name) and node.id in names:
        node = names[node.id]
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        return _COMPUTED
