"""The declaration of a metric, and the advice that several declarations share."""

from __future__ import annotations

from rlcore.spec import DeclaredMetric

# Groups of metrics of samples, which exist by the kind of actors that drew them, too.
BY_KIND = (
    "reward",
    "reward_parts",
    "response_length",
    "staleness",
    "mismatch",
    "correction",
    "shadow",
    "worth",
    "step_bound",
)

# Beginnings of metrics that explain the others: columns of details.jsonl, not of metrics.jsonl.
EXPLAINING = (
    *("staleness/share_", "staleness/in_", "train/positions", "train/sequence"),
    *("train/flat_positions", "mismatch/eighth_", "mismatch/stretch_", "mismatch/ratio_"),
    *("mismatch/abs_dlogp_p", "mismatch/abs_dprob", "mismatch/agreement", "mismatch/below_"),
    *("mismatch/tokens", "mismatch/tv_bound", "mismatch/truncated", "mismatch/masked"),
    *("mismatch/veto", "mismatch/unstored", "mismatch/unlikely", "mismatch/unknown"),
    *("mismatch/floor_tokens", "mismatch/floor_mass", "mismatch/fixed_share"),
    *("mismatch/repeated_share", "mismatch/bias2", "mismatch/variance_added", "mismatch/z_approx"),
    *("mismatch/kappa", "mismatch/ais_alpha_", "step_bound/floor", "step_bound/moved"),
    *("train/acceptance_", "teacher/divergence_quarter_", "engine/", "colocated/", "publish/"),
    *("time/publish_receive", "time/publish_drain", "time/publish_stop", "time/fetch_s"),
    *("time/learner_", "time/shadow", "time/asleep", "time/sleep", "time/wake", "time/teacher_"),
    *("time/score_lag", "checkpoint/interval", "checkpoint/step", "rollout/migrated"),
    *("buffer/bytes", "buffer/duplicates", "buffer/late", "buffer/unreadable", "buffer/resampled"),
    *("buffer/arrived_tokens", "buffer/arrived_re"),
)


class Metric(DeclaredMetric):
    """One declared metric, by which the rows of a run are read.

    Example: Metric("time/publish_s", "s", "publishing weights", "sum")
    """

    @property
    def by_kind(self) -> bool:
        """True if a run with several kinds of actors has it under `name@<kind>`, too."""
        return self.name.partition("/")[0] in BY_KIND

    @property
    def detail(self) -> bool:
        """True if details.jsonl has it, and metrics.jsonl has not."""
        return self.name.startswith(EXPLAINING)

    def covers(self, name: str) -> bool:
        """Return whether this declaration covers `name`, compared segment by segment."""
        mine, theirs = self.name.split("/"), name.split("/")
        return len(mine) == len(theirs) and all(_covers(m, t) for m, t in zip(mine, theirs))


def _covers(template: str, segment: str) -> bool:
    literal, bracket, _ = template.partition("<")
    return (
        segment.startswith(literal) and len(segment) > len(literal)
        if bracket
        else segment == template
    )


ENGINES_WAIT = "[The engines wait](troubleshooting.md#the-engines-wait)"
GRADER = "the log has the last reason; `task.grade_timeout_s`, `task.grader_memory_mib`"
FLAT = "[The reward is flat](troubleshooting.md#the-reward-is-flat)"
CUT = "raise `rollout.max_new_tokens`, or accept that such answers count as wrong"
