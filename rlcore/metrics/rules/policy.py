"""Rules about the policy: that it is being lost, learns nothing, or runs to an end."""

from __future__ import annotations

import math
import statistics
from typing import NamedTuple

from rlcore.corrections.step_bound import LEAST, LONGEST
from rlcore.metrics.digest import number
from rlcore.metrics.rows import Row
from rlcore.metrics.rules.base import BEST, RECENT, Fast, Rule, Window, held_out
from rlcore.metrics.specs import WarningsSpec

HOLDS = 0.5  # nats an answer that a rate is advised for
GROWTH = 1.6  # the power of the learning rate that the KL of an answer grows with


def answer_kl(row: Row, floor: float) -> float | None:
    """KL of an answer's samples that are not fresh from the policy, in nats, at most LONGEST tokens
    of it; None where it is not known. `floor`: k3 of fresh tokens."""
    measured = row.get("step_bound/answer_kl")
    if measured is not None:
        return measured
    k3, tokens = row.get("mismatch/kl_k3"), row.get("response_length/mean")
    if k3 is None or tokens is None:
        return None
    fresh = row.get("staleness/max") == 0
    return 0.0 if fresh else max(0.0, k3 - floor) * min(tokens, LONGEST)


def rate_that_holds(lr: float, nats: float) -> float:
    """The learning rate with which an answer's KL of `nats` would be HOLDS, rounded down to one
    digit."""
    return rounded_down(lr * min(1.0, (HOLDS / nats) ** (1 / GROWTH)), 1)


def rounded_down(rate: float, digits: int) -> float:
    """A rate above 0 with so many digits, at most itself."""
    place = 10.0 ** (math.floor(math.log10(rate)) + 1 - digits)
    return float(f"{math.floor(rate / place + 1e-9) * place:.{digits - 1}e}")


class AnswerKl(Fast):
    """Samples that are several nats an answer from the policy say that it moves further than the
    steps in flight should move it. Two rows, since one batch can be odd."""

    bound = "answer_kl"
    needs = ("mismatch/kl_k3", "response_length/mean")
    kept = "samples stayed within {} nats an answer of the policy"

    def __call__(self, window: Window, spec: WarningsSpec) -> str | None:
        away = [v for v in window.values("loss/kl") if v > spec.answer_kl > 0]
        if len(away) >= 2:
            return self.sentence(
                f"loss/kl is {number(away[-1])} nats a token",
                window,
                spec,
                "the policy has left its reference; lower learner.lr, or raise algorithm.kl_coef",
            )
        found = [answer_kl(row, window.past.floor) for row in window.rows]
        above = [n for n, d in enumerate(found) if (d or 0.0) > spec.answer_kl > 0]
        if len(above) < 2:
            return None
        nats, row = found[above[-1]] or 0.0, window.rows[above[-1]]
        # by the step before, which led there: a rate that warms up is higher since
        slower = _slower(found[above[0]], window.rows[max(0, above[0] - 1)])
        facts = ("mismatch/kl_k3", "k3 {} a token"), ("staleness/mean", "{} steps old")
        shown = [
            text.format(number(value))
            for name, text in (*facts, ("mismatch/ess", "ESS {}"))
            if (value := row.get(name)) is not None
        ]
        return self.sentence(
            f"samples are {number(nats)} nats an answer from the policy, {', '.join(shown)}",
            window,
            spec,
            f"the steps since then moved it further than they bear; {slower}, or lower "
            f"schedule.max_staleness{_unbounded(row)}",
        )


def _unbounded(row: Row) -> str:
    """Advice where the steps in flight have no bound."""
    known = bool(row.get("staleness/max")) and "step_bound/scale" not in row
    return f", or set learner.step_bound={HOLDS:g}" if known else ""


def _slower(nats: float | None, row: Row) -> str:
    lr = row.get("lr")
    return f"set learner.lr={rate_that_holds(lr, nats):g}" if lr and nats else "lower learner.lr"


