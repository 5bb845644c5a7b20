"""The weights of a rank's policy and companions: publishing, saving, loading and export."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from rlcore.learner.exporting import write_model
from rlcore.learner.lora import save_adapter
from rlcore.learner.policy import DTYPES
from rlcore.learner.protocols import Companion, TrainEngine
from rlcore.learner.ranks import is_first_rank
from rlcore.learner.specs import LearnerJob, LoraSpec
from rlcore.learner.state_files import Part, Schedule, Source
from rlcore.types import POLICY


def export_model(
    folder: Path, engine: TrainEngine, model_path: str, *, source: str, lora: LoraSpec | None
) -> None:
    """Write whole weights, adapters merged, and what else the model folder `source` holds.

    Adapters are written next to them as the PEFT folder `adapter`, on the model at `model_path`.
    Collective; rank 0 writes.
    """
    writes = is_first_rank()
    if lora is not None:
        adapters = dict(engine.trained_weights(wanted=writes))
        if writes:
            save_adapter(folder / "adapter", adapters, lora, model_path)
    # every rank iterates: gathering a sharded weight is collective
    state = dict(engine.weights(wanted=writes))
    if writes:
        write_model(folder, state, source)


class RankState:
    """The trained weights of a rank, as sets of weights by name: the policy's, and each
    companion's.

    Every method is collective: all ranks call it, in the same order.
    """

    def __init__(
        self, job: LearnerJob, rank: int, engine: TrainEngine, companions: tuple[Companion, ...]
    ) -> None:
        self.job = job
        self.rank = rank
        self.engine = engine  # the policy's
        self.companions = companions

    @property
    def published(self) -> tuple[str, ...]:
        """Names of the sets of weights that `published_weights` gives."""
        return (POLICY, *(c.name for c in self.companions if c.published))

    @property
    def over_policy(self) -> tuple[str, ...]:
        """The sets that are adapters on the policy's set, which an engine loads with it."""
        return tuple(c.name for c in self.companions if c.adapter_alone)

    def _is_adapter(self, name: str) -> bool:
        lora = self.job.learner.lora
        if name == POLICY:
            return lora is not None and lora.publish == "adapter"
        return name in self.over_policy

    def published_shapes(self, name: str) -> dict[str, tuple[int, ...]]:
        """Names and shapes of a published set, in the order in which it comes. Not collective."""
        engine = self.engine_of(name)
        return engine.adapter_shapes() if self._is_adapter(name) else engine.shapes()

    def engine_of(self, name: str) -> TrainEngine:
        """The engine of a published set. Raises KeyError for another name."""
        engines = {companion.name: companion.engine for companion in self.companions}
        return {POLICY: self.engine, **engines}[name]

    def published_weights(
        self,
        name: str,
        dtype: str,
        only: Collection[str] | None = None,
        *,
        on_device: bool = False,
        everywhere: bool = False,
    ) -> Iterator[tuple[str, Tensor]]:
        """Whole weights by Hugging Face name in `dtype`, one at a time, adapters merged, tied ones
        once; of an adapter that is published alone, its factors. `only` selects by name. They are
        on the CPU, or `on_device`, where training must wait.

        `name`: one of `published`. Yields nothing on ranks other than 0, unless `everywhere`; all
        ranks must exhaust it.
        """
        engine = self.engine_of(name)
        read = engine.adapter if self._is_adapter(name) else engine.weights
        wanted = everywhere or self.rank == 0
        for n, w in read(only, on_device=on_device, wanted=wanted):
            given = w.to(DTYPES[dtype])
            del w  # else both would be in memory while it is taken
            yield n, given
            del given

    def release(self) -> tuple[int, int]:
        """Free the memory that is not needed to publish or save. Returns the bytes freed, and the
        peak of torch's memory on the GPU since the last call. Not collective."""
        device = self.engine.device
        cuda = device.type == "cuda"
        before = torch.cuda.mem_get_info(device)[0] if cuda else 0
        moved = sum(engine.release() for engine in self._engines())
        if not cuda:
            return moved, 0
        if moved:  # a pass over all objects takes longer than all else where nothing was moved
            gc.collect()
        torch.cuda.empty_cache()  # memory that passes have left in torch's cache
        freed = torch.cuda.mem_get_info(device)[0] - before
        peak = torch.cuda.max_memory_reserved(device)
        torch.cuda.reset_peak_memory_stats(device)
        return freed, peak

    def reclaim(self) -> None:
        """Take it back, to train. Not collective."""
        for engine in self._engines():
            engine.reclaim()

    def _engines(self) -> list[TrainEngine]:
        return [self.engine, *(companion.engine for companion in self.companions)]

    def held_weights(self) -> dict[str, Part]:
        """This rank's part of the trained weights or adapters in float32, a copy on the CPU;
        `write_parts` writes it, `load_weights` reads it.

        A companion's names begin with its own.
        """
        held = self.engine.held_weights()
        for companion in self.companions:
            its = companion.engine.held_weights()
            held |= {f"{companion.name}/{n}": part for n, part in its.items()}
        return held

    def load_weights(self, sources: Mapping[str, Source]) -> None:
        """Replace the trained weights (named as by `held_weights`) and nothing else."""
        policy = dict(sources)
        for companion in self.companions:
            prefix = f"{companion.name}/"
            its = {n: policy.pop(n) for n in sources if n.startswith(prefix)}
            companion.engine.load_weights({n.removeprefix(prefix): t for n, t in its.items()})
        self.engine.load_weights(policy)
        self._weights_changed()

    def save(self, folder: str | Path, run: Schedule | None = None) -> None:
        """Write the learner's state (float32 weights, Adam moments, step count) to `folder` as
        safetensors, companions beneath it under their names. Each rank writes what it holds.

        `run`: receives the writing of each file as a job, to be done in order; without it all is
        written on return.
        """
        self.engine.save(Path(folder), run)
        for companion in self.companions:
            companion.engine.save(Path(folder) / companion.name, run)

    def load(self, folder: str | Path) -> None:
        """Continue from `save`, also one made with another ZeRO stage or number of ranks."""
        self.engine.load(Path(folder))
        for companion in self.companions:
            companion.engine.load(Path(folder) / companion.name)
        self._weights_changed()

    def _weights_changed(self) -> None:
        for companion in self.companions:
            companion.weights_changed()

    def export(self, folder: str | Path) -> None:
        """Write a Hugging Face folder: merged weights as safetensors, and what else the model's
        folder holds.

        Adapters are written next to them as a PEFT folder, `adapter`; each companion as a folder
        beneath, under its name.
        """
        folder = Path(folder)
        path, lora = self.job.model_path, self.job.learner.lora
        export_model(folder, self.engine, path, source=path, lora=lora)
        for companion in self.companions:
            companion.export(folder / companion.name, policy_folder=folder)
