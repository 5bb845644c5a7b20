"""Modules that are imported when something of them is first used."""

import importlib.util
import sys

import pytest

from rlcore.lazy import Deferred, defer


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A package that notes when it is imported, with a module inside."""
    folder = tmp_path / "library_of_a_test"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "__all__ = ['kept', 'other']\nkept = 1\nother = 2\n_own = 3\n"
    )
    (folder / "inner.py").write_text(
        "class Shown:\n    label = 'real'\n\ndef found(n=1):\n    return n\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    name = "library_of_a_test"
    yield name
    for module in (f"{name}.inner", name):
        sys.modules.pop(module, None)


def used_by_attribute(name):
    return sys.modules[name].kept


def used_by_name(name):
    exec(f"from {name} import kept", scope := {})
    return scope["kept"]


def used_by_all_names(name):
    exec(f"from {name} import *", scope := {})
    assert "_own" not in scope
    return scope["kept"]


def used_by_a_module_inside(name):
    exec(f"import {name}.inner\nkept = {name}.kept", scope := {})
    return scope["kept"]


@pytest.mark.parametrize(
    "use", [used_by_attribute, used_by_name, used_by_all_names, used_by_a_module_inside]
)
def test_a_deferred_package_is_imported_when_it_is_used_and_not_before(library, use):
    defer(library)
    exec(f"import {library} as held", scope := {})
    assert isinstance(sys.modules[library], Deferred)
    assert importlib.util.find_spec(library) is not None
    assert not hasattr(sys.modules[library], "__file__")
    assert use(library) == 1
    assert not isinstance(sys.modules[library], Deferred)
    assert scope["held"].kept == 1
    with pytest.raises(AttributeError, match="library_of_a_test"):
        _ = scope["held"].gone


def test_what_is_imported_already_stays(library):
    before = importlib.import_module(library)
    defer(library)
    assert sys.modules[library] is before


def test_stand_ins_serve_as_annotations_and_import_the_module_when_they_are_used(library):
    name = f"{library}.inner"
    defer(name, names=("Shown", "found"))
    exec(f"from {name} import Shown, found\ndef read(shown: Shown | None): pass", scope := {})
    assert isinstance(sys.modules[name], Deferred)
    assert library not in sys.modules
    assert scope["found"](n=3) == 3
    assert not isinstance(sys.modules[name], Deferred)
    assert isinstance(scope["Shown"](), sys.modules[name].Shown)
    assert isinstance(sys.modules[name].Shown(), scope["Shown"])
    assert scope["Shown"].label == "real"


def test_a_module_imported_inside_a_deferred_package_is_an_attribute_of_the_package(library):
    defer(library, names=("kept",))
    inner = importlib.import_module(f"{library}.inner")
    assert isinstance(sys.modules[library], Deferred)
    assert sys.modules[library].other == 2
    assert importlib.import_module(library).inner is inner