class EffectiveSamples(Fast):
    """Two of three rows in which few samples carry all the weight."""

    bound = "ess"
    needs = ("mismatch/ess",)
    kept = "samples spoke for the learner's policy (mismatch/ess {} or more)"

    def __call__(self, window: Window, spec: WarningsSpec) -> str | None:
        below = [v for v in window.values("mismatch/ess") if v < spec.ess]
        if len(below) < 2:
            return None
        return self.sentence(
            f"mismatch/ess is {number(below[-1])}",
            window,
            spec,
            "the samples hardly speak for the learner's policy; lower learner.lr or "
            "schedule.max_staleness, or choose more precise actors or another correction"
            f"{_unbounded(window.rows[-1])}",
        )


class _Drop(NamedTuple):
    """Rewards of the best steps and of the newest, with the standard error of the difference."""

    was: float
    now: float
    error: float
    steps: int  # of the best


class Fallen(Fast):
    """Rewards below a share of the run's best, and by more than they scatter."""

    bound = "fallen"
    needs = ("reward/mean",)
    kept = "rewards stayed above {} of the best that the run had"

    def due(self, spec: WarningsSpec) -> int:
        return 2 * RECENT

    def lacks(self, window: Window) -> str:
        """A run is not called healthy, either, while rewards are below its best by more than they
        scatter."""
        missing, drop = super().lacks(window), self._drop(window)
        if missing or drop is None or drop.was - drop.now <= 3 * drop.error:
            return missing
        was, now = number(drop.was), number(drop.now)
        return f"reward/mean is down at {now} from {was}, the run's best {drop.steps} steps"

    def _drop(self, window: Window) -> _Drop | None:
        best, now = window.past.best, window.values("reward/mean")
        if best is None or len(now) < RECENT:
            return None
        was, variance, steps = best
        error = math.sqrt(variance * (1 / steps + 1 / RECENT))
        return _Drop(was, statistics.fmean(now), error, steps)

    def __call__(self, window: Window, spec: WarningsSpec) -> str | None:
        drop = self._drop(window)
        if drop is None or not spec.fallen:
            return None
        # a share of 0 or less says nothing: there the spread of a batch's rewards is the scale
        size = drop.was if drop.was > 0 else max(-drop.was, window.mean("reward/std") or 0.0)
        # three errors, since the best of many steps is above their mean by chance
        if drop.was - drop.now <= max((1 - spec.fallen) * size, 3 * drop.error):
            return None
        return self.sentence(
            f"reward/mean has fallen to {number(drop.now)} from {number(drop.was)}, the run's best "
            f"{drop.steps} steps",
            window,
            spec,
            "lower learner.lr, and go on from a checkpoint of before "
            f"(schedule.on_collapse=rollback does both){_unbounded(window.rows[-1])}",
        )


class HeldOutFallen(Rule):
    """A held-out result that is below the run's first."""

    bound = "heldout"
    kept = "held-out results did not end {} standard errors below the first"

    def rows(self, spec: WarningsSpec) -> int:
        return 1

    def lacks(self, window: Window) -> str:
        """A result that is lower within its error gives no alarm and no healthy run."""
        past = window.past
        pairs = [(name, first, past.last[name]) for name, first in past.first.items()]
        if all(first.version == last.version for _, first, last in pairs):
            return "there are no two held-out results to compare"
        for name, first, last in pairs:
            if first.value - last.value > math.hypot(first.error, last.error):
                was, now = number(first.value), number(last.value)
                return f"{name} went from {was} to {now}, which may be chance"
        return ""

    def __call__(self, window: Window, spec: WarningsSpec) -> str | None:
        if not spec.heldout:
            return None
        for name in held_out(window.rows[-1]):
            first, last = window.past.first[name], window.past.last[name]
            error = math.hypot(first.error, last.error)
            if first.value - last.value > spec.heldout * error and last.value < first.value:
                return self.sentence(
                    f"{name} is {number(last.value)} at version {last.version}, below "
                    f"{number(first.value)} at version {first.version}",
                    window,
                    spec,
                    "the run has made the policy worse; lower learner.lr, or look at samples/ for "
                    "rewards that are gained without solving the task",
                )
        return None


