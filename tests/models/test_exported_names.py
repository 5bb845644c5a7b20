"""The names that transformers' models export are kept between processes, and read again once a file
has changed."""

import subprocess
import sys
from pathlib import Path

import pytest

from rlcore.models.exported_names import kept


@pytest.fixture
def models(tmp_path):
    """A folder of models with one file."""
    folder = tmp_path / "transformers" / "models"
    (folder / "own").mkdir(parents=True)
    (folder / "own" / "modeling_own.py").write_text("__all__ = ['Own']\n")
    return folder


class Scan:
    """Finds names by the files, and counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, path):
        self.calls += 1
        found = {file.stem: {file.read_text()} for file in Path(path).rglob("*.py")}
        return {"own": {frozenset({"torch"}): found}}


def test_the_files_are_read_once_until_one_of_them_changes(models, monkeypatch):
    scan = Scan()
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    first = kept(scan)(str(models))
    # as transformers calls it: by folder, and by the file in it
    (models / "__init__.py").write_text("")
    changed = kept(scan)(models / "__init__.py")
    assert scan.calls == 2 and "__init__" in str(changed) and "__init__" not in str(first)
    assert kept(scan)(models) == changed and scan.calls == 2
    (models / "own" / "modeling_own.py").write_text("__all__ = ['Own', 'Other']\n")
    assert "Other" in str(kept(scan)(models)) and scan.calls == 3


def test_a_damaged_file_is_no_result_and_nothing_is_kept_where_python_keeps_nothing(
    models, monkeypatch
):
    scan = Scan()
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    kept(scan)(models)
    assert not (models / "__pycache__").exists()
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    names = kept(scan)(models)
    (file,) = (models / "__pycache__").iterdir()
    for damaged in (b"", file.read_bytes()[:-5], b"\x00" * 9):
        file.write_bytes(damaged)
        assert kept(scan)(models) == names
    assert scan.calls == 5


CHECK = """
import sys, rlcore.models
from pathlib import Path
import transformers
from transformers.utils import import_utils
sys.pycache_prefix, sys.dont_write_bytecode = sys.argv[1], False
root = Path(transformers.__file__).parent / "models"
found = import_utils.create_import_structure_from_path(root)
(kept,) = Path(sys.argv[1]).rglob("exported.*")
assert import_utils.create_import_structure_from_path(root) == found
names = import_utils.define_import_structure(root, prefix="models")
assert "Qwen3ForCausalLM" in names[frozenset({"torch"})]["models.qwen3.modeling_qwen3"]
print("kept")
"""


@pytest.mark.processes
def test_transformers_names_come_from_what_was_kept(tmp_path):
    command = [sys.executable, "-c", CHECK, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "kept\n", done.stderr
