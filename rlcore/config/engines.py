"""The engines of a run, and the settings that an engine does not read: refused where it would
compute something else than they say, else named (`config/unread.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from rlcore.config.parts import PARTS
from rlcore.config.schema import RunConfig
from rlcore.config.sentences import written
from rlcore.engine_facts import EngineFacts, foreign
from rlcore.learner.specs import ENGINES, LearnerSpec
from rlcore.registry import load_object, resolve
from rlcore.rollout.specs import ActorSpec
from rlcore.spec import refuse

BASE = "rlcore.learner.protocols:TrainEngine"  # by path, since it imports torch
# values of actor.LABEL.kind that say which weights an actor has, and nothing of its engine
ANY_ENGINE = ("bf16", "draft")


class EngineOf(NamedTuple):
    """A section that names an engine."""

    key: str
    spec: LearnerSpec | ActorSpec
    facts: type[EngineFacts]

    def unread(self) -> Iterator[str]:
        """Settings of the section that are set and that the engine does not read."""
        for name in foreign(self.spec, self.spec.engine_settings, self.facts):
            if name != "kind" or getattr(self.spec, name) not in ANY_ENGINE:
                yield name


def engines(c: RunConfig) -> Iterator[EngineOf]:
    """Every engine of a run. Raises UserError for a user's own class that cannot be loaded."""
    yield EngineOf("learner", c.learner, c.learner.facts)
    for label, actor in c.actor.items():
        key = f"actor.{label}"
        yield EngineOf(key, actor, actor.facts(key))


def _asked_for(c: RunConfig) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """Settings that need optional methods of a training engine: (setting, methods, remedy)."""
    if c.learner.step_bound is not None:
        said = f"learner.step_bound={c.learner.step_bound:g}"
        yield said, ("rate", "hold"), "learner.step_bound=null"
    for part in PARTS:
        if part.methods and part.setting(c):
            yield part.setting(c), part.methods, part.without


def _check_methods(c: RunConfig) -> None:
    """Check that a training engine of a user's own has the methods that settings ask for."""
    if c.learner.engine in ENGINES:
        return
    base = load_object(BASE)
    own = resolve(ENGINES, c.learner.engine, key="learner.engine", like=base)
    for said, methods, remedy in _asked_for(c):
        lacking = [n for n in methods if getattr(own, n, None) in (None, getattr(base, n))]
        refuse(
            bool(lacking),
            f"{said} needs {' and '.join(methods)} of a training engine, and learner.engine="
            f"{c.learner.engine} lacks {' and '.join(lacking)}: set {remedy}.",
        )


def check_engines(c: RunConfig) -> None:
    """Raise UserError for settings that an engine refuses, or would have to read and does not."""
    _check_methods(c)
    for key, spec, facts in engines(c):
        facts.refuse(spec, key)
    for engine in engines(c):
        for name in engine.unread():
            default = type(engine.spec).model_fields[name].default
            refuse(
                engine.spec.engine_settings[name],
                f"{engine.key}.{name}={written(getattr(engine.spec, name))} is not read by "
                f"{engine.key}.engine={engine.spec.engine}: leave it at {written(default)}, or "
                f"name {name} in `facts.reads` of the engine's class if it does.",
            )


def check_engines_in_run(c: RunConfig) -> None:
    """Raise UserError for settings of an engine that do not fit the rest of the run."""
    for key, spec, facts in engines(c):
        facts.refuse_run(c, spec, key)