class CutOff(Fast):
    """Answers that reach the limit of their length before they end."""

    bound = "cut_off"
    needs = ("response_length/truncated_share",)
    off = 1
    kept = "fewer than {} of the answers were cut off"

    def __call__(self, window: Window, spec: WarningsSpec) -> str | None:
        cut = window.values("response_length/truncated_share")
        share = math.fsum(cut) / max(1, len(cut))
        # where more are right than end by themselves, answers need no end; a reward without that
        # part may be credit for half an answer
        right = window.mean("reward_parts/correct") or 0.0
        needless = window.solved or right > 1 - share + 0.05
        if len(cut) < RECENT or share < spec.cut_off or needless:
            return None
        return self.sentence(
            f"{share:.0%} of the answers are cut off before they end",
            window,
            spec,
            "raise rollout.max_new_tokens, or have the reward ask for shorter answers",
        )


class NoSignal(Rule):
    """Steps that teach nothing: all samples of each group have the same reward, or the gradient is
    0 or not finite."""

    bound = "no_signal"
    needs = ("reward/mean", "grad_norm")
    off = 1
    kept = "at most {} of the groups had equal rewards"

    def due(self, spec: WarningsSpec) -> int:
        return RECENT

    def lacks(self, window: Window) -> str:
        """A run that never had a gradient has not been tried, also where all answers are right."""
        missing, lost = super().lacks(window), window.mean("mismatch/nonfinite_share") or 0.0
        if not missing and lost > 0.01:
            missing = f"{lost:.0%} of the tokens have no finite log-prob"
        return missing or ("" if window.past.taught else "no step had a gradient")

    def __call__(self, window: Window, spec: WarningsSpec) -> str | None:
        rows = [row for row in window.rows if (row["step"] or 0) > window.course.waits]
        window = Window(rows, window.course, window.past)
        newest = window.newest(RECENT)
        if len(newest.rows) < RECENT or newest.solved or spec.no_signal == self.off:
            return None
        return (
            self._equal(newest, spec)
            or self._nothing(newest, _absent(newest, 1 - spec.no_signal), spec)
            or self._nothing(window, _often(window), spec)
            or self._held(window, spec)
        )

    def _equal(self, window: Window, spec: WarningsSpec) -> str | None:
        equal = window.values("reward/equal_share")
        share = math.fsum(equal) / max(1, len(equal))
        if len(equal) < RECENT or share <= spec.no_signal or not window.course.compares_groups:
            return None
        return self.sentence(
            f"all samples of a group have equal rewards in {share:.0%} of the groups",
            window,
            spec,
            "nothing tells good answers from bad; choose problems that are sometimes solved "
            "(task.difficulty), raise rollout.samples_per_prompt, or look at the grader's verdicts "
            "in samples/",
        )

    def _nothing(self, window: Window, what: str, spec: WarningsSpec) -> str | None:
        if not what:
            return None
        return self.sentence(
            what,
            window,
            spec,
            "the steps teach nothing; look at samples/ for rewards that are all equal, and at "
            "correction/kept_share for tokens that are all masked",
        )

    def _held(self, window: Window, spec: WarningsSpec) -> str | None:
        scales = window.values("step_bound/scale")
        if len(scales) < 2 * BEST or (left := statistics.fmean(scales)) >= LEAST:
            return None
        return self.sentence(
            f"step_bound/scale is {number(left)} in the mean",
            window,
            spec,
            "learner.step_bound leaves nothing of the steps; lower learner.lr or "
            "schedule.max_staleness, or raise it where actors differ from the policy by design",
        )


