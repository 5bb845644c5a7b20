"""The protocols of the learner's parts: a training engine, and companions trained with the policy;
and the learning rate of a step.

Implementations inherit these base classes. A method with a body is optional.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import cos, pi
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from rlcore.engine_facts import EngineFacts
from rlcore.errors import UserError
from rlcore.learner.parts.part import LearnerPart
from rlcore.types import Group, TokenScores, Trajectory

if TYPE_CHECKING:
    from rlcore.interfaces import Reduce
    from rlcore.learner.batch import StepBatch
    from rlcore.learner.lm_head import HeadSpec, KlTarget
    from rlcore.learner.optimizer_specs import OptimizerSpec
    from rlcore.learner.packing import MicroBatch
    from rlcore.learner.policy import FrozenPolicy, Policy
    from rlcore.learner.ranks import Shards
    from rlcore.learner.sequences import ScoredSequence
    from rlcore.learner.specs import LearnerSpec
    from rlcore.learner.split_loading import Split
    from rlcore.learner.state_files import Part, Schedule, Source


class TrainEngine(ABC):
    """One rank's model and optimizer. Every method is collective unless it says otherwise.

    Built as Engine(policy: Policy, spec: LearnerSpec, total_steps: int, device), after `prepare`.
    Registered in `learner/specs.py`.
    """

    device: torch.device
    policy: Policy
    names: Mapping[str, Tensor]  # the model's weights by Hugging Face name
    trained: Mapping[str, Tensor]  # what the optimizer trains: the same, or adapters on them
    optimizer_steps: int  # optimizer steps since the fresh model
    #: the settings of the learner that it reads besides, and its memory; read without an instance
    facts: ClassVar[type[EngineFacts]] = EngineFacts

    @staticmethod
    def prepare(device: torch.device) -> None:
        """Optional. Called once a process, after its ranks have joined and before a model is
        loaded."""
        return None

    @staticmethod
    def splitter(spec: LearnerSpec) -> Split | None:
        """Optional. The function that divides each parameter among the ranks as a model is loaded;
        None (default): the engine is given whole models."""
        return None

    @staticmethod
    def frozen(policy: Policy, spec: LearnerSpec, device: torch.device) -> FrozenPolicy:
        """Optional. A policy without gradients, loaded like the trained one; the engine decides how
        ranks hold it, by default whole."""
        from rlcore.learner.policy import FrozenPolicy

        return FrozenPolicy(policy.to(device))

    @staticmethod
    def split_attention(lm: nn.Module, shards: Shards) -> None:
        """Optional. Let a model's attention read the positions that other ranks hold, in place; by
        default an engine has no such attention."""
        raise UserError(
            f"{shards.key}={shards.count} needs an attention that exchanges positions "
            "among ranks, which this learner.engine lacks: use 1, or learner.engine=deepspeed."
        )

    @abstractmethod
    def forward(self, mb: MicroBatch, ids: Tensor | None, spec: HeadSpec) -> TokenScores:
        """Scores of a micro-batch; gradients according to torch's grad mode."""

    @abstractmethod
    def forward_with_kl(
        self, mb: MicroBatch, ids: Tensor | None, spec: HeadSpec, base: KlTarget | None
    ) -> tuple[TokenScores, Tensor | None]:
        """Scores, with the KL [N] to `base`, another policy at the same positions."""

    def outputs(self, mb: MicroBatch) -> Tensor:
        """Optional: critic.kind needs it. The model's outputs at the positions that predict, with
        gradients according to torch's grad mode: values [N] of a critic, else hidden states."""
        raise UserError(
            f"critic.kind needs an engine that gives a model's values, and the learner.engine "
            f"{type(self).__name__} has no outputs: use critic=none, or learner.engine=deepspeed."
        )

    @abstractmethod
    def as_base(self, mb: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return the inputs of another policy's full KL to this one, detached: hidden states [N, D]
        of the positions that predict, and the head's weight [V, D]. Not collective."""

    @abstractmethod
    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Accumulate the gradient of a micro-batch's share of the global loss.

        `last` ends the accumulation; the process then has torch's number of threads that it had
        when the engine was built. Every rank makes the same number of calls.
        """

    @abstractmethod
    def grad_norm(self) -> float:
        """Global L2 norm of the accumulated gradient before clipping; NaN or inf if an entry is."""

    def full_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Optional: rlcore replay with other settings needs it. Every (parameter name, whole
        accumulated gradient in float32), after the last backward pass and before clipping."""
        raise UserError(
            "rlcore replay with other settings compares gradients, which the learner.engine "
            f"{type(self).__name__} does not give (full_gradients): leave the settings out."
        )

    def rate(self) -> float:
        """Optional: learner.step_bound needs it. The schedule's learning rate of the next step. Not
        collective."""
        raise UserError(
            "learner.step_bound shortens steps by their learning rate, which the learner.engine "
            f"{type(self).__name__} does not give (rate): set learner.step_bound=null."
        )

    @abstractmethod
    def step(self, scale: float = 1.0) -> float:
        """Clip, update and clear; returns the learning rate used: the schedule's times `scale`."""

    def hold(self) -> None:
        """Optional, with `rate`. End a step without an update: clear the accumulated gradient, and
        leave weights and moments as they are. The step counts for the schedule."""
        raise UserError(
            f"learner.step_bound cannot hold a step of the learner.engine {type(self).__name__}, "
            "which has no hold: set learner.step_bound=null."
        )

    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole shapes of the weights that `weights` gives, in its order. Not collective."""

    @abstractmethod
    def weights(
        self, only: Collection[str] | None = None, *, on_device: bool = False, wanted: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Every (Hugging Face name, whole CPU copy in the model's dtype), tied weights once; `only`
        those named, if any are. `on_device`: where the model is, possibly its own tensor, which
        training changes.

        Adapters are merged. One weight at a time is whole. All ranks iterate; a rank that does not
        want the weights (`wanted`) gets none and computes only what others need.
        """

    def adapter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Optional: learner.lora.publish=adapter needs it. Shapes of the tensors that `adapter`
        gives. Not collective."""
        raise UserError(
            f"learner.lora.publish=adapter needs an engine that gives its adapter, and the "
            f"learner.engine {type(self).__name__} has no adapter_shapes and adapter: use merged."
        )

    def adapter(
        self, only: Collection[str] | None = None, *, on_device: bool = False, wanted: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Optional, with `adapter_shapes`. Every (name, whole copy in float32) of the adapter's
        factors as they are published (`weights/adapters.py`); arguments and ranks as in
        `weights`."""
        raise RuntimeError(f"{type(self).__name__} publishes no adapter")

    @abstractmethod
    def trained_weights(self, *, wanted: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Every (parameter name, whole float32 CPU copy) of what is trained; `wanted` and the ranks
        as in `weights`."""

    @abstractmethod
    def held_weights(self) -> dict[str, Part]:
        """This rank's part of what is trained, by parameter name: float32 copies on the CPU."""

    @abstractmethod
    def load_weights(self, sources: Mapping[str, Source]) -> None:
        """Replace the trained weights and nothing of the optimizer; a rank reads its own part.
        Raises StageError if the names do not match.
        """

    def release(self) -> int:
        """Optional. Free memory on the device until `reclaim`, where neither `weights` nor `save`
        needs it; returns the bytes freed, by default 0. Not collective."""
        return 0

    def reclaim(self) -> None:
        """Optional, with `release`. Take the memory back, to train. Not collective."""
        return None

    @abstractmethod
    def save(self, folder: Path, run: Schedule | None = None) -> None:
        """Write what is trained in float32, the optimizer's moments and the step count.

        Each rank writes what it holds. `run` schedules the writing of each file, so that training
        can go on meanwhile; without it all is written on return.
        """

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Continue from `save`, also by other ranks or with another sharding.

        Raises StageError if names or shapes do not match the model.
        """


class Companion(LearnerPart, ABC):
    """A model trained with the policy in the learner's ranks, published under its own name or not
    at all.

    `name` is the key of its weights in a publication and its folder in checkpoints and exports.
    """

    name: str
    engine: TrainEngine
    published: bool = True  # actors have its weights
    adapter_alone: bool  # published as an adapter, for engines that have the policy's set as well

    @abstractmethod
    def step(self, batch: StepBatch, step: int, advantages: Tensor) -> dict[str, float]:
        """One optimizer step on a batch that the policy has just been trained on; metrics.

        advantages: [B, T], before any correction replaces them. Raises StageError, before anything
        is updated, when a loss or a gradient is not finite.
        """

    @abstractmethod
    def weights_changed(self) -> None:
        """Called when the policy's weights were replaced (a load): take over the tensors shared
        with it."""

    @abstractmethod
    def export(self, folder: Path, *, policy_folder: Path) -> None:
        """Write `folder`, a separate Hugging Face folder; the policy's was written already."""


class LogProbEstimator(ABC):
    """How the learner reads records of a model whose log-probs are estimates.

    Built as Estimator(model_path, spec). Registered in `learner/specs.py: ESTIMATORS`.
    """

    @abstractmethod
    def read(self, t: Trajectory, sharper: float = 1.0) -> ScoredSequence:
        """The inputs of the estimate that the record's actor made. Raises ValueError for a record
        of another kind of model."""

    @abstractmethod
    def twice(
        self, groups: Sequence[Group]
    ) -> tuple[Sequence[ScoredSequence], Sequence[ScoredSequence]]:
        """Some records of this rank, under two draws of their estimate."""

    @abstractmethod
    def metrics(
        self, pairs: Sequence[tuple[np.ndarray, np.ndarray]], reduce: Reduce
    ) -> dict[str, float]:
        """Metrics of the pairs of log-probs [S] that `twice` leads to. Collective."""


class RateSchedule:
    """Linear warm-up, then constant, or down to `lr_final` * lr, which the last step has.

    That is the last of `lr_decay_steps`, or of `total_steps` (of the run) where that is not given.
    """

    def __init__(self, spec: OptimizerSpec, total_steps: int) -> None:
        self._spec = spec
        self._end = spec.lr_decay_steps or total_steps

    def __call__(self, step: int) -> float:
        """Rate of optimizer step `step`, from 0."""
        lr, warmup = self._spec.lr, self._spec.lr_warmup_steps
        if step < warmup:
            return lr * (step + 1) / warmup
        if self._spec.lr_schedule == "constant":
            return lr
        last = self._end - 1
        done = 1.0 if step >= last else (step - warmup) / (last - warmup)
        linear = self._spec.lr_schedule == "linear"
        remaining = 1.0 - done if linear else 0.5 * (1.0 + cos(pi * done))
        return lr * (self._spec.lr_final + (1.0 - self._spec.lr_final) * remaining)
