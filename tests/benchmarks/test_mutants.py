"""The list of wrong lines fits the code, and random ones are as they are said to be."""

import ast
import tomllib
from pathlib import Path

import pytest

from benchmarks.mutants import mutants

LIST = Path(mutants.__file__).with_suffix(".toml")


@pytest.fixture(scope="module")
def package():
    return mutants.Package()


def test_every_mutant_of_the_list_is_found_once_and_is_python(package):
    entries = tomllib.loads(LIST.read_text())["mutant"]
    found = [package.chosen(entry) for entry in entries]
    for mutant in found:
        ast.parse(mutant.source)
        assert mutant.source != mutant.path.read_text()
    assert len({mutant.name for mutant in found}) == len(entries)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"line": "no such text"}, "'no such text' stands 0 times in page_budget"),
        ({"line": "pages"}, "'pages' stands \\d+ times in page_budget"),
        ({"tests": ["test_none.py"]}, "there are 0 test files of the name test_none.py"),
    ],
)
def test_a_mutant_that_is_not_found_once_is_refused(package, change, message):
    entry = {"in": "page_budget", "line": ".ceil(", "becomes": ".floor(", "tests": []}
    assert ".floor(" in package.chosen(entry).source
    with pytest.raises(ValueError, match=message):
        package.chosen(entry | change)


def test_mutants_that_never_ran_come_before_those_whose_code_has_changed(package):
    entries = tomllib.loads(LIST.read_text())["mutant"][:4]
    same, changed, new, other = map(package.chosen, entries)
    rows = {same.name: {"digest": same.digest}, changed.name: {"digest": "of before"}}
    assert mutants.due([same, changed, new, other], rows) == [new, other, changed]


SOURCE = """\
LIMIT = 3


def f(a, b):
    if a < b:
        log(a)
    raise ValueError(f"{a + 1}")


class C:
    def m(self):
        with self:
            def inner():
                return 2
        return 1 - self.x
"""


def test_random_changes_are_of_functions_and_leave_messages_alone(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(SOURCE)
    changed = {
        (place, SOURCE[begin:end], new) for place, begin, end, new in mutants.Text(path).changes()
    }
    assert changed == {
        ("f", "a < b", "not (a < b)"),
        ("f", "<", "<="),
        ("f", "log(a)", "pass"),
        ("C.m.inner", "2", "3"),
        ("C.m", "-", "+"),
        ("C.m", "1", "2"),
    }


def test_a_seed_gives_the_same_random_mutants_with_tests_of_their_package(package):
    drawn = [list(package.random(["objectives", "buffer"], 10, seed)) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    for mutant in drawn[0]:
        ast.parse(mutant.source)
        name = mutant.path.relative_to(mutants.ROOT).parts[1]
        assert mutant.tests and all(test.startswith(f"tests/{name}/") for test in mutant.tests)
