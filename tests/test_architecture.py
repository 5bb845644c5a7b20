"""The pages of docs/ follow the tree: generated parts are current, the navigation is whole, and
docs/ARCHITECTURE.md names files, functions and classes that exist.

That page writes them in backticks: `path/file.py`, `path/file.py: name`, `path/file.py: A.method`
(several names with commas between them), or `folder/`. Paths start at rlcore/ or at the repository.
"""

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path

import structure
import yaml
from structure import ROOT

PAGE = ROOT / "docs" / "ARCHITECTURE.md"
REFERENCE = re.compile(r"([\w/.-]+(?:\.py|\.yaml|\.toml|\.md|/))(?:: ([\w., ]+))?")


def references():
    """(path, names) of everything in backticks that looks like a reference."""
    text = re.sub(r"```.*?```", "", PAGE.read_text(), flags=re.DOTALL)
    for code in re.findall(r"`([^`]+)`", text):
        match = REFERENCE.fullmatch(re.sub(r"\s+", " ", code))
        # upper-case letters are what a reader fills in: configs/task/NAME.yaml
        if match and not re.search(r"NAME|DIR", code):
            yield match[1], [name.strip() for name in (match[2] or "").split(",") if name]


def located(path):
    return next((at for at in (ROOT / "rlcore" / path, ROOT / path) if at.exists()), None)


@cache
def names_of(path: Path):
    return structure.definitions(ast.parse(path.read_text()))


def test_the_files_named_exist():
    found = [path for path, _ in references()]
    assert len(found) > 40  # the page is parsed at all
    assert [path for path in found if located(path) is None] == []


def test_the_functions_and_classes_named_exist():
    found = [(located(path), name) for path, names in references() for name in names]
    assert len(found) > 40
    missing = [(str(path), name) for path, name in found if path and name not in names_of(path)]
    assert missing == []


def test_every_package_has_its_row():
    packages = {p.parent.name for p in (ROOT / "rlcore").glob("*/__init__.py")}
    named = {path.rstrip("/") for path, _ in references()}
    assert packages - named == set()


def test_the_generated_pages_are_current():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for path, content in module.pages().items():
        assert path.read_text() == content(), f"run python docs/generate.py: {path.name} differs"


def navigation(node):
    if isinstance(node, str):
        return [node]
    children = node.values() if isinstance(node, dict) else node
    return [page for child in children for page in navigation(child)]


def test_every_page_is_in_the_navigation_once():
    docs = ROOT / "docs"
    pages = [str(p.relative_to(docs)) for p in docs.rglob("*.md")]
    in_mkdocs = navigation(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(in_mkdocs) == sorted(pages)
