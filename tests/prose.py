"""Turns of phrase that an English reader has to decode, and long sentences: warnings, not failures.

    python tests/prose.py [FILE ...]     all warnings, of pages or of docstrings and messages

Without files: a count for each page, docstrings and messages together, and the words of the pages.
`make lint` prints the warnings of pages that people write, which have none; `tests/test_prose.py`
holds that, and `tests/growth.json` bounds the words and the warnings of rlcore/.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORDS = 30  # of a sentence
# pages that scripts write whole, and those whose tables have sentences from the code
MIXED = ("metrics", "models")
GENERATED = ("combinations", "configuration", "corrections-grid", "scorers", "status")
# pattern -> what to write instead
PHRASES = {
    r"^(?:Of|By|From) [^.,:]{1,60}, (?!and |or )": "name the subject first",
    r"\bthose of\b": "repeat the noun",
    r"\bthat of\b(?! course)": "repeat the noun",
    r"(?<![Tt]here )\bis no (?!longer|more|less|point|other|one\b)": "is not a",
    r"(?<![Tt]here )\bare no (?!longer|more|less|other)": "are not",
    r"\bof (?:its|their|one's) own\b": "its own, another",
    r"\bof your own\b": "your own",
    r"\bbeside\b": "with, next to",
    r"\bthe same of\b": "the same for",
    r"\b(?:a|your|the) words? of (?:the|a) (?:command|run)\b": "arguments",
    r"\bthat waits?\b": "idle, waiting",
    r"\balike\b": "in the same way",
}
TABLE = re.compile(r"\S   +\S")  # columns in a docstring
FOUND = {re.compile(pattern, re.MULTILINE): instead for pattern, instead in PHRASES.items()}


def plain(markdown: str) -> str:
    """The sentences of a page: no code, tables, headings, links' addresses or comments."""
    text = re.sub(r"^```.*?^```$", "\n", markdown, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"^(?:\||#|    ).*$", "", text, flags=re.MULTILINE)
    return re.sub(r"\*\*|`", "", text)


def sentences(text: str) -> Iterator[str]:
    """Sentences of paragraphs and of items of a list."""
    for paragraph in re.split(r"\n\s*\n|^ *(?:[-*]|\d+\.) ", text, flags=re.MULTILINE):
        flowing = " ".join(paragraph.split())
        yield from (s for s in re.split(r"(?<=[.!?]) ", flowing) if s)


def warnings(text: str) -> Iterator[str]:
    """What to mend in plain text, each with its sentence's beginning."""
    for sentence in sentences(text):
        for pattern, instead in FOUND.items():
            for found in pattern.findall(re.sub(r"`[^`]*`", "`code`", sentence)):
                yield f"{found!r} ({instead}): {sentence[:70]}"
        count = len(re.findall(r"\S*[a-zA-Z]{2}\S*", sentence))  # not the terms of a formula
        if count > WORDS:
            yield f"{count} words: {sentence[:70]}"


def texts(source: str) -> Iterator[str]:
    """Docstrings without their tables, and one-line string constants of at least four words, of
    Python source; longer constants are data or programs."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = list(ast.walk(ast.parse(source)))
    owners = [node for node in nodes if isinstance(node, kinds) and ast.get_docstring(node)]
    heads = {id(node.body[0].value) for node in owners}
    found = [ast.get_docstring(node) for node in owners]
    constants = [n for n in nodes if isinstance(n, ast.Constant) and id(n) not in heads]
    found += [n.value for n in constants if isinstance(n.value, str) and "\n" not in n.value]
    for text in found:
        if len(text.split()) >= 4:
            yield "\n\n".join(p for p in text.split("\n\n") if not TABLE.search(p))


def of_file(path: Path) -> list[str]:
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return list(warnings(plain(source)))
    return [warning for text in texts(source) for warning in warnings(text)]


def pages(root: Path = ROOT) -> list[Path]:
    """README, CHANGELOG and the pages of docs/."""
    return [root / "README.md", root / "CHANGELOG.md", *sorted((root / "docs").rglob("*.md"))]


def by_hand(page: Path) -> str:
    """The text of a page that no script writes."""
    if page.stem in GENERATED:
        return ""
    text = page.read_text(encoding="utf-8")
    return re.sub(r"<!-- [^>]+ -->\n.*?<!-- [^>]*\bend\b[^>]* -->", "", text, flags=re.DOTALL)


def words(root: Path = ROOT) -> dict[str, int]:
    """Words between spaces, as `wc -w` counts them, of all pages and of what is written by hand."""
    found = [page for page in pages(root) if page.exists()]
    return {
        "words of the pages": sum(len(page.read_text().split()) for page in found),
        "words of the pages by hand": sum(len(by_hand(page).split()) for page in found),
    }


def finished() -> list[Path]:
    """The pages that have no warning, and keep none: all that people write."""
    return [page for page in pages() if page.stem not in (*GENERATED, *MIXED)]


def main() -> None:
    files = [Path(word) for word in sys.argv[1:]]
    for path in files:
        for warning in of_file(path):
            print(f"warning: {path}: {warning}")
    if files:
        return
    pages = sorted((ROOT / "docs").rglob("*.md"))
    counts = {p.relative_to(ROOT): len(of_file(p)) for p in (ROOT / "README.md", *pages)}
    counts[Path("rlcore")] = sum(len(of_file(p)) for p in (ROOT / "rlcore").rglob("*.py"))
    for name, count in sorted(counts.items(), key=lambda item: -item[1]):
        print(f"{count:5} {name}")
    print(f"{sum(counts.values()):5} in all")
    for name, count in words().items():
        print(f"{count:5} {name}")


if __name__ == "__main__":
    main()
