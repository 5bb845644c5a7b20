"""Settings whose value names an implementation, and the registries that hold the shipped ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rlcore.config.schema import RunConfig
from rlcore.config.sentences import closest
from rlcore.environments import ENVIRONMENTS
from rlcore.errors import UserError
from rlcore.interfaces import RolloutEngine
from rlcore.learner.registry import ENGINES as LEARNER_ENGINES
from rlcore.objectives.protocols import Advantage, PolicyLoss
from rlcore.objectives.registry import ADVANTAGES, LOSSES
from rlcore.registry import resolve
from rlcore.rollout.registry import ENGINES as ROLLOUT_ENGINES

# LABEL stands for a label of the run.
REGISTRIES: Mapping[str, Mapping[str, str]] = {
    "algorithm.advantage": ADVANTAGES,
    "algorithm.loss": LOSSES,
    "task.LABEL.advantage": ADVANTAGES,
    "learner.engine": LEARNER_ENGINES,
    "actor.LABEL.engine": ROLLOUT_ENGINES,
    "environment.name": ENVIRONMENTS,
    "task.LABEL.environment.name": ENVIRONMENTS,
}


def registered(key: str) -> tuple[str, ...]:
    """Names that a setting takes besides a user's own; empty for one that names nothing."""
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
    """Import a loss or an advantage that the user names by path: rules on the configuration ask for
    its traits. Raises UserError for what is no such class."""
    for key, name, registry in named(config):
        if registry is LOSSES or registry is ADVANTAGES:
            _load(key, name, registry)


def load_own(config: RunConfig) -> None:
    """Import what the user names by path, so that a mistake shows before anything starts.

    Shipped implementations are left to the processes that need them: they import torch or vLLM.
    Raises UserError.
    """
    for key, name, registry in named(config):
        _load(key, name, registry)


def _load(key: str, name: str, registry: Mapping[str, str]) -> None:
    # Environments check their own; the protocol of learner engines would import torch.
    likes = {id(ROLLOUT_ENGINES): RolloutEngine, id(ADVANTAGES): Advantage, id(LOSSES): PolicyLoss}
    if name not in registry:
        resolve(registry, name, key=key, like=likes.get(id(registry)))
