"""Settings of the loop: schedule, supervision, evaluation, run checkpoints. No torch, no Ray."""

from __future__ import annotations

from collections.abc import Mapping
from math import cos, pi
from typing import Any, ClassVar, Literal

from pydantic import model_validator

from rlcore.buffer.specs import BatchingSpec, Phases
from rlcore.spec import Spec, Unread, refuse, setting
from rlcore.tasks.specs import DifficultySpec, EvalTaskSpec, OverlongRows
from rlcore.types import OnPublish

__all__ = ["DifficultySpec", "OverlongRows", "Phases"]  # the loop plans by them


class ShareSpec(Spec):
    """The share of new groups that a kind of actors samples, over the steps of a run; a number is
    one that stays. Example: ShareSpec(shape="linear", start=1.0, end=0.0, steps=100)"""

    shape: Literal["constant", "linear", "cosine"] = setting("constant", "from start to end")
    start: float = setting(meaning="share at step 0", ge=0, le=1)
    end: float | None = setting(None, "share from `steps` on; null: as at the start", ge=0, le=1)
    steps: int = setting(0, "until the end is reached", unit="optimizer steps", ge=0)

    @model_validator(mode="before")
    @classmethod
    def _from_number(cls, data: Any) -> Any:
        number = isinstance(data, int | float) and not isinstance(data, bool)
        return {"start": float(data)} if number else data

    def at(self, step: int) -> float:
        """The share of groups that are admitted after this many steps."""
        if self.shape == "constant" or self.end is None:
            return self.start
        done = min(1.0, step / self.steps)
        if self.shape == "cosine":
            done = (1.0 - cos(pi * done)) / 2.0
        return self.start + (self.end - self.start) * done

    def check(self, key: str) -> None:
        moves = self.shape != "constant"
        refuse(
            moves != (self.end is not None) or moves != bool(self.steps),
            f"{key}.shape={self.shape} {'needs' if moves else 'takes no'} {key}.end and "
            f"{key}.steps: choose constant for a share that stays, linear or cosine for one that "
            "moves.",
        )


class TargetSpec(Spec):
    """A set-point of the mismatch of a kind of actors: a setting that bounds their deviation is
    moved so that the statistic stays at the value.

    Examples: TargetSpec(statistic="p05", value=0.86), TargetSpec(moves="pages")"""

    statistic: Literal["p05"] = setting(
        "p05", "5th percentile of min(r, 1/r), r = p_ref/p_inf, over the kind's tokens of a step"
    )
    moves: Literal["staleness", "pages", "layers", "share"] = setting(
        "staleness",
        "staleness: up to schedule.max_staleness; pages: sparse.blocks_by_length, each by the "
        "tokens of its positions; layers: precise_layers, with publications; share: of new "
        "groups, below actor.LABEL.share, by all tokens",
    )
    value: float = setting(0.86, "of the statistic", gt=0, lt=1)
    least: float | None = setting(
        None,
        "lower bound of what is moved; null: a staleness of 1, 2 pages, no layer, a twentieth of "
        "the share",
        ge=0,
    )
    most: int | None = setting(None, "moves=layers: upper bound, such as all layers", gt=0)
    rate: float = setting(
        0.1, "part of the range that a step moves at most, at an agreement of 1", gt=0, le=1
    )
    band: float = setting(0.02, "distance from the value at which nothing moves", ge=0)


