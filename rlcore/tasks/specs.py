"""Settings of tasks and of the processes that grade them. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from rlcore.spec import Fixed, Spec, refuse, setting
from rlcore.tasks.rewards.specs import RewardSpec, check_labels

# The treatment of rows whose prompt is longer than the model can hold before an answer.
OverlongRows = Literal["refuse", "skip", "truncate_left"]


class EvalTaskSpec(Spec):
    """A task that is only evaluated; the training task's graders grade it too."""

    name: str = setting(
        meaning="a task of rlcore.tasks, e.g. digits, or path/to/file.py:Class", names="code"
    )
    args: dict[str, Any] = setting(default_factory=dict, meaning="keyword arguments of the task")
    max_prompt_tokens: int | None = setting(
        None,
        "longer prompts are what overlong_rows says; null: whatever leaves tokens for a response",
        unit="tokens",
        gt=0,
    )
    overlong_rows: OverlongRows = setting(
        "refuse",
        "rows with a longer prompt: the run is refused, they are left out, or their prompts lose "
        "their first tokens",
    )
    grader_text: Literal["clean", "raw"] = setting(
        "clean", "what graders and rewards see: responses without special tokens, or with them"
    )
    rewards: dict[str, RewardSpec] = setting(
        default_factory=dict,
        meaning="rewards that are added to the task's own grader's, by label",
    )
    grade_weight: float | None = setting(
        1.0,
        "what the task's own grader's reward is multiplied by; 0: shown in the metrics alone; "
        "null: it is not asked",
    )

    def check(self, key: str) -> None:
        super().check(key)
        check_labels(self.rewards, key)
        weights = [self.grade_weight, *(reward.weight for reward in self.rewards.values())]
        refuse(
            not any(weights),
            f"{key}.grade_weight={'null' if self.grade_weight is None else 0} leaves no reward: "
            f"give {key}.rewards.LABEL with a weight other than 0, or {key}.grade_weight=1.",
        )

    @property
    def weighed(self) -> bool:
        """True if the reward is more than the task's own grader's."""
        return bool(self.rewards) or self.grade_weight != 1.0

    @property
    def label(self) -> str:
        """First part of its prompt ids: the name, or the class name of a user's own."""
        return self.name.rpartition(":")[2].lower() if ":" in self.name else self.name


class GradingSpec(Spec):
    """The processes that grade."""

    grade_timeout_s: float = setting(10.0, "deadline of one grading", unit="s", gt=0)
    grader_processes: int = setting(1, "processes that grade", gt=0)
    grader_memory_mib: int = setting(
        4096, "address space of each grading process", unit="MiB", ge=256
    )


class DifficultySpec(Spec):
    """The pass rates of problems are remembered, and solved or hopeless problems are drawn less.

    A pass is a response whose part "correct" of the grade, or whose reward where the grader has no
    such part, is 1 or more, as in evaluations. A problem's rate is its newest group's.
    """

    resample_rate: float = setting(
        0.1, "share of the solved and the hopeless that is drawn when their turn comes", gt=0, le=1
    )
    solved: float = setting(1.0, "pass rate from which a problem is solved", gt=0, le=1)
    hopeless: float = setting(0.0, "pass rate up to which a problem is hopeless", ge=0, lt=1)
    problems: int | None = setting(
        None, "walk only the first so many problems; an endless task needs it; null: all", gt=0
    )

    def check(self, key: str) -> None:
        refuse(
            self.hopeless >= self.solved,
            f"{key}.hopeless={self.hopeless:g} is not below {key}.solved={self.solved:g}: no "
            "problem would be between.",
        )


class TaskSpec(EvalTaskSpec, GradingSpec):
    """A task that is trained on."""

    fixed: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("name", "args", "overlong_rows"), Fixed.PROBLEMS
    )

    difficulty: DifficultySpec | None = None


class MixedTaskSpec(TaskSpec):
    """One task of several, `task.LABEL`; where a setting is null, the run's own holds.

    Its label is the key, which is also the first part of its prompt ids.
    """

    fixed: ClassVar[Mapping[str, str]] = {"temperature": Fixed.SAMPLED}

    weight: float = setting(
        1.0, "its share of the prompts, relative to the other tasks'; 0: no more are drawn", ge=0
    )
    samples_per_prompt: int | None = setting(
        None, "group size; null: rollout.samples_per_prompt", gt=0
    )
    max_new_tokens: int | None = setting(
        None, "longest response; null: rollout.max_new_tokens", unit="tokens", gt=0
    )
    stop: tuple[str, ...] | None = setting(None, "strings that end a response; null: rollout.stop")
    temperature: float | None = setting(
        None, "of sampling; the learner applies the same; null: rollout.temperature", gt=0
    )
    advantage: str | None = setting(
        None,
        "how its rewards become advantages, or file.py:Class; null: algorithm.advantage",
        names="code",
    )
