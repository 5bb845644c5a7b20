"""`rlcore import-config`: a configuration of verl, TRL or OpenRLHF as an experiment of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from rlcore.config.compose import load
from rlcore.config.foreign import Left, Translation, translate
from rlcore.config.foreign_files import read
from rlcore.errors import UserError

NAMES = {"verl": "verl", "trl": "TRL", "openrlhf": "OpenRLHF"}


def import_config(path: str, out: str) -> int:
    """Write `out`/experiment/<name of the file>.yaml and print what was not translated.

    Raises UserError for a file that is of none of them, or an experiment that exists.
    """
    source, given = read(path)
    found = translate(source, given)
    name = Path(path).stem
    target = Path(out) / "experiment" / f"{name}.yaml"
    if target.exists():
        raise UserError(f"{target} exists: remove it, or give another folder, out=FOLDER.")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(experiment(found, f"From {path} ({NAMES[source]}), by rlcore import-config."))
    print(f"{target}: {len(found.values)} settings, from {NAMES[source]}'s")
    if found.left:
        print(f"not translated ({len(found.left)}):")
        print("\n".join(f"  {_line(left)}" for left in found.left))
    words = [f"config_dir={out}", f"experiment={name}", "run_dir=DIR"]
    try:
        load(words[1:], out)
    except UserError as e:
        print(f"still missing: {e}")
    print(f"next: rlcore train {' '.join(words)} dry_run=true")
    return 0


def experiment(found: Translation, title: str) -> str:
    """The experiment's file."""
    lines = ["# @package _global_", f"# {title}"]
    lines += [f"# not translated: {_line(left)}" for left in found.left]
    lines += ["defaults:"]
    lines += [f"  - override /{group}: {_written(o)}" for group, o in found.options.items()]
    lines += ["  - _self_", ""]
    return "\n".join(lines) + yaml.safe_dump(_nested(found.values), sort_keys=False)


def _line(left: Left) -> str:
    given = left.key if left.value is None else f"{left.key}={_written(left.value)}"
    return " ".join(f"{given}: {left.reason}".split())


def _written(value: Any) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list) else str(value)


def _nested(values: dict[str, Any]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for key, value in values.items():
        *parents, leaf = key.split(".")
        node = root
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return root
