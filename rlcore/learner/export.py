"""Hugging Face folders of what was trained."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.torch import save_file

from rlcore.files import follow_umask
from rlcore.learner.lora import save_adapter
from rlcore.learner.protocols import TrainEngine
from rlcore.learner.ranks import is_first_rank
from rlcore.learner.specs import LoraSpec

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


def export_model(
    folder: Path, engine: TrainEngine, model_path: str, *, lora: LoraSpec | None
) -> None:
    """Write whole weights, adapters merged, the configuration and the tokenizer of `model_path`.

    Adapters are written beside them as the PEFT folder `adapter`, on the model at `model_path`.
    Collective; rank 0 writes.
    """
    writes = is_first_rank()
    if lora is not None:
        adapters = dict(engine.trained_weights(wanted=writes))
        if writes:
            save_adapter(folder / "adapter", adapters, lora, model_path)
    # every rank iterates: gathering a sharded weight is collective
    state = {name: w.contiguous() for name, w in engine.weights(wanted=writes)}
    if not writes:
        return
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, str(folder / "model.safetensors"), metadata={"format": "pt"})
    follow_umask(folder / "model.safetensors")
    engine.policy.lm.config.save_pretrained(folder)  # type: ignore[operator, union-attr]
    for name in TOKENIZER_FILES:
        source = Path(model_path) / name
        if source.is_file():
            shutil.copy(source, folder / name)