class ScheduleSpec(BatchingSpec):
    """How long a run is, and how generation and learning interleave."""

    fixed: ClassVar[Mapping[str, str]] = {
        "lag": "batches in the checkpoint's buffer have the age that it gave them"
    }

    unread: ClassVar[tuple[Unread, ...]] = (
        Unread(
            ("on_publish",),
            lambda spec: spec.synchronous,
            "max_staleness=0 has no sample running then",
        ),
        Unread(
            ("on_publish",),
            lambda spec: spec.lag is not None,
            "lag has no sample running then",
        ),
        Unread(
            ("max_rollbacks",),
            lambda spec: spec.on_collapse != "rollback",
            "only on_collapse=rollback goes back",
        ),
        Unread(
            ("steps_per_publish",),
            lambda spec: spec.synchronous and spec.publish_period > spec.steps_per_publish,
            "max_staleness=0 publishes after whole phases, which are longer",
        ),
    )

    steps: int = setting(20, "optimizer steps of the run", gt=0)
    on_publish: OnPublish = setting(
        "finish", "what actors do with running samples when new weights come"
    )
    colocated: bool = setting(
        False,
        "engines and learner on the same GPUs, in turn: engines sleep while a phase is trained",
    )
    on_collapse: Literal["hold", "rollback", "stop", "off"] = setting(
        "hold",
        "when logging.warnings.fallen and answer_kl speak: hold gives up what was sampled; "
        "rollback goes on from the newest checkpoint before them with half learner.lr; stop: exit "
        "code 4",
    )
    max_rollbacks: int = setting(3, "on_collapse=rollback: times in a run; then it stops", ge=0)
    wait_data_timeout_s: float = setting(
        600.0, "a learner without data for longer ends the run", unit="s", gt=0
    )
    publish_timeout_s: float = setting(300.0, "deadline of a publish", unit="s", gt=0)
    step_timeout_s: float = setting(1800.0, "deadline of an optimizer step", unit="s", gt=0)
    wait_space_timeout_s: float = setting(
        3600.0,
        "a full disk that leaves no space for the row of a step for longer ends the run",
        unit="s",
        gt=0,
    )

    def check(self, key: str) -> None:
        super().check(key)
        refuse(
            self.on_publish == "in_flight" and self.synchronous,
            f"{key}.on_publish=in_flight is pointless with {key}.max_staleness=0, since nothing "
            "is in flight when weights are published: use on_publish=finish, or max_staleness=1 "
            "or more.",
        )
        if self.colocated:
            self._check_colocated(key)

    def _check_colocated(self, key: str) -> None:
        refuse(
            not self.synchronous,
            f"{key}.colocated=true gives the GPUs to engines and learner in turn, and {key}."
            f"max_staleness={self.max_staleness} has them work at the same time: use "
            "max_staleness=0.",
        )
        phase = self.phases.steps
        refuse(
            phase < self.publish_period,
            f"{key}.colocated=true ends every phase with a publication, which wakes the engines, "
            f"and {key}.steps_per_publish={self.steps_per_publish} spans several phases of {phase} "
            "steps: leave steps_per_phase null.",
        )


SILENT_S = 40.0  # a process is named whose silence is longer, whatever its deadline


class SupervisionSpec(Spec):
    """When a role counts as lost, and how often it may be."""

    start_timeout_s: float = setting(
        300.0,
        "deadline for every role to come up; GPU actors that compile with a cold cache need more",
        unit="s",
        gt=0,
    )
    heartbeat_s: float = setting(5.0, "between two heartbeats of every role", unit="s", gt=0)
    hang_timeout_s: float = setting(120.0, "an actor silent for longer is replaced", unit="s", gt=0)
    max_restarts: int = setting(
        10, "times an hour that a rollout actor is replaced before the run ends", ge=0
    )
    max_recoveries: int = setting(
        3,
        "recoveries in a row (learner, buffer or Ray's head died) without a newer checkpoint",
        ge=0,
    )

    first_failures: int = setting(
        128,
        "a run whose first so many samples all fail to be scored, for one reason, ends with it; 0: "
        "it goes on",
        unit="samples",
        ge=0,
    )

    @property
    def suspect_after_s(self) -> float:
        """An actor that leaves a heartbeat unanswered for longer is given no more work, and others
        are asked for what it holds. That is within a minute, and before it counts as hung."""
        longest = max(3 * self.heartbeat_s, self.hang_timeout_s / 8)
        return min(self.hang_timeout_s, longest, SILENT_S)


class EvaluatedTaskSpec(EvalTaskSpec):
    """A task that is only evaluated, and how; where a setting is null, `evaluation` holds.

    Example: EvaluatedTaskSpec(name="math", samples=16, temperature=0.6, top_p=0.95, greedy=False)
    """

    prompts: int | None = setting(None, "held-out prompts; null: evaluation.prompts", gt=0)
    samples: int | None = setting(None, "answers to each; null: evaluation.samples", gt=0)
    report_k: tuple[int, ...] | None = setting(
        None, "k of mean@k, pass@k and majority@k; null: evaluation.report_k"
    )
    greedy: bool | None = setting(None, "also the greedy answer; null: evaluation.greedy")
    temperature: float | None = setting(
        None, "of the sampled answers; null: evaluation.temperature", gt=0
    )
    top_p: float | None = setting(None, "1: off; null: evaluation.top_p", gt=0, le=1)
    top_k: int | None = setting(None, "0: off; null: evaluation.top_k", ge=0)
    max_new_tokens: int | None = setting(
        None, "longest answer; null: evaluation.max_new_tokens", unit="tokens", gt=0
    )


