"""Rows, callables and settings of a Python program, as words and files of a run."""

from __future__ import annotations

import ast
import contextlib
import dis
import inspect
import json
import re
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

from rlcore.errors import Faults, UserError
from rlcore.registry import load_object


@dataclass(frozen=True, slots=True)
class Inputs:
    """Arguments of `rlcore.train` besides words."""

    model: str | Path | None
    data: Any  # a path, rows, or a DataFrame
    reward: str | Callable[..., Any] | None

    @property
    def objects(self) -> bool:
        """True if something has to be written to files."""
        return callable(self.reward) or not isinstance(self.data, str | Path | None)

    def words(self, run_dir: str | Path | None) -> list[str]:
        """The words that name them. Objects are written to run_dir/inputs. Raises UserError."""
        found = [] if self.model is None else [f"model={self.model}"]
        folder, faults = Path(run_dir or ".") / "inputs", Faults()
        if self.objects and (folder.parent / "metrics.jsonl").exists():
            raise UserError(f"run_dir={run_dir} already holds a run: choose another folder.")
        if self.objects:
            folder = _made(folder)
        if isinstance(self.data, str | Path):
            found.append(f"data={self.data}")
        elif self.data is not None:
            found.append(f"data={faults.of(_written, self.data, folder)}")
        if isinstance(self.reward, str):
            found.append(f"reward={self.reward}")
        elif self.reward is not None:
            found.append(f"reward={faults.of(_source_file, self.reward, folder)}")
        faults.end()
        return found


def _made(folder: Path) -> Path:
    """The folder, or a temporary one in the place of one that cannot be made: the checks of the run
    name it, with other faults."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="rlcore-inputs-"))
    return folder


def _written(data: Any, folder: Path) -> Path:
    """Rows as a JSONL file."""
    rows: Sequence[Any] = data.to_dict("records") if hasattr(data, "to_dict") else list(data)
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        raise UserError(
            "data= is not accepted: give a path, a DataFrame, or a list of dictionaries, one a "
            "row, which is not empty."
        )
    file = folder / "rows.jsonl"
    try:
        lines = [json.dumps(dict(row), ensure_ascii=False, default=_plain) for row in rows]
    except TypeError as error:
        raise UserError(f"data= holds a value that is not JSON: {error}.") from error
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return file


def _plain(value: Any) -> Any:
    """Numbers and arrays of numpy and pandas as Python's."""
    for name in ("tolist", "isoformat"):
        if hasattr(value, name):
            return getattr(value, name)()
    raise TypeError(f"{type(value).__name__} {value!r}")


def _source_file(reward: Callable[..., Any], folder: Path) -> str:
    """ "file.py:name" with the source of a function and what it uses, for the graders to import;
    nothing is pickled. Raises UserError for a callable without such a source."""
    name = getattr(reward, "__qualname__", "")
    if not inspect.isfunction(reward) or not name.isidentifier() or reward.__code__.co_freevars:
        raise UserError(
            f"reward={name or reward!r} cannot be sent to the graders: give a function that is "
            "defined with def outside of other functions and classes, or FILE.py:FUNCTION."
        )
    try:
        file = Path(inspect.getsourcefile(reward) or "")
        if file.is_file():
            text, _ = load_object("rlcore.extras.foreign_rewards:source_of")(
                file.read_text(encoding="utf-8"), [name]
            )
        else:  # of a notebook
            text = "\n\n".join(_sources(reward, set()))
    except (OSError, TypeError) as error:
        raise UserError(
            f"reward={name} has no source that can be read ({error}): give FILE.py:FUNCTION."
        ) from error
    target = folder / "reward.py"
    target.write_text(text, encoding="utf-8")
    return f"{target}:{name}"


def _sources(function: Callable[..., Any], done: set[str]) -> Iterator[str]:
    """The source of a function, after what it uses of its module: modules, functions and classes,
    constants."""
    for name in _names(inspect.unwrap(function).__code__):
        found = function.__globals__.get(name)
        if found is None or name in done:
            continue
        done.add(name)
        if inspect.ismodule(found):
            yield f"import {found.__name__} as {name}"
        elif inspect.isfunction(found) and found.__module__ == function.__module__:
            yield from _sources(found, done)
        elif inspect.isclass(found) and found.__module__ == function.__module__:
            yield textwrap.dedent(inspect.getsource(found))
        elif getattr(found, "__module__", None) and hasattr(found, "__name__"):
            yield f"from {found.__module__} import {found.__name__} as {name}"
        else:
            yield f"{name} = {_constant(name, found)}"
    yield textwrap.dedent(inspect.getsource(function))


def _names(code: CodeType) -> Iterator[str]:
    """Global names that a function's code reads, its comprehensions and lambdas included."""
    yield from (i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL")
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _constant(name: str, value: Any) -> str:
    """The source of a value. Raises UserError where none gives it again."""
    if isinstance(value, re.Pattern):
        return f"__import__('re').compile({value.pattern!r}, {value.flags})"
    with contextlib.suppress(ValueError, SyntaxError):
        if ast.literal_eval(repr(value)) == value:
            return repr(value)
    raise UserError(
        f"reward= uses {name}, a {type(value).__name__} that cannot be written to a file: make it "
        "inside the function, or give FILE.py:FUNCTION."
    )


def as_words(settings: Sequence[str] | Mapping[str, Any]) -> list[str]:
    """Settings by key, nested or not, as words of the command line."""
    if not isinstance(settings, Mapping):
        return list(settings)
    return [f"{key}={_word(value)}" for key, value in _flat(settings)]


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
