"""Attributes of other libraries are replaced by name: one that is gone is refused, and all that
rlcore replaces are there in the installed versions."""

import ast
import sys
import types
import warnings
from importlib import import_module
from pathlib import Path

import pytest

from rlcore.patching import Patch

RLCORE = Path(__file__).resolve().parents[1] / "rlcore"
LISTS = (
    "rlcore.rollout.engines.vllm.patches",
    "rlcore.learner.engines.deepspeed_patches",
    "rlcore.cluster.ray_cluster",
)


@pytest.fixture
def library(monkeypatch):
    """An installed package of version 1.4.2 with one attribute."""
    module = types.ModuleType("some_library")
    module.__version__ = "1.4.2"
    module.kept = 1
    monkeypatch.setitem(sys.modules, "some_library", module)
    return module


def patch(name="kept", *, owner="some_library", known=("1.4.",)):
    return Patch(owner, name, "for a test", known)


@pytest.mark.parametrize(
    ("given", "place"),
    [
        (patch("gone"), "some_library.gone"),
        (patch(owner="some_library:Gone"), "some_library:Gone"),
        (patch(owner="some_library.gone"), "some_library.gone"),
    ],
)
def test_a_missing_name_is_refused_with_library_and_version(library, given, place):
    with pytest.raises(RuntimeError) as raised:
        given.replace(2)
    assert str(raised.value) == (
        f"some_library 1.4.2 has no {place}, which rlcore replaces for a test: "
        "install some_library 1.4.*"
    )
    assert not hasattr(library, "gone")


def test_an_untested_version_is_reported_in_one_sentence(library):
    with pytest.warns(UserWarning) as seen:
        assert patch(known=("1.2.", "1.3.")).replace(2) == 1
    assert library.kept == 2
    assert [str(w.message) for w in seen] == [
        "rlcore replaces some_library.kept for a test, which was tried on some_library "
        "1.2. and 1.3. and not on 1.4.2"
    ]


def test_a_known_version_is_not_reported(library):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        patch().replace(2)


def test_one_object_is_changed_alone_and_refused_if_it_lacks_the_name(library):
    one = types.SimpleNamespace(kept=5)
    assert patch().replace(2, of=one) == 5
    assert (one.kept, library.kept) == (2, 1)
    with pytest.raises(RuntimeError, match=r"has no some_library\.kept"):
        patch().replace(2, of=types.SimpleNamespace())


def test_a_replacement_for_a_while_ends_with_an_error_too(library):
    with pytest.raises(ZeroDivisionError), patch().replaced(2):
        assert library.kept == 2
        raise ZeroDivisionError
    assert library.kept == 1


def _has(owner, name):
    """An attribute of the owner, or one that its constructor sets on single objects."""
    return hasattr(owner, name) or name in owner.__init__.__code__.co_names


@pytest.mark.parametrize("module", LISTS)
def test_the_installed_libraries_have_every_name_that_is_replaced(module):
    patches = import_module(module).PATCHES
    assert patches
    for each in patches:
        pytest.importorskip(each.owner.partition(":")[0].partition(".")[0])
        assert _has(each.find(), each.name), each
        assert each.version().startswith(each.known_versions), each


@pytest.mark.parametrize("module", LISTS)
def test_a_list_has_every_patch_of_its_file(module):
    file = import_module(module)
    made = [value for value in vars(file).values() if isinstance(value, Patch)]
    assert made == list(file.PATCHES)


def _imported(tree):
    """Names that a file imports from other libraries than rlcore."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((a.asname or a.name).partition(".")[0] for a in node.names)
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("rlcore"):
            yield from (a.asname or a.name for a in node.names)


def _assigned(tree):
    """The name in every `name.x.y = ...`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            base = node.value
            while isinstance(base, ast.Attribute):
                base = base.value
            if isinstance(base, ast.Name):
                yield base.id


def test_no_file_assigns_to_what_it_imports():
    found = set()
    for path in RLCORE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        imported = set(_imported(tree))
        found |= {(path.name, name) for name in _assigned(tree) if name in imported}
    # `mpmath.mp.dps` and `tempfile.tempdir`, which their documentation says to set; `unittest.main`
    # and `builtins.help` are replaced in the process of a graded program alone
    assert found == {
        ("math_numbers.py", "mp"),
        ("server.py", "tempfile"),
        ("layouts.py", "unittest"),
        ("program.py", "builtins"),
    }
