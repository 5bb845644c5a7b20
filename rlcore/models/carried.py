"""Files of a model folder that training leaves as they are: an export has them byte for byte.

Written anew by another version of transformers they would mean something else to older ones, and to
engines built on these. Examples are a tokenizer's special tokens, or the rotary base of a
configuration.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore.models.folder import ATTENTION_FILE, read_dtypes, register_architecture, without_dropout

if TYPE_CHECKING:
    import torch

CONFIG = "config.json"
# Written by an export itself; a source that is an export has its own.
_OWN = (CONFIG, ATTENTION_FILE)
_WEIGHTS = re.compile(
    r".*\.(safetensors|gguf|h5|msgpack|onnx|onnx_data|ot|pth|ckpt|tflite)"
    r"|(pytorch_model|model|consolidated|adapter_model|optimizer)\b.*\.(bin|pt)|.*\.index\.json"
)
_DOWNLOADS = (".git", ".cache")  # how a folder came here, and nothing of the model
_TOKENIZER = re.compile(
    r"(tokenizer|special_tokens_map|added_tokens|vocab|merges|chat_template|spiece|sentencepiece).*"
)
# safetensors' names of the formats that an export can have
_FORMATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def carried_files(source: str | Path) -> Iterator[Path]:
    """Paths within a model folder of all files but its weights, their index, config.json and what
    an earlier export wrote of a run. Further models in folders beneath it are left out. Links count
    as what they lead to, as in a hub's cache; one that leads nowhere is not a file."""
    root, seen = Path(source), set()
    for parent, folders, names in os.walk(root, followlinks=True):
        inner, real = Path(parent).relative_to(root), Path(parent).resolve()
        folders[:] = sorted(f for f in folders if not _is_another(Path(parent) / f))
        if real in seen:  # a link to a folder above it
            folders[:] = []
            continue
        seen.add(real)
        for name in sorted(names):
            own = not inner.parts and name in _OWN
            is_file = (Path(parent) / name).is_file()
            if is_file and not own and not _WEIGHTS.fullmatch(name):
                yield inner / name


def _is_another(folder: Path) -> bool:
    """Return whether a folder beneath a model's holds something else: another model, such as an
    adapter, a learner's state, or bookkeeping of the download."""
    if folder.name in _DOWNLOADS:
        return True
    configured = any((folder / name).is_file() for name in (CONFIG, "adapter_config.json"))
    state = folder.name == "learner" and any(folder.glob("*.safetensors"))
    return state or (configured and any(_WEIGHTS.fullmatch(p.name) for p in folder.iterdir()))


def copy_files(source: str | Path, folder: str | Path) -> None:
    """Copy `carried_files` to the same places in another model folder; the files get the mode of
    new ones."""
    for path in list(carried_files(source)):
        _copy(Path(source) / path, Path(folder) / path)


def complete_tokenizer(folder: Path, source: str | Path) -> None:
    """Copy the tokenizer of `source` to a model folder that has none, such as a draft's."""
    if any(_TOKENIZER.fullmatch(path.name) for path in folder.iterdir()):
        return
    for path in list(carried_files(source)):
        if _TOKENIZER.fullmatch(path.parts[0]):
            _copy(Path(source) / path, folder / path)


def _copy(file: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, to)


def trained_config(source: str | Path, dtype: str | None = None) -> str:
    """The text of config.json of a model that was trained from the folder `source`: the source's
    but for what training changes.

    Dropout is 0, as in every pass of the run, and weights are not quantised. `dtype`: of the
    weights; None: the source's.
    """
    from transformers import AutoConfig

    register_architecture(source)
    settings = json.loads((Path(source) / CONFIG).read_text(encoding="utf-8"))
    changed = without_dropout(AutoConfig.from_pretrained(str(source), local_files_only=True))
    quantised = settings.pop("quantization_config", None) is not None
    if dtype is not None or quantised:
        key = "torch_dtype" if "torch_dtype" in settings or "dtype" not in settings else "dtype"
        settings[key] = dtype or common_dtype(source)
    return json.dumps(_with(settings, changed), indent=2, ensure_ascii=False) + "\n"


def _with(settings: dict[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in changed.items():
        inner = isinstance(value, Mapping)
        settings[name] = _with(dict(settings.get(name) or {}), value) if inner else value
    return settings


def common_dtype(source: str | Path) -> str:
    """The format of most weights of a folder, in torch's name; bfloat16 where they have codes."""
    found = [_FORMATS[d] for d in read_dtypes(source).values() if d in _FORMATS]
    return max(sorted(set(found)), key=found.count, default="bfloat16")


def stored_as(source: str | Path, dtype: str | None) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """A function that converts a weight of a name: to `dtype`, or to the format in which `source`
    has it."""
    import torch

    known = {} if dtype else read_dtypes(source)
    other = dtype or common_dtype(source)

    def convert(name: str, weight: torch.Tensor) -> torch.Tensor:
        return weight.to(getattr(torch, _FORMATS.get(known.get(name, ""), other)))

    return convert
