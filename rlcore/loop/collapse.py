"""The loop's answer to a policy that is being lost (`schedule.on_collapse`), decided by the rules
that speak of each row.

A policy has collapsed where its rewards have fallen and its samples are far from it. A task that
became harder, or samples that are merely old, show one of the two. hold: nothing that was sampled
before is trained on. rollback and stop: the attempt ends with `Collapsed`, and who started it goes
on from the newest checkpoint of before the first alarm, or not.
"""

from __future__ import annotations

from collections.abc import Callable, Set

from rlcore.errors import Collapsed
from rlcore.loop.run_plan import Plan, Progress

SIGNS = frozenset({"answer_kl", "fallen"})  # rules of logging.warnings
SETTLES = 3  # rows that these rules judge: until they are new, what they say was acted on
QUIET = 20  # steps without a sign after which an alarm is over
HELD = "collapsed"  # reason in the ledger


class Collapse:
    """Follows the alarms of a run. Its state is `Progress.alarm` and `Progress.held`, so that a
    resumed run goes on with it."""

    def __init__(self, plan: Plan, progress: Progress, note: Callable[[str], None]) -> None:
        self._mode = plan.schedule.on_collapse
        # in turns, and with a lag, no sample could be replaced by a fresher one
        self._can_hold = not plan.synchronous and plan.schedule.lag is None
        self._progress = progress
        self._note = note
        self._quiet = 0  # steps since a sign
        self._pending = False  # a hold waits for the end of the update phase
        self._said = False

    def judge(self, speaking: Set[str]) -> None:
        """Take the rules that speak of the newest row. Raises Collapsed where the run is not to go
        on like this."""
        progress, signs = self._progress, SIGNS & speaking
        self._quiet = 0 if signs else self._quiet + 1
        if signs and progress.alarm is None:
            progress.alarm = progress.step
        elif self._quiet >= QUIET:
            progress.alarm = None
        settled = progress.step - progress.held >= SETTLES
        if signs != SIGNS or not settled or self._mode == "off":
            return
        if self._mode != "hold":
            assert progress.alarm is not None
            raise Collapsed(progress.step, progress.alarm)
        if self._can_hold:
            self._pending = True
        elif not self._said:
            self._said = True
            self._note(
                f"step {progress.step}: the policy has fallen, and schedule.on_collapse=hold can "
                "hold nothing with max_staleness=0 or a lag: use rollback or stop"
            )

    def take_hold(self) -> bool:
        """Return whether what was sampled is to be given up now: once a collapse, outside an
        update phase."""
        due = self._pending and not self._progress.in_phase
        if due:
            self._pending = False
            self._progress.held = self._progress.step
        return due
