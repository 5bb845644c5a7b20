"""Settings that nothing reads under a run's other settings.

A specification declares itself which settings its own settings make dead (`Spec.unread`); rules
across sections are here. A run is warned of each that it sets, since it has no effect.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlcore.config.engines import engines
from rlcore.config.schema import RunConfig
from rlcore.config.sentences import specifications, written
from rlcore.corrections.specs import CorrectionSpec
from rlcore.objectives.specs import loss_class


def unread(c: RunConfig) -> list[str]:
    """A sentence on each setting of a run that nothing reads under its other settings. A setting at
    its default is not mentioned, since no user relies on it."""
    found = []
    between = _between(c)
    for key, spec in specifications(c):
        # what `auto` is depends on the objective
        decided = spec.under(c.algorithm) if isinstance(spec, CorrectionSpec) else spec
        for name, why in (dict(decided.dead()) | between.get(key, {})).items():
            value = getattr(spec, name)
            default = type(spec).model_fields[name].get_default(call_default_factory=True)
            if value != default:
                found.append(
                    f"{key}.{name}={written(value)} is not read, since {why}: leave it at "
                    f"{written(default)}"
                )
    return found


def _between(c: RunConfig) -> dict[str, dict[str, str]]:
    """Section -> setting -> why settings of another section make it dead."""
    found: dict[str, dict[str, str]] = {}
    if (off := next(_clips_off(c), None)) is not None:
        found["algorithm"] = dict.fromkeys(("eps_low", "eps_high"), off)
    if c.schedule.on_publish != "in_flight":
        why = f"schedule.on_publish={c.schedule.on_publish} lets no request keep its keys"
        found |= {f"actor.{label}": {"kv_on_update": why} for label in c.actor}
    for rule in ("fallen", "answer_kl"):
        if not getattr(c.logging.warnings, rule):
            why = f"logging.warnings.{rule}=0 sees no policy that is lost"
            found["schedule"] = {"on_collapse": why}
    if not (c.cluster.cpu_fast_paths or c.schedule.synchronous):
        why = "cluster.cpu_fast_paths=false leaves a rank the threads of learner.num_cpus"
        found["learner"] = {"max_threads": why}
    if c.learner.num_gpus and not any(actor.on_cpu for actor in c.actor.values()):
        found["cluster"] = {"cpu_fast_paths": "learner and actors are on GPUs"}
    for engine in engines(c):
        why = f"{engine.key}.engine={engine.spec.engine} does not read it"
        found[engine.key] = found.get(engine.key, {}) | dict.fromkeys(engine.unread(), why)
    if len(c.actor) == 1:
        found["correction"] = {"strata": "all actors are of one kind"}
    return found


def _clips_off(c: RunConfig) -> Iterator[str]:
    """The reasons why the loss clips no ratio, if it clips none."""
    for label, spec in c.correction.chosen().items():
        if spec.inner_clip_off:
            yield f"correction.{label}.{spec.inner_clip_off}=true switches the clip off"
    if not loss_class(c.algorithm.loss).clips:
        yield f"loss={c.algorithm.loss} clips nothing"
