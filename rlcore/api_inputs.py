"""Rows, callables and settings of a Python program, as words and files of a run."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcore.errors import UserError

# Read by the graders, which are processes of their own.
_LOADER = '''"""Written by rlcore.train: loads the callable that it was given as the reward."""

from pathlib import Path

import cloudpickle

reward = cloudpickle.loads(Path(__file__).with_suffix(".pkl").read_bytes())
'''


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
        folder = Path(run_dir or ".") / "inputs"
        if self.objects and (folder.parent / "metrics.jsonl").exists():
            raise UserError(f"run_dir={run_dir} already holds a run: choose another folder.")
        if isinstance(self.data, str | Path):
            found.append(f"data={self.data}")
        elif self.data is not None:
            found.append(f"data={_written(self.data, folder)}")
        if isinstance(self.reward, str):
            found.append(f"reward={self.reward}")
        elif self.reward is not None:
            found.append(f"reward={_pickled(self.reward, folder)}:reward")
        return found


def _written(data: Any, folder: Path) -> Path:
    """Rows as a JSONL file."""
    rows: Sequence[Any] = data.to_dict("records") if hasattr(data, "to_dict") else list(data)
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        raise UserError(
            "data= is not accepted: give a path, a DataFrame, or a list of dictionaries, one a "
            "row, which is not empty."
        )
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "rows.jsonl"
    try:
        lines = [json.dumps(dict(row), ensure_ascii=False, default=_plain) for row in rows]
    except TypeError as error:
        raise UserError(f"data= holds a value that is no JSON: {error}.") from error
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return file


def _plain(value: Any) -> Any:
    """Numbers and arrays of numpy and pandas as Python's."""
    for name in ("tolist", "isoformat"):
        if hasattr(value, name):
            return getattr(value, name)()
    raise TypeError(f"{type(value).__name__} {value!r}")


def _pickled(reward: Callable[..., Any], folder: Path) -> Path:
    """A file that loads the callable, by value if it is of a notebook or script."""
    import cloudpickle

    try:
        inspect.signature(reward)
        module = inspect.getmodule(reward)
        at = str(getattr(module, "__file__", None) or "site-packages")
        if module is not None and module.__name__ != "__main__" and "site-packages" not in at:
            cloudpickle.register_pickle_by_value(module)
        content = cloudpickle.dumps(reward)
    except Exception as error:  # of any kind: it is the user's own object
        raise UserError(f"reward={reward!r} cannot be sent to the graders: {error}.") from error
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "reward.pkl").write_bytes(content)
    file = folder / "reward.py"
    file.write_text(_LOADER, encoding="utf-8")
    return file


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
