"""Counts that grow with every feature unless a feature has one home; they may only fall.

    python tests/growth.py            the counts, and the bounds of tests/growth.json
    python tests/growth.py --write    lower the bounds to today's counts
    python tests/growth.py --raise    raise them, too: say in the commit what the growth buys

`tests/test_style.py` fails for a count above its bound. The standard library alone.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import prose

ROOT = Path(__file__).resolve().parents[1]
BOUNDS = ROOT / "tests" / "growth.json"
STEP = 100  # lines or words that a bound leaves free
# What the processes of a plain run load.
ROLES = (
    *("cli", "commands.train"),
    *("cluster.actors.rollout", "rollout.engines.vllm.engine"),
    "rollout.engines.vllm.worker_extension",
    *("cluster.actors.learner", "learner.engines.deepspeed"),
    *("cluster.actors.buffer", "cluster.actors.scorer"),
)
# counted by a test of a whole run, tests/commands/test_train.py
COLUMNS = "columns of a brief row"
# those that no other section has
DEEPSPEED = {
    *("zero_stage", "overlap_comm", "expert_parallel", "sequence_parallel", "offload"),
    *("nvme_path", "offload_while_sampling"),
}


@cache
def modules(root: Path) -> dict[str, Path]:
    """Module -> file of rlcore/ under `root`."""
    paths = sorted((root / "rlcore").rglob("*.py"))
    names = (".".join(path.relative_to(root).with_suffix("").parts) for path in paths)
    return {name.removesuffix(".__init__"): path for name, path in zip(names, paths)}


def imports(body: Iterable[ast.stmt]) -> Iterator[str]:
    """Names that statements import as a module is loaded: not for type checkers, not in functions.
    `from a import b` gives both a.b and a."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif (
            isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test)
        ) or isinstance(node, ast.Try):
            yield from imports(node.body)


def loaded(root: Path) -> set[str]:
    """Modules that are imported, at module level, by the processes of a plain run."""
    known, seen = modules(root), set()
    waiting = [f"rlcore.{role}" for role in ROLES]
    while waiting:
        name = waiting.pop()
        if name in known and name not in seen:
            seen.add(name)
            waiting.append(name.rpartition(".")[0])
            waiting += imports(ast.parse(known[name].read_text()).body)
    return seen


def named(path: Path) -> set[str]:
    """Attributes that a file reads, and the words of its strings."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    texts = [node.value for node in nodes if isinstance(node, ast.Constant)]
    words = re.findall(r"\w+", " ".join(text for text in texts if isinstance(text, str)))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute)} | {*words}


def counts(root: Path = ROOT) -> dict[str, int]:
    """Each count by its name."""
    known, plain = modules(root), loaded(root)
    lines = {name: path.read_text().count("\n") for name, path in known.items()}
    elsewhere = [p for p in known.values() if "learner/engines" not in p.as_posix()]
    return {
        "files that a plain run imports": len(plain),
        "lines that a plain run imports": sum(lines[name] for name in plain),
        "lines of rlcore": sum(lines.values()),
        "files outside learner/engines that name a setting of DeepSpeed": sum(
            not named(path).isdisjoint(DEEPSPEED) for path in elsewhere
        ),
        **prose.words(root),
        "warnings of prose in docstrings and messages": sum(
            len(prose.of_file(path)) for path in known.values()
        ),
    }


def written(found: dict[str, int], before: dict[str, int], *, up: bool) -> dict[str, int]:
    """The bounds from today's counts, lines and words rounded up; higher ones only if `up`."""
    coarse = ("lines", "words")
    new = {n: -(-v // STEP) * STEP if n.startswith(coarse) else v for n, v in found.items()}
    columns = {n: v for n, v in before.items() if n == COLUMNS}
    return {n: v if up else min(v, before.get(n, v)) for n, v in new.items()} | columns


def main() -> None:
    found = counts()
    before = json.loads(BOUNDS.read_text()) if BOUNDS.exists() else {}
    if "--write" in sys.argv or "--raise" in sys.argv:
        before = written(found, before, up="--raise" in sys.argv)
        BOUNDS.write_text(json.dumps(before, indent=2) + "\n")
    for name, value in found.items():
        print(f"{value:7} {name} (at most {before.get(name)})")


if __name__ == "__main__":
    main()