def _check_report_k(key: str, report_k: tuple[int, ...], samples: int) -> None:
    bad = [k for k in report_k if not 1 <= k <= samples]
    refuse(
        bool(bad),
        f"{key}.report_k={list(report_k)} asks for {bad[0] if bad else 0} of {key}.samples="
        f"{samples} answers: each k must lie between 1 and the samples.",
    )


class EvaluationSpec(Spec):
    """When and how the policy is evaluated on held-out prompts."""

    every: int = setting(5, "steps between evaluations; 0: only at the end", ge=0)
    at_start: bool = setting(True, "also evaluate the starting policy")
    prompts: int = setting(128, "held-out prompts, at most what the task has", gt=0)
    samples: int = setting(1, "answers sampled to each prompt", gt=0)
    report_k: tuple[int, ...] = setting(
        (), "k of mean@k, pass@k and majority@k, at most samples; empty: samples alone"
    )
    greedy: bool = setting(True, "also the greedy answer")
    temperature: float = setting(1.0, "of the sampled answers", gt=0)
    top_p: float | None = setting(
        None, "of the sampled answers, 1: off; null: truncation as in training", gt=0, le=1
    )
    top_k: int | None = setting(
        None, "of the sampled answers, 0: off; null: truncation as in training", ge=0
    )
    max_new_tokens: int | None = setting(
        None, "longest answer; null: as in training", unit="tokens", gt=0
    )
    timeout_s: float = setting(600.0, "deadline of an evaluation", unit="s", gt=0)
    dense_actor: bool | None = setting(
        None,
        "evaluate the policy on a separate plain, dense engine; null: only where actors are drafts",
    )
    actors: tuple[str, ...] = setting(
        (), "labels of actors that are evaluated, too, as eval/TASK@LABEL"
    )
    tasks: dict[str, EvaluatedTaskSpec] = setting(
        default_factory=dict, meaning="further held-out tasks, by label"
    )

    def of(self, label: str) -> EvaluationSpec:
        """The settings of evaluation for a task."""
        own = self.tasks.get(label)
        given = {name: getattr(own, name, None) for name in OWN_EVALUATION}
        return self.model_copy(update={n: v for n, v in given.items() if v is not None})

    def check(self, key: str) -> None:
        _check_report_k(key, self.report_k, self.samples)
        for label in self.tasks:
            of = self.of(label)
            _check_report_k(f"{key}.tasks.{label}", of.report_k, of.samples)


# Settings of `evaluation` that a task that is only evaluated may have of its own.
OWN_EVALUATION = tuple(
    n for n in EvaluatedTaskSpec.model_fields if n in EvaluationSpec.model_fields
)


class CheckpointSpec(Spec):
    """When run checkpoints are made, and which of them stay."""

    unread: ClassVar[tuple[Unread, ...]] = (
        Unread(
            ("best_is",), lambda spec: spec.keep_best is None, "keep_best=null looks for no best"
        ),
    )

    every: int = setting(0, "steps between checkpoints; 0: none by steps", ge=0)
    every_s: float = setting(
        600.0,
        "time between checkpoints, taken after the step that passes it, in addition to `every`; "
        "longer where they would cost more than 2 % of the run; 0: none by time",
        unit="s",
        ge=0,
    )
    keep: int = setting(2, "newest checkpoints kept", gt=0)
    keep_every: int = setting(0, "keep every N-th-step checkpoint permanently; 0: none", ge=0)
    keep_best: str | None = setting(None, "also keep the one with the best value of this metric")
    best_is: Literal["max", "min"] = setting("max", "which value of keep_best is the best")
    at_end: bool = setting(True, "a last checkpoint")
    write_timeout_s: float = setting(
        1800.0,
        "deadline of writing one; a slower disk costs that checkpoint, not the run",
        unit="s",
        gt=0,
    )
