"""Rules of runs whose actors are of several kinds: their lists of corrections and their shares."""

from __future__ import annotations

from rlcore.config.schema import CorrectionList, RunConfig
from rlcore.corrections.dvp import DvpSpec
from rlcore.corrections.specs import CorrectionSpec
from rlcore.loop.shares import most_shares
from rlcore.spec import refuse


def check_kinds(c: RunConfig) -> None:
    """Lists of corrections of kinds of actors."""
    own = {key: found for key, found in c.correction_lists.items() if key != "correction"}
    if not own:
        return
    refuse(
        len(c.actor) == 1,
        f"{next(iter(own))} is of one of several kinds of actors, and this run has one: set "
        "correction.",
    )
    for key, corrections in own.items():
        for one, other in ((corrections, c.correction), (c.correction, corrections)):
            for label, spec in one.chosen().items():
                refuse(
                    _of_the_run(spec) and other.get(label) != spec,
                    f"{shown(key, corrections)} and {shown('correction', c.correction)} differ "
                    f"in {label}, which decides what all actors sample or what the loss is of: "
                    "use it with the same settings in both, or in neither.",
                )


def check_shares(c: RunConfig) -> None:
    """Shares of new groups, and groups of several kinds."""
    given = {label: a.share for label, a in c.actor.items() if a.share is not None}
    refuse(
        len(c.actor) == 1 and (bool(given) or c.rollout.group_kinds == "mixed"),
        f"{'rollout.group_kinds=mixed' if not given else f'actor.{next(iter(given))}.share'} is "
        "about several kinds of actors, and this run has one: leave it out.",
    )
    if not given:
        return
    most, least = most_shares(list(given.values()))
    wrong = most > 1 + 1e-9 or (len(given) == len(c.actor) and least < 1 - 1e-9)
    keys = " + ".join(f"actor.{label}.share" for label in given)
    refuse(
        wrong,
        f"{keys} is between {least:g} and {most:g} over the run: shares add up to 1, or to less "
        "where another kind has none and takes the rest.",
    )


def check_targets(c: RunConfig) -> None:
    """Set-points: there must be something to move."""
    for label, actor in c.actor.items():
        target, eta = actor.target, c.schedule.max_staleness
        refuse(
            target is not None and eta <= target.least,
            f"actor.{label}.target moves the admitted staleness between actor.{label}.target.least="
            f"{target and target.least} and schedule.max_staleness={eta}, which is no room: raise "
            "schedule.max_staleness.",
        )


def _of_the_run(spec: CorrectionSpec) -> bool:
    """Return whether a correction is of all samples or none: it is more than weights and masks."""
    whole = spec.leads_to_new or bool(spec.inner_clip_off) or bool(spec.replaces_advantage)
    return whole or isinstance(spec, DvpSpec)


def shown(key: str, corrections: CorrectionList) -> str:
    """A list as a user writes it."""
    return f"{key}=[{','.join(corrections.names)}]"
