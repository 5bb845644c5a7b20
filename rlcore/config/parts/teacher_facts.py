"""A policy that the trained one is led to, in the learner's ranks or in further engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlcore.config.parts.part_facts import NO_WORK, Adapted, HeldEngine, PartFacts, Work
from rlcore.config.places import tied_by
from rlcore.config.schema import RunConfig
from rlcore.corrections.dvp import DvpSpec
from rlcore.models.sizes import ModelSizes, Parts, folder_parameters, folder_sizes
from rlcore.objectives.specs import TeacherSpec
from rlcore.spec import Spec, refuse


class TeacherPart(PartFacts):
    """`teacher`."""

    name, without = "teacher", "teacher=none"
    in_rates = True

    def setting(self, c: RunConfig) -> str:
        return f"teacher.kind={c.teacher.kind}" if c.teacher.used else ""

    def check(self, c: RunConfig) -> None:
        """Require something that the run learns from."""
        refuse(
            c.algorithm.reward_weight == 0 and not c.teacher.used,
            "algorithm.reward_weight=0 leaves nothing to learn from without a teacher: use "
            "teacher=frozen, previous, policy or engine, or a weight above 0.",
        )
        super().check(c)

    def check_used(self, c: RunConfig) -> None:
        unknown = sorted(set(c.teacher.paths) - set(c.tasks))
        refuse(
            bool(unknown),
            f"teacher.paths has {', '.join(unknown)}, which is not a task of the run: it has "
            f"{', '.join(c.tasks)}.",
        )
        _context(c)
        _sampled(c)
        if c.teacher.kind == "engine":
            _engine(c)

    def job(self, c: RunConfig) -> Mapping[str, Any]:
        return {"teacher": c.teacher}

    def described(self, c: RunConfig) -> Mapping[str, Spec]:
        return {"teacher": c.teacher}

    def memory(self, c: RunConfig, sizes: ModelSizes, adapted: Adapted) -> Parts:
        """Bytes of the teacher's models; a folder of unusual names counts as the policy."""
        if c.teacher.kind not in ("frozen", "previous"):
            return {}
        found = [sizes if path is None else folder_sizes(path) or sizes for path in _paths(c)]
        facts = c.learner.facts
        return {"teacher": sum(facts.frozen_bytes(own, c.learner) for own in found)}

    def work(self, c: RunConfig, parameters: float) -> Work:
        """Scores are taken before a phase, or in each pass over the whole vocabulary. An episode
        behind a context is taken for two, and of several teachers the largest for all tasks."""
        spec = c.teacher
        if not spec.used or spec.kind == "engine":
            return NO_WORK
        most = max(parameters if path is None else folder_parameters(path) for path in _paths(c))
        cost = 2 * most * (1 if spec.context == "none" else 2)
        return Work(step_flops=cost) if spec.top_k is None else Work(phase_flops=cost)

    def unplanned(self, c: RunConfig, *, by_gpu: bool) -> str:
        if not by_gpu or c.teacher.kind != "engine" or c.teacher.engine.num_gpus:
            return ""
        return (
            "teacher.engine.num_gpus=0 scores on CPUs, of which gpu= knows no rate: set 1, or give "
            "rates=FILE, of a run with such an engine."
        )

    def engines(self, c: RunConfig) -> Iterator[HeldEngine]:
        if c.teacher.kind == "engine":
            key = "teacher.engine"
            yield HeldEngine("teacher", key, c.teacher.engine.actor, c.teacher_folder)

    def models(self, c: RunConfig) -> Mapping[str, str]:
        spec = c.teacher
        found = {f"teacher.paths.{task}": path for task, path in spec.paths.items()}
        return found | ({"teacher.path": spec.path} if spec.path is not None else {})

    def plain(self, c: RunConfig) -> RunConfig:
        return c.model_copy(update={"teacher": TeacherSpec()})


def _paths(c: RunConfig) -> list[str | None]:
    """Folders of its models; None: the policy's."""
    return [*c.teacher.paths.values()] or [c.teacher.path]


def _context(c: RunConfig) -> None:
    """A context that at least some episodes can have."""
    context = c.teacher.context
    alone = [n for n in c.tasks if c.rollout_of(n).samples_per_prompt < 2]
    refuse(
        context == "best" and bool(alone),
        "teacher.context=best needs several answers to a prompt, and "
        f"{c.task_key(alone[0]) if c.mixed and alone else 'rollout'}.samples_per_prompt=1: use 2 "
        "or more, or another context.",
    )
    plain = [n for n in c.tasks if n not in c.played]
    refuse(
        context == "feedback" and bool(plain),
        f"teacher.context=feedback reads what an environment has answered, and task "
        f"{plain[0] if plain else ''} has answers of one turn: use an environment (attempts), or "
        "context=best.",
    )


def _sampled(c: RunConfig) -> None:
    """An estimate by the sampled token has the ratio of whole distributions."""
    if c.teacher.top_k is None or c.teacher.tail != "sampled":
        return
    dvp = any(
        isinstance(spec, DvpSpec)
        for corrections in c.correction_lists.values()
        for spec in corrections.chosen().values()
    )
    truncated = c.rollout.sampling().truncates
    refuse(
        dvp or truncated,
        f"teacher.tail=sampled takes log-probs over the whole vocabulary, and "
        f"{'correction=dvp' if dvp else 'rollout.top_p, top_k or min_p'} conditions them on a "
        "part: use teacher.tail=bucket or drop.",
    )


def _engine(c: RunConfig) -> None:
    """An engine has a model that stays as it is, scores at temperature 1, has its own resources,
    and is asked before a sample counts as lost."""
    label = c.teacher.actor
    own = [name for name, actor in c.actor.items() if actor.own_model]
    refuse(
        label is not None and label not in own,
        f"teacher.actor={label} is not a draft actor of the run, which has "
        f"{', '.join(own) or 'none'}: only a draft has its own model; the policy teaches "
        "itself with teacher=policy or previous.",
    )
    for name in c.tasks:
        key = c.task_key(name) if c.mixed else "rollout"
        temperature = c.rollout_of(name).temperature
        refuse(
            temperature != 1.0,
            f"{key}.temperature={temperature:g} is not what teacher.kind=engine scores at: use 1, "
            "or teacher=frozen.",
        )
    tied = tied_by(c)
    refuse(
        tied is not None,
        f"{tied} ties every engine to the GPU of a learner rank, and teacher.kind=engine has none: "
        "use whole GPUs and schedule.colocated=false, or teacher=frozen.",
    )
    late, lost = c.teacher.engine.timeout_s, c.rollout.request_timeout_s
    refuse(
        late >= lost,
        f"teacher.engine.timeout_s={late:g} holds a record back for as long as after which it "
        f"counts as lost, rollout.request_timeout_s={lost:g}: give less.",
    )
