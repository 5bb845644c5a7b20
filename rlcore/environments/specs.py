"""Settings of environments. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rlcore.models.specs import TemplateSpec
from rlcore.spec import Fixed, Spec, Unread, setting
from rlcore.tasks.specs import EvalTaskSpec


class EnvironmentSpec(Spec):
    """How an episode of several turns is played; without a name every answer is one turn."""

    unread: ClassVar[tuple[Unread, ...]] = (
        Unread(
            (
                "args",
                "max_turns",
                "max_observation_tokens",
                "step_timeout_s",
                "episode_timeout_s",
                "concurrency",
                "memory_mib",
            ),
            lambda spec: not spec.played,
            "name=null plays no environment",
        ),
    )
    fixed: ClassVar[Mapping[str, str]] = dict.fromkeys(("name", "args"), Fixed.ASKED)

    name: str | None = setting(
        None,
        "an environment of rlcore.environments, e.g. higher_lower, or path/to/file.py:Class; null: "
        "one turn, graded by the task",
        names="code",
    )
    args: dict[str, Any] = setting(
        default_factory=dict, meaning="keyword arguments of the environment"
    )
    max_turns: int = setting(8, "turns of the model, after which the episode is graded", gt=0)
    max_observation_tokens: int = setting(
        1024,
        "longest messages after a turn; more is cut, and a note in them says so",
        unit="tokens",
        gt=0,
    )
    step_timeout_s: float = setting(
        30.0, "deadline of one call of an environment: reset, step, grade", unit="s", gt=0
    )
    episode_timeout_s: float = setting(
        600.0, "deadline of a whole episode, sampling included", unit="s", gt=0
    )
    concurrency: int = setting(
        64, "episodes that one actor plays at once, each in its own process", gt=0
    )
    memory_mib: int = setting(
        4096,
        "resident memory of an environment's process, with all that it starts",
        unit="MiB",
        ge=256,
    )

    @property
    def played(self) -> bool:
        """True if the run has an environment."""
        return self.name is not None


@dataclass(frozen=True, slots=True)
class EnvironmentJob:
    """The settings that an actor plays episodes with.

    Example: EnvironmentJob(EnvironmentSpec(name="task"), EvalTaskSpec(name="digits"), "digits",
    max_len=128)
    """

    environment: EnvironmentSpec
    task: EvalTaskSpec  # whose problems are played
    label: str  # of its prompt ids; requests of other tasks are answered in one turn
    max_len: int  # tokens of a part
    run_seed: int = 0
    stop: tuple[str, ...] = ()  # strings that end a turn, and that its text is cut before
    template: TemplateSpec = field(default_factory=TemplateSpec)
