"""Runs the documented commands: every `bash run` block of README.md and of the pages of docs/.

    python tests/run_documented.py [PAGE ...]      (make docs-commands)

Each bash block has a tag. `accept` blocks are only checked by tests/test_readme.py and
tests/test_documented_starts.py: they need a GPU, a cluster, data of the reader or hours. `run`
blocks also run here, one after the other, in one folder that has the files of their page (a block
of Python after `NAME.py`, or that begins with `# NAME.py`) and the reader's data and small model in
the place of MODEL. A block that stands on two pages runs once. `make` works on this checkout; runs
that `rlcore` starts are shortened to STEPS optimizer steps, runs that `make` starts are not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import string
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TAGS = ("run", "accept")
BLOCK = re.compile(r"^```bash(?: (\w*))?\n(.*?)^```", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"`(\w+\.py)`[,:]\s(?:(?!```).)*?```python\n(.*?)```", re.DOTALL)
# a paragraph that begins with the name, then the block
BEGUN = re.compile(r"^`(\w+\.py)` (?:(?!\n\n).)*\n\n```python\n(.*?)```", re.DOTALL | re.MULTILINE)
NAMED = re.compile(r"```python\n(# (\w+\.py)\n.*?)```", re.DOTALL)  # by its first line
STEPS = 4
MODEL = "/models/Qwen3-1.7B"  # of the reader
ROWS = [{"question": f"{n}+1=", "answer": str(n + 1)} for n in range(200)]
BLOCK_S = 3 * 3600  # the longest is `make demo`, 10 to 22 minutes on two quiet cores
PREAMBLE = f"""
set -euo pipefail
export PATH={shlex.quote(str(ROOT / ".venv" / "bin"))}:"$PATH"
make() {{ command make -C {shlex.quote(str(ROOT))} "$@" RUN_DIR="$PWD/runs/$1-DATE"; }}
rlcore() {{
  case "$1" in
    train|sweep) command rlcore "$@" schedule.steps={STEPS} ;;
    *) command rlcore "$@" ;;
  esac
}}
"""


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of bash. Example: Block("docs/index.md", "run", "make quickstart\\n")"""

    page: str
    tag: str  # one of TAGS; "" without one
    text: str

    def lines(self) -> list[str]:
        """Command lines: continued lines joined, comments dropped."""
        joined = self.text.replace("\\\n", " ").splitlines()
        return [shlex.join(words) for line in joined if (words := shlex.split(line, comments=True))]


def pages() -> list[str]:
    """README.md and the pages of docs/, relative to the repository."""
    return ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]


def blocks(page: str) -> list[Block]:
    """The blocks of bash on a page, in order."""
    return [Block(page, tag, text) for tag, text in BLOCK.findall((ROOT / page).read_text())]


def files(page: str) -> dict[str, str]:
    """Files that a page has its reader write: name -> content."""
    text = (ROOT / page).read_text()
    found = dict(BEGUN.findall(text)) | dict(FILE.findall(text))
    return found | {name: content for content, name in NAMED.findall(text)}


def make_reader_files(folder: Path) -> None:
    """Write the data and the model that a reader of README.md has."""
    from rlcore.models.fresh import build_fresh_model
    from rlcore.models.specs import FreshModelSpec

    rows = "".join(json.dumps(row) + "\n" for row in ROWS)
    (folder / "train.jsonl").write_text(rows)
    size = FreshModelSpec(hidden_size=64, layers=2, heads=4, kv_heads=2, head_dim=32)
    build_fresh_model(folder / "model", string.printable, size, seed=0, max_len=4096)


def run(block: Block, folder: Path) -> int:
    """The exit code of a block's commands in `folder`; what they started is ended."""
    text = PREAMBLE + block.text.replace(MODEL, "./model")
    process = subprocess.Popen(["bash", "-c", text], cwd=folder, start_new_session=True)
    try:
        return process.wait(BLOCK_S)
    except subprocess.TimeoutExpired:
        return 124
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="default: all")
    chosen = parser.parse_args().pages or pages()
    done: set[tuple[str, ...]] = set()
    failed = []
    with tempfile.TemporaryDirectory(prefix="rlcore-documented-") as name:
        folder = Path(name)
        make_reader_files(folder)
        for page in chosen:
            for file, content in files(page).items():
                (folder / file).write_text(content)
            for block in blocks(page):
                commands = tuple(block.lines())
                if block.tag != "run" or commands in done:
                    continue
                done.add(commands)
                print(f"== {page}: {commands[0]}", flush=True)
                begun = time.monotonic()
                code = run(block, folder)
                print(f"== exit code {code} after {time.monotonic() - begun:.0f} s", flush=True)
                failed += [f"{page}: {commands[0]} (exit code {code})"] if code else []
    print(f"{len(done)} blocks ran, {len(failed)} failed", *failed, sep="\n  ")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
