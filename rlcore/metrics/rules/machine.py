"""Rules about how a run is set up: what the loss uses, how old samples are, who waits for whom, and
graders that fail."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from rlcore.metrics.digest import number
from rlcore.metrics.rules.base import RECENT, Rule, Window
from rlcore.metrics.specs import WarningsSpec


class Acceptance(Rule):
    """Actors that sample from another policy than the learner's."""

    bound = "acceptance"
    needs = ("mismatch/acceptance",)
    optional = True
    kept = "actors stayed close to the learner (mismatch/acceptance {} or more)"

    def __call__(self, window: Window, spec: WarningsSpec) -> str | None:
        mean = window.mean("mismatch/acceptance")
        if mean is None or mean >= spec.acceptance:
            return None
        return self.sentence(
            f"mismatch/acceptance is {number(mean)}",
            window,
            spec,
            "the actors' policy has moved away from the learner's; lower schedule.max_staleness, "
            "or choose actors nearer to the learner",
        )


class ClipShare(Rule):
    """Tokens without a gradient."""

    bound = "clip_share"
    needs = ("policy/clip_low_share", "policy/clip_high_share")
    optional = True
    off = 1
    kept = "the loss clipped at most {} of the tokens"

    def __call__(self, window: Window, spec: WarningsSpec) -> str | None:
        low, high = (window.mean(name) for name in self.needs)
        share = (low or 0.0) + (high or 0.0)
        if share <= spec.clip_share:
            return None
        return self.sentence(
            f"the policy loss clips {share:.0%} of the tokens",
            window,
            spec,
            "they give no gradient; lower learner.lr, schedule.epochs or schedule.steps_per_phase",
        )


class StalenessShare(Rule):
    """Samples nearly as old as the bound allows. Where no token can be older than one step, an age
    of one is usual."""

    bound = "staleness_share"
    needs = ("staleness/mean",)
    optional = True
    off = 1
    kept = "samples stayed fresher than {} of what the schedule allows"
    of_speed = True

    def __call__(self, window: Window, spec: WarningsSpec) -> str | None:
        mean, most = window.mean("staleness/mean"), window.course.staleness_bound
        if mean is None or most < 2 or mean <= spec.staleness_share * most:
            return None
        return self.sentence(
            f"trained tokens are {number(mean)} steps old on average, of at most {most}",
            window,
            spec,
            "the bound decides how old samples are; lower schedule.max_staleness for fresher ones, "
            "or raise it if the engines wait",
        )


class LearnerIdle(Rule):
    """A learner idle for want of samples."""

    bound = "learner_idle"
    needs = ("time/wait_data_s", "time/step_s")
    optional = True
    off = 1
    kept = "the learner waited for data at most {} of the time"
    of_speed = True

    def __call__(self, window: Window, spec: WarningsSpec) -> str | None:
        share = window.share("time/wait_data_s")
        if share is None or share <= spec.learner_idle:
            return None
        return self.sentence(
            f"the learner waits for data {share:.0%} of the time",
            window,
            spec,
            f"{_places(window)}raise actor.LABEL.count (rlcore scale does so while the run goes "
            "on) or actor.LABEL.max_num_seqs",
        )


class EngineIdle(Rule):
    """Engines that have nothing to decode."""

    bound = "engine_idle"
    needs = ("time/rollout_s", "time/step_s")
    optional = True
    off = 1
    kept = "engines did not decode at most {} of the time"
    of_speed = True

    def __call__(self, window: Window, spec: WarningsSpec) -> str | None:
        busy = window.share("time/rollout_s")
        if busy is None or 1 - busy <= spec.engine_idle:
            return None
        return self.sentence(
            f"engines do not decode {1 - busy:.0%} of the time",
            window,
            spec,
            f"{_places(window)}lower actor.LABEL.count, give the learner more (learner.ranks), or "
            "raise schedule.max_staleness",
        )


def _places(window: Window) -> str:
    """Advice that comes first where episodes wait for a place."""
    if not (waiting := window.mean("environment/waiting")):
        return ""
    return f"{number(waiting)} episodes wait for a place: raise environment.concurrency; else "


class FailedScores(Rule):
    """Graders that fail. One or two failures of the first steps may be chance."""

    bound = "failed_scores"
    needs = ("ledger/score_errors", "ledger/score_timeouts", "buffer/arrived_samples")
    optional = True
    off = 1
    kept = "at most {} of the scores failed"

    def due(self, spec: WarningsSpec) -> int:
        return RECENT

    def __call__(self, window: Window, spec: WarningsSpec) -> str | None:
        failed = window.gained("ledger/score_errors") + window.gained("ledger/score_timeouts")
        samples = window.gained("buffer/arrived_samples")
        few = failed < RECENT and len(window.rows) < spec.window
        share = failed / samples if samples and not few else 0.0
        what = f"{share:.1%} of the scores failed or timed out"
        for name, value in _heldout_failed(window):
            if value > max(share, spec.failed_scores):
                share, what = value, f"{name} is {number(value)}"
        if share <= spec.failed_scores:
            return None
        return self.sentence(
            what,
            window,
            spec,
            "the log has the last reason; mend the grader, or raise task.grade_timeout_s or "
            "task.grader_memory_mib",
        )


def _heldout_failed(window: Window) -> Iterator[tuple[str, float]]:
    """Shares of held-out answers whose score failed, by name."""
    for row in window.rows:
        for name, value in row.items():
            if name.startswith("eval/") and name.endswith("_failed_share") and value:
                yield name, value


class Flat(Rule):
    """Rewards of a long run whose second half is not above the first by two standard errors. A run
    of fewer steps is none of its concern."""

    bound = "flat_steps"
    kept = "rewards rose within {} steps"

    def rows(self, spec: WarningsSpec) -> int:
        return spec.flat_steps

    def lacks(self, window: Window) -> str:
        """A shorter run is not called healthy while its rewards fall."""
        halves = _halves(window)
        if halves is None or halves[1] - halves[0] >= -2 * halves[2]:
            return ""
        before, after, _ = map(number, halves)
        return f"reward/mean fell from {before} in the first half to {after} in the second"

    def __call__(self, window: Window, spec: WarningsSpec) -> str | None:
        halves = _halves(window)
        if halves is None or window.newest(RECENT).solved:
            return None
        before, after, error = halves
        if after - before > 2 * error:
            return None
        return self.sentence(
            f"reward/mean has not risen: {number(before)} in the first half, {number(after)} in "
            "the second",
            window,
            spec,
            "unless the task is solved, look at samples/, raise learner.lr, or choose problems "
            "that are sometimes solved (task.difficulty)",
        )


def _halves(window: Window) -> tuple[float, float, float] | None:
    """The mean rewards of both halves, and the standard error of their difference."""
    values = window.values("reward/mean")
    half = len(values) // 2
    if half < 2:
        return None
    before, after = values[:half], values[half:]
    variance = math.fsum(statistics.variance(part) / len(part) for part in (before, after))
    return statistics.fmean(before), statistics.fmean(after), math.sqrt(variance)
