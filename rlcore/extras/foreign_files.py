"""Files of other trainers: YAML and TOML, shell scripts, and Python scripts that build a trainer,
read without running them."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from rlcore.config.sentences import one_line
from rlcore.errors import UserError
from rlcore.extras.foreign_keys import ENTRIES, SOURCES, Source
from rlcore.extras.foreign_meanings import PROGRAMS, SWITCHES
from rlcore.extras.foreign_shell import integer, value_of
from rlcore.extras.foreign_shell import settings as settings_of_script

Given = dict[str, Any]
PACKAGES = {"openrlhf": "openrlhf", "skyrl": "skyrl", "prime_rl": "prime_rl", "verl": "verl."}

# Beginnings of keys that only trainers have which are not read: their other names look like ours.
OTHERS = {
    "AReaL": ("gconfig.", "rollout.max_head_offpolicyness", "actor.use_decoupled_loss"),
    "NeMo-RL": ("grpo.num_", "grpo.async_grpo", "loss_fn.ratio_clip"),
}


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
    named = {newest.get(key, key): _referred(value, given) for key, value in given.items()}
    for words, defaults in PROGRAMS[source].items():
        if re.search(words, text):
            named = {**defaults, **named}
    return source, named


def _referred(value: Any, given: Given) -> Any:
    """The value of a reference of a YAML file, `${a.b}`, where the file has it."""
    found = re.fullmatch(r"\$\{(?:oc\.select:)?([\w.]+)(?:,(.*))?\}", str(value))
    if found is None:
        return value
    default = value if found[2] is None else value_of(found[2])
    return given.get(found[1], default)


def _settings(text: str, path: str) -> Given:
    suffix = Path(path).suffix
    if suffix == ".py":
        return _of_python(text, path)
    data = None
    if suffix in (".yaml", ".yml", ".json"):
        data = yaml.safe_load(text)
    elif suffix == ".toml":
        data = tomllib.loads(text)
    return dict(_flat(data)) if isinstance(data, dict) else dict(settings_of_script(text))


def _names(source: Source) -> Iterator[list[str]]:
    for entry in ENTRIES:
        yield entry.names(source)
    for names in SWITCHES[source]:
        yield names.split("|")


def _source(given: Given, text: str, path: str) -> Source:
    for name, keys in OTHERS.items():
        if any(key.startswith(keys) for key in given):
            raise UserError(
                f"{path} is not accepted: it is of {name}, which import-config does not read; "
                "docs/coming-from.md has a table of keys to set by hand, or give a file of verl, "
                "TRL, OpenRLHF, SkyRL or prime-rl."
            )
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


# -- Python scripts --------------------------------------------------------------------------------


def _of_python(text: str, path: str) -> Given:
    """Arguments of a script's `GRPOConfig(...)`, `GRPOTrainer(...)`, `load_dataset(...)` and
    `LoraConfig(...)`, and assignments to fields of a configuration."""
    tree = ast.parse(text)
    names = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    imported = (n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom))
    aliases = {a.asname: a.name for n in imported for a in n.names if a.asname}
    given: Given = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func).rpartition(".")[2]
            given |= _of_call(aliases.get(called, called), node, names, tree, path)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
            field = node.targets[0]
            if isinstance(field.value, ast.Name) and _configured(field.value.id, names):
                given[field.attr] = _literal(node.value, names)
    return given


def _configured(name: str, names: dict[str, ast.expr]) -> bool:
    """True for a variable that holds a configuration."""
    value = names.get(name)
    made = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
    return name in ("training_args", "args") or made.endswith(("GRPOConfig", "RLOOConfig"))


def _of_call(
    called: str, node: ast.Call, names: dict[str, ast.expr], tree: ast.Module, path: str
) -> Given:
    given = _keywords(node, names)
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
            found["reward_funcs"] = _functions(functions, names, tree, path)
        return found
    return {}


def _keywords(call: ast.Call, names: dict[str, ast.expr]) -> Given:
    """Arguments by keyword, and those that `**settings` stands for."""
    given: Given = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            given |= _unpacked(keyword.value, names)
        else:
            given[keyword.arg] = _literal(keyword.value, names)
    return given


def _unpacked(node: ast.expr, names: dict[str, ast.expr]) -> Given:
    """The entries of a dictionary; of one that only running the script would give, its words."""
    if isinstance(node, ast.Name) and node.id in names:
        others = {name: value for name, value in names.items() if name != node.id}
        return _unpacked(names[node.id], others)
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "dict" and not node.args:
        return _keywords(node, names)
    if not isinstance(node, ast.Dict):
        return {f"**{ast.unparse(node)}": _computed(node)}
    given: Given = {}
    for key, value in zip(node.keys, node.values, strict=True):
        if isinstance(key, ast.Constant):
            given[str(key.value)] = _literal(value, names)
        else:
            given |= _unpacked(value, names) if key is None else _unpacked(key, {})
    return given


_LORA = {"r": "lora_r", "lora_alpha": "lora_alpha"}


def _functions(node: ast.expr, names: dict[str, ast.expr], tree: ast.Module, path: str) -> Any:
    """Reward functions as "file.py:name" or "package.module:name"."""
    if isinstance(node, ast.Name) and isinstance(names.get(node.id), ast.List | ast.Tuple):
        node = names[node.id]
    listed: Iterable[ast.expr] = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    places = {n.name: path for n in tree.body if isinstance(n, functions)}
    for imported in (n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)):
        places |= {a.asname or a.name: str(imported.module) for a in imported.names}
    found = [f"{places.get(name)}:{name}" for name in map(ast.unparse, listed) if name in places]
    if len(found) < len(list(listed)):
        return _computed(node)
    return found if isinstance(node, ast.List | ast.Tuple) else found[0]


def _literal(node: ast.expr, names: dict[str, ast.expr]) -> Any:
    """The value of an expression, of a name that is assigned one, or its words."""
    if isinstance(node, ast.Name) and node.id in names:
        node = names[node.id]
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        pass
    try:
        return integer(node)
    except (ValueError, ArithmeticError):
        return _computed(node)


def _computed(node: ast.expr) -> str:
    """In the place of a value that only running the script would give: its words in `$()`."""
    words = " ".join(ast.unparse(node).split())
    return f"$({words if len(words) < 60 else 'computed'})"
