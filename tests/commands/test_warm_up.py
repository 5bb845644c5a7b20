"""A model that runs share is whole wherever it is seen, and the first one stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from rlcore.commands.preflight import prepare
from rlcore.commands.warm_up import keep, kept_model, starting_model
from rlcore.config.compose import load
from rlcore.errors import UserError


def _folder(path: Path, text: str) -> Path:
    path.mkdir(parents=True)
    (path / "weights").write_text(text)
    return path


def test_a_model_of_a_run_beside_this_one_stays(tmp_path: Path) -> None:
    kept = tmp_path / "digits-1"
    keep(_folder(tmp_path / ".a" / "made", "first"), kept)
    keep(_folder(tmp_path / ".b" / "made", "second"), kept)
    assert (kept / "weights").read_text() == "first"


def test_other_failures_are_raised(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        keep(tmp_path / "missing", tmp_path / "digits-1")


def test_a_folder_of_models_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    kept = f"model.warmup.cache_dir={tmp_path}/file/warm"
    config = load(["experiment=quickstart", f"run_dir={tmp_path}/x", kept])
    with pytest.raises(
        UserError, match=r"cache_dir=.*file/warm cannot be written: Not a directory"
    ):
        starting_model(config, cast(Any, None), print)


def test_a_warm_up_in_float64_is_another_model_than_one_in_float32(tmp_path: Path) -> None:
    words = ["experiment=quickstart", f"run_dir={tmp_path / 'run'}"]
    words += ["model.warmup.steps=2", "model.warmup.batch_size=4"]
    words += [f"model.warmup.cache_dir={tmp_path / 'kept'}"]
    exact = load([*words, "model.warmup.precision=float64"])
    noted: list[str] = []
    made = Path(starting_model(exact, prepare(exact), noted.append))
    assert kept_model(exact) == str(made) and kept_model(load(words)) is None
    assert any("worked answers in float64" in line for line in noted)
    assert {"model.safetensors", "tokenizer.json"} <= {file.name for file in made.iterdir()}
