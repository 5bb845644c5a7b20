"""Hugging Face folders of what a checkpoint holds, written without the ranks that trained it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig

from rlcore.errors import StageError
from rlcore.files import follow_umask
from rlcore.learner.specs import SPARSE_COPY, LearnerJob, LoraSpec
from rlcore.learner.state_files import StoredTensor, open_state
from rlcore.models.folder import ATTENTION_FILE, register_architecture, without_dropout
from rlcore.weights.experts import singles

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


def write_attention(folder: Path, job: LearnerJob) -> None:
    """Say in an exported folder which sparse attention its weights are trained for: they would load
    for any other as well."""
    assert job.sparse is not None
    text = json.dumps({"sparse": job.sparse.model_dump()}, indent=1)
    (folder / ATTENTION_FILE).write_text(text)


def export_stored(job: LearnerJob, state: Path, folder: Path) -> None:
    """Write what the ranks of `job` would export after loading `state`, without starting any.

    Needs the model once in memory in the job's dtype, and no GPU. Beneath `folder`: `adapter`, and
    the sparse copy of a job that trains one. Raises StageError for a state of another model.
    """
    spec = job.learner
    _export(folder, state, job.model_path, spec.compute_dtype, spec.lora)
    if spec.distill is not None:
        # its base weights are the policy's, which are exported now
        base, own = str(folder.resolve()), folder / SPARSE_COPY
        _export(own, state / SPARSE_COPY, base, spec.compute_dtype, spec.distill.lora)
        write_attention(own, job)


def _export(folder: Path, state: Path, model_path: str, dtype: str, lora: LoraSpec | None) -> None:
    pairs: Iterable[tuple[str, Tensor]]
    with open_state(state) as stored:
        trained = {n.removeprefix(_WEIGHT): t for n, t in stored.items() if n.startswith(_WEIGHT)}
        if lora is None:  # all weights are trained, so that no model has to be built
            register_architecture(model_path)
            config = AutoConfig.from_pretrained(model_path, local_files_only=True)
            without_dropout(config)
            config.dtype = getattr(torch, dtype)
            pairs = ((name, tensor.whole().to(config.dtype)) for name, tensor in trained.items())
        else:
            lm = _adapted(model_path, dtype, lora, trained, state)
            config, pairs = lm.config, _merged(lm)
            from rlcore.learner.lora import save_adapter

            adapters = {name: tensor.whole() for name, tensor in trained.items()}
            save_adapter(folder / "adapter", adapters, lora, model_path)
        weights = {n: part.contiguous() for name, w in pairs for n, part in singles(name, w)}
    write_model(folder, weights, config, model_path)


_WEIGHT = "weight:"  # begins the names of weights in a state; moments have others


def _adapted(
    model_path: str, dtype: str, lora: LoraSpec, trained: Mapping[str, StoredTensor], state: Path
) -> Any:
    from rlcore.learner.lora import add_adapters  # PEFT takes seconds, and few models have adapters
    from rlcore.learner.policy import load_causal_lm

    lm: Any = load_causal_lm(model_path, dtype, "sdpa")
    add_adapters(lm, lora, seed=0, key="learner.lora")  # both factors are in the state
    lm.to(lm.dtype)  # as DeepSpeed holds them
    factors = {name: p for name, p in lm.named_parameters() if p.requires_grad}
    if factors.keys() != trained.keys():
        odd = sorted(factors.keys() ^ trained.keys())[:3]
        raise StageError(f"learner state in {state} does not fit the run's model: {odd}")
    with torch.no_grad():
        for name, p in factors.items():
            p.copy_(trained[name].whole())
    return lm


def _merged(lm: nn.Module) -> Iterator[tuple[str, Tensor]]:
    from rlcore.learner.lora import adapted_layers, is_adapter, merged, plain_name

    adapted = adapted_layers(lm)
    for held, p in lm.named_parameters():
        if not is_adapter(held):
            name, weight = plain_name(held), p.detach()
            yield name, merged(weight, adapted[name]) if name in adapted else weight


def write_model(folder: Path, weights: dict[str, Tensor], config: Any, model_path: str) -> None:
    """Write a Hugging Face folder: contiguous weights by name, a configuration of transformers, and
    the tokenizer's files of `model_path`."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    follow_umask(folder / "model.safetensors")
    config.save_pretrained(folder)
    for name in TOKENIZER_FILES:
        source = Path(model_path) / name
        if source.is_file():
            shutil.copyfile(source, folder / name)
