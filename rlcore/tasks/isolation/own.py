"""`task.args.isolate` of any task: its grader in isolated processes, and advice on who needs it."""

from __future__ import annotations

import ast
import inspect
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcore.graders.sandbox.confinement import LAYERS, available
from rlcore.interfaces import Split, Task
from rlcore.registry import load_object
from rlcore.tasks.arguments import ArgumentError
from rlcore.tasks.grades import wants_tokens
from rlcore.tasks.isolation import AnswerLimits, IsolatedGrader, IsolatedVerdict
from rlcore.types import Grade, Item

CHOICES = (False, True, "programs")
TIMEOUT_S, MEMORY_MIB = 5.0, 1024
TRIED = 2  # problems on which an isolated grader is tried
DANGEROUS = frozenset(
    {"eval", "exec", "sympy", "parse_expr", "parse_latex", "sympify", "lambdify", "literal_eval"}
    | {"pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "unsafe_load", "runpy"}
    | {"subprocess", "popen", "system", "import_module", "__import__", "numexpr"}
)


class GraderError(RuntimeError):
    """An isolated grader raised; the message is its error's."""


def isolate(task: Task, name: str, args: Mapping[str, Any], how: object) -> None:
    """Have a task's answers graded in isolated processes. `how`: True, or "programs" for graders
    that run programs of a model on purpose; False leaves the task as it is. Raises ArgumentError
    for another value, for a machine that cannot confine, and for a grader that cannot work so."""
    if how not in CHOICES:
        raise ArgumentError("isolate", how, "is not accepted: give true, false or programs.")
    if how is False:
        return
    if hasattr(task, "judge"):
        raise ArgumentError("isolate", how, f"is not needed: the task {name} isolates its answers.")
    missing = [layer for layer in LAYERS if layer not in available()]
    if missing:
        raise ArgumentError(
            "isolate",
            how,
            f"needs {', '.join(missing)}, which this machine does not have: grade on another one, "
            "or leave isolate out and trust the answers.",
        )
    rule = "programs" if how == "programs" else "arithmetic"
    limits = AnswerLimits(TIMEOUT_S, MEMORY_MIB, rule, available())
    grader = IsolatedGrader(name, args, task.name, limits)
    _try(task, grader, how)

    def grade(item: Item, response: str) -> Grade:
        return _read(grader.grade(item.prompt_id, response))

    def grade_tokens(item: Item, response: str, tokens: Sequence[str] = ()) -> Grade:
        return _read(grader.grade(item.prompt_id, response, tokens))

    setattr(task, "grade", grade_tokens if wants_tokens(task.grade) else grade)  # noqa: B010


def _read(verdict: IsolatedVerdict) -> Grade:
    """An answer that exceeds a limit, or would have been executed, is wrong: its grader has been
    tried on known answers. Raises GraderError for a grader that raised."""
    if verdict.grade is not None:
        return verdict.grade
    if verdict.status == "raised":
        raise GraderError(verdict.why)
    return Grade(0.0, {"correct": 0.0, verdict.status: 1.0})


def _try(task: Task, grader: IsolatedGrader, how: object) -> None:
    """Raise ArgumentError for a grader that isolation keeps from judging known answers, or that
    lets an answer write a file."""
    split: Split = "train" if task.size("train") != 0 else "heldout"
    size = task.size(split)
    with tempfile.TemporaryDirectory(prefix="rlcore-canary-") as folder:
        canary = os.path.join(folder, "written")
        for index in range(TRIED if size is None else min(TRIED, size)):
            item = task.item(split, index)
            known = task.worked_answer(item) or item.answer
            verdict = grader.grade(item.prompt_id, known)
            denied = verdict.why.startswith(("PermissionError", "BlockingIOError", "ModuleNot"))
            if verdict.status in ("executed", "stopped") or denied:
                executes = verdict.why.startswith("executes")
                remedy = "; isolate=programs lets it run programs" if executes else ""
                raise ArgumentError(
                    "isolate",
                    how,
                    f"keeps the grader from judging the known answer of {item.prompt_id}: "
                    f"{verdict.why}{remedy}.",
                )
            grader.grade(item.prompt_id, f"open({canary!r}, 'w')")
            if os.path.exists(canary):
                raise ArgumentError("isolate", how, "does not hold: an answer wrote a file.")


# -- advice ----------------------------------------------------------------------------------------


def advice(name: str, args: Mapping[str, Any]) -> list[str]:
    """Lines for `rlcore try` on graders of a user, or of another package, that are not isolated and
    whose source names what may execute an answer. `name`, `args`: of a task that was built."""
    if args.get("isolate"):
        return []
    given = args.get("grader") or []
    sources = [given] if isinstance(given, str) else list(given)
    lines = []
    for source in [*sources, *([name] if ":" in name else [])]:
        found = sorted(set().union(*map(named, _sources(source))) & DANGEROUS)
        if found:
            lines.append(
                f"{source} names {', '.join(found)}, which may execute what the model writes: "
                "task.args.isolate=true grades each answer in a confined process"
            )
    return lines


def _sources(grader: str) -> Iterator[str]:
    """The sources of the file that a grader "package.module:name" or "path/to/file.py:name" is
    from, and of the files of its folder that it imports."""
    code = getattr(inspect.unwrap(load_object(grader)), "__code__", None)
    module = grader.rpartition(":")[0]
    if code is not None:
        path: str | None = code.co_filename
    elif module.endswith(".py"):
        path = module
    else:
        path = getattr(sys.modules.get(module), "__file__", None)
    left = [Path(path).expanduser().absolute()] if path else []
    seen = set(left)
    while left:
        file = left.pop()
        if file.suffix == ".py" and file.is_file():
            source = file.read_text()
            yield source
            beside = {file.parent / f"{name}.py" for name in named(source)} - seen
            seen |= beside
            left += beside


def named(source: str) -> set[str]:
    """Names that a source reads or imports; attributes count, `eval` and `exec` of modules alone,
    since models and databases have such methods, too."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return set()
    found: set[str] = set()
    modules = {
        alias.asname or alias.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            of_module = isinstance(node.value, ast.Name) and node.value.id in modules
            if of_module or node.attr not in ("eval", "exec"):
                found.add(node.attr)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found.update((getattr(node, "module", None) or "").split("."))
            found |= {part for alias in node.names for part in alias.name.split(".")}
    return found
