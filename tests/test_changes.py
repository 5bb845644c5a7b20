"""CHANGELOG.md is short and for users, and the files of changes/ join into it; a release builds."""

import importlib.util
import re
import tomllib

import pytest
import yaml
from structure import ROOT

_spec = importlib.util.spec_from_file_location("changes_script", ROOT / "docs" / "changes.py")
changes = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(changes)


def releases():
    """(version, its lines) of each release, the newest first."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    return [
        (part.split("\n")[0], part.rstrip().split("\n"))
        for part in re.split(r"^## ", text, flags=re.M)
    ][1:]


def test_the_version_is_the_same_wherever_it_is_said():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert project["version"] == str(cited["version"]) == releases()[0][0]


def test_a_release_has_at_most_forty_lines_and_breaking_changes_first():
    for version, lines in releases():
        assert len(lines) <= changes.LINES, version
        headings = [line[4:] for line in lines if line.startswith("### ")]
        assert headings == [name for name in changes.KINDS.values() if name in headings], version
        assert not re.search(r"benchmarks/|stud(?:y|ies)\b|seeds", "\n".join(lines)), version


def test_the_files_of_the_next_release_are_well_formed():
    assert changes.section("0.0.0", changes.fragments(ROOT / "changes")).startswith("## 0.0.0")


def test_a_release_takes_the_files_in_and_deletes_them(tmp_path):
    folder = tmp_path / "changes"
    folder.mkdir()
    (folder / "README.md").write_text("how")
    (folder / "loop-new.added.md").write_text("A thing\nis new.\n")
    (folder / "keys.breaking.md").write_text("`a` is `b`.\n")
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\nFor users.\n\n## 0.1.0\n\nFirst.\n")
    changes.release("0.2.0", tmp_path)
    assert (tmp_path / "CHANGELOG.md").read_text() == (
        "# Changelog\n\nFor users.\n\n## 0.2.0\n\n### Breaking\n\n- `a` is `b`.\n\n"
        "### Added\n\n- A thing is new.\n\n## 0.1.0\n\nFirst.\n"
    )
    assert [path.name for path in folder.iterdir()] == ["README.md"]


@pytest.mark.parametrize("name", ["thing.md", "Thing.added.md", "thing.new.md", "thing.txt"])
def test_another_name_is_refused(tmp_path, name):
    (tmp_path / name).write_text("A thing is new.")
    with pytest.raises(ValueError, match=re.escape(name)):
        changes.fragments(tmp_path)


def test_a_long_change_is_refused(tmp_path):
    (tmp_path / "a.added.md").write_text("word " * 61)
    with pytest.raises(ValueError, match="at most 60 words"):
        changes.fragments(tmp_path)
