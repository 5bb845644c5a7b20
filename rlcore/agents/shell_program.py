"""Programs of any language that call the model as an endpoint: a shell command, run in its own
folder for each episode."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlcore.errors import UserError
from rlcore.types import Item

KEY = "environment.args.command"
OUTPUT, RESULT = "output.txt", "result.json"
SHOWN = 200  # last characters of the output that a failed score shows
MAX_OUTPUT = 1 << 20  # bytes of the output that are read back
MAX_KEPT = 20  # folders of failed episodes, by process of environments
ROOT = "RLCORE_PROGRAMS"  # environment variable: where the folders of a server's children are


def shell_program(command: str | None, keep: str | None = None) -> Callable[..., Any]:
    """A program for `environments.endpoint` that runs a command by sh. `keep`: a folder that takes
    the working folders of failed episodes, with their output.

    The command finds the endpoint in OPENAI_BASE_URL and OPENAI_API_KEY, the problem on its
    standard input and in item.json (prompt_id, question, answer, meta), and a seed in RLCORE_SEED.
    Its result is what it writes to the file that RLCORE_RESULT names: a number, the reward;
    {"reward": .., "parts": {..}}; or {"answer": ..}, which the task's grader judges. Without the
    file, the grader judges the model's last answer.

    Raises UserError for a command that is not text.
    """
    if not isinstance(command, str) or not command.strip():
        raise UserError(f"{KEY}={command!r} is not a command: give one line for sh.")

    def run(item: Item, base_url: str, api_key: str, model: str, seed: int) -> Any:
        folder = working_folder()
        given = {
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_BASE": base_url,
            "OPENAI_API_KEY": api_key,
            "OPENAI_MODEL": model,
            "RLCORE_SEED": str(seed),
            "RLCORE_RESULT": str(folder / RESULT),
        }
        try:
            result = _run(command, folder, given, item)
        except Exception:
            put_away(folder, keep)
            raise
        shutil.rmtree(folder, ignore_errors=True)
        return result

    return run


def _run(command: str, folder: Path, given: dict[str, str], item: Item) -> Any:
    names = ("prompt_id", "question", "answer")
    told = {name: getattr(item, name) for name in names} | {"meta": dict(item.meta)}
    (folder / "item.json").write_text(json.dumps(told, default=str), encoding="utf-8")
    with open(folder / OUTPUT, "wb") as output, open(folder / "item.json", "rb") as asked:
        done = subprocess.run(
            ["sh", "-c", command],
            cwd=folder,
            env={**os.environ, **given},
            stdin=asked,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"{KEY} ended with status {done.returncode}: {_tail(folder / OUTPUT)}")
    return _result(folder / RESULT)


def _tail(output: Path) -> str:
    with open(output, "rb") as file:
        file.seek(max(0, output.stat().st_size - 4 * SHOWN))
        text = file.read(4 * SHOWN).decode(errors="replace")
    return " ".join(text.split())[-SHOWN:] or "it printed nothing"


def _result(file: Path) -> Any:
    """Return the result of a program from the file that it wrote. Raises ValueError."""
    if not file.is_file():
        return None
    result = json.loads(file.read_bytes()[:MAX_OUTPUT])
    if not isinstance(result, dict):
        return float(result)
    if set(result) == {"answer"}:
        return str(result["answer"])
    if "reward" not in result or not set(result) <= {"reward", "parts"}:
        raise ValueError(f"{RESULT} holds {', '.join(result)}, and not reward and parts, or answer")
    return float(result["reward"]), result.get("parts", {})


def working_folder() -> Path:
    """A new folder of this process's, which its server removes when it ends."""
    root = os.environ.get(ROOT)
    own = Path(root or tempfile.gettempdir()) / f"{os.getpid()}"
    own.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="episode-", dir=own))


def put_away(folder: Path, keep: str | None) -> None:
    """Move the folder of a failed episode to `keep`, unless there are enough of them; else remove
    it."""
    target = None if keep is None else Path(keep)
    with contextlib.suppress(OSError):  # a full disk costs what was kept, and not the episode
        if target is not None:
            target.mkdir(parents=True, exist_ok=True)
            if len(list(target.iterdir())) < MAX_KEPT:
                shutil.move(folder, target / f"{folder.parent.name}-{folder.name}")
                return
        shutil.rmtree(folder, ignore_errors=True)


def put_away_of(pid: int, keep: str | None) -> None:
    """Put away what a process that was ended has left in its folder."""
    own = Path(os.environ[ROOT]) / f"{pid}"
    for folder in own.glob("episode-*"):
        put_away(folder, keep)
    shutil.rmtree(own, ignore_errors=True)
