"""Start arguments of the processes of a run. Independent of Ray, so that `commands` can build
them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlcore.buffer.specs import BatchingSpec, SelectionSpec, TaskShare
from rlcore.cluster.specs import RaySpec
from rlcore.environments.specs import EnvironmentJob
from rlcore.loop.specs import EvaluationSpec, ScheduleSpec, SupervisionSpec
from rlcore.rollout.specs import EngineJob
from rlcore.rollout.text import PromptJob, StopStrings
from rlcore.tasks.graders import GraderPool
from rlcore.weights.specs import TransportSpec


@dataclass(frozen=True, slots=True)
class Hosting:
    """Where and how the processes of a run are started, and the deadlines of calls to them."""

    ray: RaySpec
    schedule: ScheduleSpec
    supervision: SupervisionSpec
    transport: TransportSpec
    weights_folder: str  # that transport=disk writes to
    own_nodes: bool  # the learner has nodes of its own: cluster.launch.learner_nodes


@dataclass(frozen=True, slots=True)
class BufferJob:
    """Arguments of the replay buffer, as of `ReplayBuffer`."""

    batching: BatchingSpec
    selection: SelectionSpec
    samples_per_group: int
    max_bytes: int
    run_seed: int
    keep_samples: int
    tasks: Mapping[str, TaskShare] | None = None
    kinds: tuple[str, ...] = ()  # labels of actors, of a run with several


@dataclass(frozen=True, slots=True)
class ScorerJob:
    """Arguments of the graders' process."""

    pools: tuple[GraderPool, ...]  # one a training task; the first has the evaluation tasks too
    evaluation: EvaluationSpec  # whose deadline its answers to evaluations have
    tokenizer_path: str  # for readable samples


@dataclass(frozen=True, slots=True)
class RolloutJob:
    """Arguments of one kind of rollout actor."""

    engine: EngineJob  # actor_id is that of the process
    tokenizer_path: str  # for prompts, and for the text that graders are given
    stop: StopStrings  # that text is cut before
    prompts: PromptJob  # what their tokens are made by
    in_pieces: frozenset[str] = frozenset()  # tasks whose graders ask for the text of every token
    raw: frozenset[str] = frozenset()  # tasks whose graders see special tokens
    environments: tuple[EnvironmentJob, ...] = ()  # what plays episodes of several turns
