"""Hugging Face folders of what a checkpoint holds, written without the ranks that trained it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from rlcore.errors import StageError
from rlcore.files import follow_umask
from rlcore.learner.specs import SPARSE_COPY, LearnerJob, LoraSpec
from rlcore.learner.state_files import StoredTensor, open_state
from rlcore.models.carried import CONFIG, copy_files, stored_as, trained_config
from rlcore.models.folder import ATTENTION_FILE
from rlcore.weights.experts import singles


def write_attention(folder: Path, job: LearnerJob) -> None:
    """Say in an exported folder which sparse attention its weights are trained for: they would load
    for any other as well."""
    assert job.sparse is not None
    text = json.dumps({"sparse": job.sparse.model_dump()}, indent=1)
    (folder / ATTENTION_FILE).write_text(text)


def export_stored(job: LearnerJob, state: Path, folder: Path, dtype: str | None = None) -> None:
    """Write what the ranks of `job` would export after loading `state`, without starting any.

    Needs the model once in memory, and no GPU. `dtype`: of the weights, rounded from the float32
    ones of the state; None: the policy's own values, in the format of the model that it started
    from. Beneath `folder`: `adapter`, and the sparse copy of a job that trains one. Raises
    StageError for a state of another model.
    """
    spec = job.learner
    asked = _Asked(job.model_path, spec.compute_dtype, dtype)
    _export(folder, state, job.model_path, asked, spec.lora)
    if spec.distill is not None:
        # its base weights are the policy's, which are exported now
        base, own = str(folder.resolve()), folder / SPARSE_COPY
        _export(own, state / SPARSE_COPY, base, asked, spec.distill.lora)
        write_attention(own, job)


@dataclass(frozen=True, slots=True)
class _Asked:
    """Of which model an export is, and the dtypes of its weights."""

    source: str  # the folder that training started from
    compute: str  # as they were trained
    dtype: str | None  # as the command asks; None: as the source's

    @property
    def loaded(self) -> str:
        """The dtype that adapters are merged in: the policy's, or the state's."""
        return self.compute if self.dtype is None else "float32"

    def rounded(self, weight: Tensor) -> Tensor:
        """A float32 weight of the state as the export takes it."""
        return weight.to(getattr(torch, self.loaded))


def _export(
    folder: Path, state: Path, model_path: str, asked: _Asked, lora: LoraSpec | None
) -> None:
    pairs: Iterable[tuple[str, Tensor]]
    with open_state(state) as stored:
        trained = {n.removeprefix(_WEIGHT): t for n, t in stored.items() if n.startswith(_WEIGHT)}
        if lora is None:  # all weights are trained, so that no model has to be built
            pairs = ((name, asked.rounded(tensor.whole())) for name, tensor in trained.items())
        else:
            pairs = _merged(_adapted(model_path, asked.loaded, lora, trained, state))
            from rlcore.learner.lora import save_adapter

            adapters = {name: tensor.whole() for name, tensor in trained.items()}
            save_adapter(folder / "adapter", adapters, lora, model_path)
        weights = {n: part for name, w in pairs for n, part in singles(name, w)}
    write_model(folder, weights, asked.source, asked.dtype)


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


def write_model(
    folder: Path, weights: dict[str, Tensor], source: str, dtype: str | None = None
) -> None:
    """Write a Hugging Face folder: these weights by name, the configuration of the folder `source`
    as far as training leaves it, and all other files of it.

    `dtype`: of the weights; None: each has the format that it has in `source`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    convert = stored_as(source, dtype)
    state = {name: convert(name, weight).contiguous() for name, weight in weights.items()}
    save_file(state, str(folder / "model.safetensors"), metadata={"format": "pt"})
    follow_umask(folder / "model.safetensors")
    copy_files(source, folder)
    (folder / CONFIG).write_text(trained_config(source, dtype), encoding="utf-8")
