"""The configuration of a run: every package's specification in a section. Declares no setting that
belongs to a package.

A section that serves several packages inherits their specifications, so that each package takes the
part that it declared. `cluster` is a `RaySpec` to the cluster and a `SupervisionSpec` to the loop.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import (
    Discriminator,
    SerializationInfo,
    Tag,
    TypeAdapter,
    ValidationError,
    create_model,
    model_serializer,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from rlcore.buffer.specs import SelectionSpec
from rlcore.cluster.specs import RaySpec
from rlcore.corrections.specs import CORRECTIONS, CorrectionSpec, Shadow, Stratum
from rlcore.environments.specs import EnvironmentSpec
from rlcore.errors import UserError
from rlcore.launch.specs import LaunchSpec
from rlcore.learner.specs import CriticSpec, LearnerSpec
from rlcore.loop.specs import (
    CheckpointSpec,
    EvaluationSpec,
    ScheduleSpec,
    ShareSpec,
    SupervisionSpec,
    TargetSpec,
)
from rlcore.metrics.specs import LoggingSpec
from rlcore.models.specs import ModelSpec
from rlcore.objectives.specs import ObjectiveSpec, TeacherSpec
from rlcore.registry import resolve
from rlcore.rollout.specs import ActorSpec, RolloutSpec, TeacherEngineSpec
from rlcore.spec import Fixed, Spec, Unread, refuse, setting
from rlcore.tasks.specs import GradingSpec, MixedTaskSpec, TaskSpec
from rlcore.weights.specs import TransportSpec

NONE = "none"  # the label of a run that names no correction on purpose
SHADOW = "shadow"
BESIDE = ("strata", SHADOW, "shadow_every")  # keys beside the labels
Strata = Literal["kind", "none"]


class NamedCorrection(NamedTuple):
    """One correction of a run. Example: NamedCorrection("tis", "tis", TisSpec())"""

    label: str
    name: str  # of its specification: an entry of the registry, or path/to/file.py:Class
    spec: CorrectionSpec


class CorrectionList(Spec):
    """The corrections of a run or of a kind of actors, read from and written to a mapping whose
    order counts; a list of names is one without settings.

    A built-in correction's label is its name, `tis: {cap: 3}`. A user's own says which class
    declares its settings, `mine: {name: "path/to/file.py:MySpec", cap: 3}`.
    """

    entries: tuple[NamedCorrection, ...] = ()
    none: bool = False  # `correction=none`
    strata: Strata = setting(
        "kind",
        "statistics of the batch are of each kind of actors alone; none: of all whose corrections "
        "are equal",
    )
    shadow: tuple[CorrectionList, ...] = setting(
        (), "further lists, whose weights are measured and not applied: [[tis],[jackpot]]"
    )
    shadow_every: int = setting(
        10, "batches from one measurement of these lists to the next", unit="steps", ge=1
    )
    unread: ClassVar[tuple[Unread, ...]] = (
        Unread(("shadow_every",), lambda c: not c.shadow, "correction.shadow is empty"),
    )

    @model_validator(mode="before")
    @classmethod
    def _from_mapping(cls, data: Any) -> Any:
        if isinstance(data, list) and all(isinstance(label, str) for label in data):
            data = {label: {} for label in data}
        if not isinstance(data, Mapping):
            return data  # refused by its type
        # `tis: null` switches off what an experiment selects
        chosen = {label: settings for label, settings in data.items() if settings is not None}
        none = chosen.pop(NONE, None)
        beside = {key: chosen.pop(key) for key in BESIDE if key in chosen}
        if isinstance(beside.get(SHADOW), list):
            beside[SHADOW] = tuple(beside[SHADOW])
            refuse(
                any(isinstance(one, str) for one in beside[SHADOW]),
                f"correction.shadow={list(beside[SHADOW])} has a name where a list of corrections "
                "is due: write correction.shadow=[[tis],[veto,ais]].",
            )
        if none:
            raise _error(PydanticCustomError(NONE, "empty, since it has no settings"), NONE, none)
        entries = tuple(_named(label, settings) for label, settings in chosen.items())
        return {"entries": entries, "none": none is not None, **beside}

    @model_serializer(mode="plain")
    def _to_mapping(self, info: SerializationInfo) -> dict[str, Any]:
        written: dict[str, Any] = {NONE: {}} if self.none else {}
        for key in BESIDE:
            if getattr(self, key) != type(self).model_fields[key].default:
                value = getattr(self, key)
                listed = key == SHADOW
                written[key] = [v.model_dump(mode=info.mode) for v in value] if listed else value
        for label, name, spec in self.entries:
            own = {} if name == label else {"name": name}
            written[label] = own | spec.model_dump(mode=info.mode)
        return written

    @property
    def names(self) -> tuple[str, ...]:
        """Every label of the run in order, "none" included."""
        return ((NONE,) if self.none else ()) + tuple(entry.label for entry in self.entries)

    def chosen(self) -> dict[str, CorrectionSpec]:
        """Specifications by label, in the order in which they apply; empty for none."""
        return {entry.label: entry.spec for entry in self.entries}

    @property
    def shadows(self) -> Shadow:
        """The lists that are measured besides the run's own; equal names are counted, tis,
        tis-2."""
        lists: dict[str, Mapping[str, CorrectionSpec]] = {}
        for one in self.shadow:
            name = "+".join(one.chosen()) or NONE
            same = sum(label.partition("-")[0] == name for label in lists)
            lists[f"{name}-{same + 1}" if same else name] = one.chosen()
        return Shadow(lists, self.shadow_every)

    def get(self, label: str) -> CorrectionSpec | None:
        """The specification under a label, or None if the run does not have it."""
        return self.chosen().get(label)

    def check(self, key: str) -> None:
        refuse(
            self.strata != "kind" and key != "correction",
            f"{key}.strata={self.strata} is about all kinds of actors: set correction.strata.",
        )
        refuse(
            bool(self.shadow) and key != "correction",
            f"{key}.shadow is measured over all kinds of actors: set correction.shadow.",
        )
        refuse(
            self.none and bool(self.entries),
            f"{key}=[{','.join(self.names)}] contradicts itself: none stands alone.",
        )


@cache
def shipped() -> type[Spec]:
    """A model with one field for each shipped correction: the keys of help texts and hints."""
    fields: dict[str, Any] = {
        name: (resolve(CORRECTIONS, name, key="correction") | None, None) for name in CORRECTIONS
    }
    none = setting(None, "the run names no correction on purpose")
    fields[NONE] = (dict[str, Any] | None, none)
    for key, kind in zip(BESIDE, (Strata, tuple[tuple[str, ...], ...], int)):
        own = CorrectionList.model_fields[key]
        fields[key] = (kind, setting(own.default, own.description or ""))
    return create_model("ShippedCorrections", __base__=Spec, **fields)


def _named(label: str, settings: Any) -> NamedCorrection:
    """The correction of one entry of the section. Raises ValidationError or UserError."""
    if not isinstance(settings, Mapping):
        raise _error("dict_type", label, settings)
    own = dict(settings)
    name = own.pop("name", label)  # reserved: no specification has a setting of this name
    if label not in CORRECTIONS and "name" not in settings:
        raise _error("extra_forbidden", label, settings)
    spec = resolve(CORRECTIONS, str(name), key=f"correction.{label}.name")
    if not (isinstance(spec, type) and issubclass(spec, CorrectionSpec)):
        raise UserError(
            f"correction.{label}.name={name} is not accepted: it must name a class that inherits "
            "rlcore.corrections.specs.CorrectionSpec."
        )
    # In JSON mode, which is strict and still takes a list for a tuple, as for every other section.
    annotation: Any = dict[str, spec]  # type: ignore[valid-type]
    adapter: TypeAdapter[dict[str, CorrectionSpec]] = TypeAdapter(annotation)
    read = adapter.validate_json(json.dumps({label: own}), strict=True)
    return NamedCorrection(label, str(name), read[label])


def _error(kind: Any, label: str, value: Any) -> ValidationError:
    error = InitErrorDetails(type=kind, loc=(label,), input=value)
    return ValidationError.from_exception_data("correction", [error])


class Section(Spec):
    """A section that serves several packages: the rules of each of its specifications hold."""

    def check(self, key: str) -> None:
        # By name: Python would call the first base's alone.
        for part in type(self).__bases__:
            if issubclass(part, Spec) and part is not Section:
                part.check(self, key)


# pydantic lists the keys of the last base first
class AlgorithmSection(Section, SelectionSpec, ObjectiveSpec):
    """`algorithm`: the objective, and the selection of samples."""


class ClusterSection(Section, TransportSpec, SupervisionSpec, RaySpec):
    """`cluster`: processes, their supervision, and the transport of weights and records."""

    buffer_mib: int = setting(1024, "payload bytes the buffer may hold", unit="MiB", gt=0)
    launch: LaunchSpec = LaunchSpec()


class ActorSection(Section, ActorSpec):
    """`actor.LABEL`: engines of one kind, and the treatment of their samples."""

    correction: CorrectionList | None = setting(
        None, "corrections of their samples, as the section correction; null: that section"
    )
    share: ShareSpec | None = setting(
        None, "share of new groups that they sample; null: by load, of what others leave"
    )
    price: float | None = setting(
        None, "of one engine an hour, in any unit of money; null: not compared", gt=0
    )
    target: TargetSpec | None = setting(None, "set-point of their mismatch; null: none")


class TeacherSection(Section, TeacherSpec):
    """`teacher`: a policy that the trained one is led to, and the engine that may hold it."""

    engine: TeacherEngineSpec = TeacherEngineSpec()

    def check(self, key: str) -> None:
        super().check(key)
        refuse(
            self.kind != "engine" and self.engine != TeacherEngineSpec(),
            f"{key}.engine has settings of an engine that {key}.kind={self.kind} does not have: "
            f"use {key}=engine, or leave them out.",
        )


def task_form(value: Any) -> Literal["one", "several"]:
    """Return whether `task` holds the keys of one task, or tasks by label."""
    if isinstance(value, Mapping) and value and not set(value) & set(TaskSpec.model_fields):
        return "several"
    return "one"


class MixedTask(MixedTaskSpec):
    """`task.LABEL`: one task of several, and how its episodes are played."""

    environment: EnvironmentSpec | None = setting(
        None, "as the section environment, or the name of an environment; null: that section"
    )


TaskSection = Annotated[
    Annotated[TaskSpec, Tag("one")] | Annotated[dict[str, MixedTask], Tag("several")],
    Discriminator(task_form),
]
# Settings of `rollout` that a task of several may have of its own.
OWN_ROLLOUT = ("samples_per_prompt", "max_new_tokens", "stop", "temperature")


class RunConfig(Spec):
    """Every setting of a run."""

    fixed: ClassVar[Mapping[str, str]] = {"seed": Fixed.PROBLEMS}

    run_dir: str = setting(
        min_length=1,
        meaning="folder of this run: configuration, metrics, checkpoints, samples, report",
        names="path",
    )
    seed: int = setting(0, "of all random numbers")
    resume: Literal["never", "auto"] = setting(
        "never", "auto: continue from the newest valid checkpoint in run_dir"
    )
    takeover_after_s: float | None = setting(
        None,
        "take run_dir over from a command on another host that has not renewed owner.json for so "
        "long, as a host that died leaves it; null: never",
        unit="s",
        ge=60,
    )
    bitwise: bool = setting(
        False,
        "CPU, synchronous: actors and learner compute log-probs that are equal to the bit, slower",
    )
    model: ModelSpec
    task: TaskSection = setting(meaning="one task, or several by label")
    environment: EnvironmentSpec = EnvironmentSpec()
    actor: dict[str, ActorSection] = setting(
        min_length=1, meaning="by label; several make a mixed fleet"
    )
    rollout: RolloutSpec = RolloutSpec()
    correction: CorrectionList = CorrectionList()
    algorithm: AlgorithmSection = AlgorithmSection()
    schedule: ScheduleSpec = ScheduleSpec()
    learner: LearnerSpec = LearnerSpec()
    critic: CriticSpec = CriticSpec()
    teacher: TeacherSection = TeacherSection()
    cluster: ClusterSection = ClusterSection()
    evaluation: EvaluationSpec = EvaluationSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    logging: LoggingSpec = LoggingSpec()

    @property
    def correction_lists(self) -> dict[str, CorrectionList]:
        """Every list of corrections by its key: the run's, and the lists of kinds of actors."""
        own = {f"actor.{label}.correction": a.correction for label, a in self.actor.items()}
        return {"correction": self.correction} | {k: v for k, v in own.items() if v is not None}

    @property
    def shadow_lists(self) -> dict[str, CorrectionList]:
        """The lists that are measured in addition to the run's, by key."""
        return {f"correction.shadow.{i}": one for i, one in enumerate(self.correction.shadow)}

    @property
    def strata(self) -> tuple[Stratum, ...]:
        """The kinds of actors by the corrections and statistics that they share; empty: one."""
        if len(self.actor) == 1:
            return ()
        lists = {n: (a.correction or self.correction).chosen() for n, a in self.actor.items()}
        if self.correction.strata == "kind":
            return tuple(Stratum((label,), chosen) for label, chosen in lists.items())
        different = [c for i, c in enumerate(lists.values()) if c not in list(lists.values())[:i]]
        return tuple(Stratum(tuple(n for n in lists if lists[n] == c), c) for c in different)

    @property
    def tasks(self) -> dict[str, TaskSpec]:
        """The tasks that are trained on, by label."""
        if isinstance(self.task, TaskSpec):
            return {self.task.label: self.task}
        return dict(self.task)

    @property
    def mixed(self) -> bool:
        """True if `task` holds tasks by label, even a single one."""
        return not isinstance(self.task, TaskSpec)

    def task_key(self, label: str) -> str:
        """The key of a training task's settings."""
        return f"task.{label}" if self.mixed else "task"

    @property
    def grading(self) -> GradingSpec:
        """The grading of tasks that are only evaluated: as the first training task's."""
        return next(iter(self.tasks.values()))

    def advantage_of(self, label: str) -> tuple[str, str]:
        """(key, name) of a training task's advantage."""
        own = getattr(self.tasks[label], "advantage", None)
        if own is not None:
            return f"{self.task_key(label)}.advantage", str(own)
        return "algorithm.advantage", self.algorithm.advantage

    def environment_of(self, label: str) -> EnvironmentSpec:
        """The environment that plays the episodes of a training task."""
        own: EnvironmentSpec | None = getattr(self.tasks[label], "environment", None)
        return self.environment if own is None else own

    def environment_key(self, label: str) -> str:
        """The key of a task's environment."""
        own = getattr(self.tasks[label], "environment", None) is not None
        return f"{self.task_key(label)}.environment" if own else "environment"

    @property
    def played(self) -> dict[str, EnvironmentSpec]:
        """The environment of each training task whose episodes have several turns, by label."""
        found = {label: self.environment_of(label) for label in self.tasks}
        return {label: spec for label, spec in found.items() if spec.played}

    @property
    def teacher_folder(self) -> str | None:
        """The folder of the one model that a teacher is. None: it has no model, one a task, or the
        model of a draft actor, which is not made yet."""
        label = self.teacher.actor
        return self.teacher.path if label is None else self.actor[label].draft_path

    def most_sampled(self, label: str) -> int:
        """Tokens that the model samples in an episode of a training task, at most."""
        turns = self.played[label].max_turns if label in self.played else 1
        return min(turns * self.rollout_of(label).max_new_tokens, self.model.max_len - 1)

    def rollout_of(self, label: str) -> RolloutSpec:
        """`rollout` with the settings of a training task."""
        spec = self.tasks[label]
        if not isinstance(spec, MixedTaskSpec):
            return self.rollout
        own = {name: getattr(spec, name) for name in OWN_ROLLOUT}
        given = {name: value for name, value in own.items() if value is not None}
        return self.rollout.model_copy(update=given)
