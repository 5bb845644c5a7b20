"""Joins the files of changes/ into a section of CHANGELOG.md. changes/README.md says how to write
one.

python docs/changes.py                  print the section of the next release
python docs/changes.py --release 0.3.0  move it into CHANGELOG.md, and delete the files
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KINDS = {"breaking": "Breaking", "added": "Added", "changed": "Changed", "fixed": "Fixed"}
NAME = re.compile(rf"[a-z0-9]+(?:-[a-z0-9]+)*\.({'|'.join(KINDS)})\.md")
COLUMNS, WORDS, LINES = 120, 60, 40  # of a line; of a change; of a release


def fragments(folder: Path) -> dict[str, list[str]]:
    """The changes of each kind, by name. Raises ValueError for another file."""
    found: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for path in sorted(folder.iterdir()):
        if path.name == "README.md":
            continue
        named = NAME.fullmatch(path.name)
        if named is None:
            raise ValueError(
                f"changes/{path.name}: a name is AREA-SUBJECT.KIND.md, {', '.join(KINDS)}"
            )
        text = " ".join(path.read_text(encoding="utf-8").split())
        if not text or len(text.split()) > WORDS:
            raise ValueError(f"changes/{path.name}: one or two sentences, at most {WORDS} words")
        found[named[1]].append(text)
    return found


def section(version: str, found: dict[str, list[str]]) -> str:
    """The Markdown of a release; breaking changes come first."""
    parts = [f"## {version}\n"]
    for kind, heading in KINDS.items():
        if found[kind]:
            lines = [f"### {heading}", ""]
            for text in found[kind]:
                lines += textwrap.wrap(
                    text, COLUMNS, initial_indent="- ", subsequent_indent="  ",
                    break_long_words=False, break_on_hyphens=False,
                )  # fmt: skip
            parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def release(version: str, root: Path = ROOT) -> None:
    """Put the section above the newest release, and delete the files."""
    page, folder = root / "CHANGELOG.md", root / "changes"
    text = page.read_text(encoding="utf-8")
    new = section(version, fragments(folder))
    if new.count("\n") > LINES:
        raise ValueError(f"{version} has {new.count(chr(10))} lines; shorten them to {LINES}")
    head, mark, rest = text.partition("\n## ")
    page.write_text(f"{head}\n{new}{mark}{rest}", encoding="utf-8")
    for path in folder.glob("*.*.md"):
        path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--release", metavar="VERSION")
    version = parser.parse_args().release
    try:
        if version:
            release(version)
        else:
            print(section("Unreleased", fragments(ROOT / "changes")), end="")
    except ValueError as e:
        sys.exit(str(e))


if __name__ == "__main__":
    main()
