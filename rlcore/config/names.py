"""Settings whose value names an implementation, and the registries of shipped implementations."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import get_args

from rlcore.config.schema import RunConfig
from rlcore.config.sentences import closest
from rlcore.corrections.specs import CORRECTIONS
from rlcore.environments import ENVIRONMENTS
from rlcore.errors import UserError
from rlcore.launch.specs import LaunchSpec
from rlcore.learner.specs import ENGINES as LEARNER_ENGINES
from rlcore.objectives.specs import ADVANTAGES, LOSSES
from rlcore.registry import load_object, resolve
from rlcore.rollout.specs import ENGINES as ROLLOUT_ENGINES
from rlcore.rollout.specs import ActorSpec
from rlcore.tasks import TASKS
from rlcore.weights.specs import GROUP_TRANSPORTS, TRANSPORTS

ALL_TRANSPORTS: Mapping[str, str] = {**TRANSPORTS, **GROUP_TRANSPORTS}
# LABEL stands for a label of the run.
REGISTRIES: Mapping[str, Mapping[str, str]] = {
    "algorithm.advantage": ADVANTAGES,
    "algorithm.loss": LOSSES,
    "task.LABEL.advantage": ADVANTAGES,
    "learner.engine": LEARNER_ENGINES,
    "actor.LABEL.engine": ROLLOUT_ENGINES,
    "cluster.transport": ALL_TRANSPORTS,
    "environment.name": ENVIRONMENTS,
    "task.LABEL.environment.name": ENVIRONMENTS,
}

# Groups whose options are one for each entry: where the entries are, the entries, other options.
ENTRIES: Mapping[str, tuple[str, Collection[str], Collection[str]]] = {
    "correction": ("CORRECTIONS of rlcore/corrections/specs.py", CORRECTIONS, ("none",)),
    "task": ("TASKS of rlcore/tasks/__init__.py", TASKS, ("own",)),
    "environment": ("ENVIRONMENTS of rlcore/environments/__init__.py", ENVIRONMENTS, ("none",)),
    "actor": (
        "ActorSpec.kind of rlcore/rollout/specs.py",
        get_args(ActorSpec.model_fields["kind"].annotation),
        (),
    ),
    "cluster": (
        "LaunchSpec.kind of rlcore/launch/specs.py",
        get_args(LaunchSpec.model_fields["kind"].annotation),
        ("auto",),
    ),
}


def check_registered(found: Mapping[str, Mapping[str, Path]], folder: Path) -> None:
    """Raise UserError for a shipped option without an entry, or an entry without an option.

    `found`: group -> option -> file of `folder`, the shipped one. A user's own folder may have
    options of any name.
    """
    for group, (place, entries, further) in ENTRIES.items():
        options = found.get(group, {})
        for name in entries:
            if name not in options:
                raise UserError(
                    f"{folder / group / name}.yaml is missing: {place} has {name}, which "
                    f"{group}={name} selects by that file."
                )
        for option, file in options.items():
            if option not in entries and option not in further:
                raise UserError(
                    f"{file} has no entry: add {option} to {place}, or remove the file; the "
                    f"entries are {', '.join(entries)}."
                )
    for group in found:
        if group != "experiment" and group not in RunConfig.model_fields:
            raise UserError(
                f"{folder / group} is the folder of no section: RunConfig of "
                f"rlcore/config/schema.py has {', '.join(RunConfig.model_fields)}."
            )


# Base class of a user's own implementation, by registry; given by path, since some import torch.
# Environments need not inherit and check their classes themselves.
BASES: Mapping[int, str] = {
    id(ADVANTAGES): "rlcore.objectives.protocols:Advantage",
    id(LOSSES): "rlcore.objectives.protocols:PolicyLoss",
    id(LEARNER_ENGINES): "rlcore.learner.protocols:TrainEngine",
    id(ALL_TRANSPORTS): "rlcore.interfaces:WeightTransport",
    id(ROLLOUT_ENGINES): "rlcore.interfaces:RolloutEngine",
}


def registered(key: str) -> tuple[str, ...]:
    """Shipped names that a setting accepts; empty for a setting that names no implementation."""
    return tuple(REGISTRIES.get(key, ()))


def named(config: RunConfig) -> Iterator[tuple[str, str, Mapping[str, str]]]:
    """(key, value, registry) of every setting of a run that names an implementation."""
    for pattern, registry in REGISTRIES.items():
        group, _, leaf = pattern.rpartition(".")
        if group == "task.LABEL.environment":
            for label, environment in config.played.items():
                if (key := config.environment_key(label)) != "environment":
                    yield f"{key}.{leaf}", environment.name or "", registry
            continue
        if group == "actor.LABEL":
            for label, actor in config.actor.items():
                yield f"actor.{label}.{leaf}", getattr(actor, leaf), registry
        elif group == "task.LABEL":
            for label, task in config.tasks.items():
                if (name := getattr(task, leaf, None)) is not None:
                    yield f"task.{label}.{leaf}", name, registry
        else:
            name = getattr(getattr(config, group), leaf)
            if name is not None:
                yield pattern, name, registry


def check_names(config: RunConfig) -> None:
    """Raise UserError for a name that is neither shipped nor a user's own. Imports nothing."""
    for key, name, registry in named(config):
        # Resolving it would import torch or vLLM before a wrong name could be reported.
        if name not in registry and ":" not in name:
            choices = [*registry, "path/to/file.py:Class"]
            raise UserError.choice(key, name, choices, closest(name, registry))


def load_objectives(config: RunConfig) -> None:
    """Import a loss or an advantage that the user names by path, since rules on the configuration
    read its class attributes. Raises UserError if it is not such a class."""
    for key, name, registry in named(config):
        if registry is LOSSES or registry is ADVANTAGES:
            _load(key, name, registry)


def load_own(config: RunConfig) -> None:
    """Import the implementations that the user names by path, so that a mistake shows before a
    process starts.

    Shipped implementations are left to the processes that need them: they import torch or vLLM.
    Raises UserError.
    """
    for key, name, registry in named(config):
        _load(key, name, registry)


def _load(key: str, name: str, registry: Mapping[str, str]) -> None:
    if name not in registry:
        base = BASES.get(id(registry))
        resolve(registry, name, key=key, like=load_object(base) if base else None)