def _absent(window: Window, least: float) -> str:
    """The quantity without which no step of the window taught, in words; "" none. `least`: of the
    tokens that stay in the loss."""
    # a step that the bound holds has no rate, and `_held` judges it
    rows = [row for row in window.rows if row.get("step_bound/scale") != 0]
    for name in ("grad_norm", "reward/std", "lr"):
        found = [row[name] for row in rows if name in row]
        if len(found) == len(window.rows) and not any(found):
            return f"{name} is {'not finite' if found[-1] is None else '0'}"
    lost = window.values("mismatch/nonfinite_share")
    if len(lost) == len(window.rows) and min(lost) > least:
        return f"mismatch/nonfinite_share is {number(lost[-1])}"
    kept = window.values("correction/kept_share")
    if len(kept) == len(window.rows) and max(kept) < least:
        return f"correction/kept_share is {number(kept[-1])}"
    return ""


def _often(window: Window) -> str:
    """Gradients that are not finite more often than by accident, or mostly 0, in words."""
    norms = [row["grad_norm"] for row in window.rows if "grad_norm" in row]
    broken, zero = norms.count(None), norms.count(0.0)
    if broken >= RECENT:
        return f"grad_norm is not finite in {broken} of {len(norms)} steps"
    if len(norms) >= 2 * RECENT and 2 * zero > len(norms):
        return f"grad_norm is 0 in {zero} of {len(norms)} steps"
    return ""


class EntropyGone(Fast):
    """A policy that hardly explores any more before the task is solved."""

    bound = "entropy"
    needs = ("entropy",)
    kept = "the policy kept exploring (entropy {} nats or more)"

    def __call__(self, window: Window, spec: WarningsSpec) -> str | None:
        found = window.values("entropy")
        if len(found) < RECENT or max(found) >= spec.entropy or window.solved:
            return None
        return self.sentence(
            f"entropy is {number(found[-1])}",
            window,
            spec,
            "the policy hardly explores any more; lower learner.lr, or raise algorithm.eps_high "
            "or algorithm.entropy_coef",
        )


class EntropyRise(Fast):
    """A policy that becomes noise."""

    bound = "entropy_rise"
    needs = ("entropy",)
    kept = "entropy stayed below {} times the first steps' entropy"

    def due(self, spec: WarningsSpec) -> int:
        return 2 * RECENT

    def __call__(self, window: Window, spec: WarningsSpec) -> str | None:
        start, found = window.past.start("entropy"), window.values("entropy")
        if not start or len(found) < RECENT or not spec.entropy_rise or window.gains:
            return None
        if min(found) <= spec.entropy_rise * start:
            return None
        return self.sentence(
            f"entropy is {number(found[-1])} nats, from {number(start)} in the first steps, and "
            "rewards have not risen",
            window,
            spec,
            "the policy is becoming noise; lower learner.lr or algorithm.entropy_coef",
        )


class LengthGone(Fast):
    """Answers that shrink to nothing."""

    bound = "length"
    needs = ("response_length/mean",)
    kept = "answers kept {} of the length of the first steps"

    def due(self, spec: WarningsSpec) -> int:
        return 2 * RECENT

    def lacks(self, window: Window) -> str:
        """Answers of one token are right in few tasks."""
        missing, found = super().lacks(window), window.values("response_length/mean")
        if missing or max(found) > 1 or window.gains or window.solved:
            return missing
        return f"answers have {number(found[-1])} tokens"

    def __call__(self, window: Window, spec: WarningsSpec) -> str | None:
        start = window.past.start("response_length/mean")
        found = window.values("response_length/mean")
        if start is None or len(found) < RECENT or window.gains:
            return None
        if max(found) < 0.5:
            what = f"answers have {number(found[-1])} tokens: most are empty"
            return self.sentence(what, window, spec, "look at samples/ and at rollout.stop")
        if max(found) >= spec.length * start:
            return None
        return self.sentence(
            f"answers have {number(found[-1])} tokens, from {number(start)} in the first steps, "
            "and rewards have not risen",
            window,
            spec,
            "the policy is giving up on answers; lower learner.lr, or look at samples/ and at the "
            "parts of the reward that short answers gain by",
        )
