"""Rules of kinds of actors: their lists of corrections, their shares and set-points."""

from __future__ import annotations

from rlcore.config.schema import CorrectionList, RunConfig
from rlcore.corrections.dvp import DvpSpec
from rlcore.corrections.specs import CorrectionSpec
from rlcore.loop.shares import most_shares
from rlcore.loop.specs import TargetSpec
from rlcore.spec import refuse
from rlcore.weights.specs import GROUP_TRANSPORTS


def check_kinds(c: RunConfig) -> None:
    """Check the lists of corrections of kinds of actors, and the lists that are measured in
    addition to the run's."""
    own = {key: found for key, found in c.correction_lists.items() if key != "correction"}
    refuse(
        bool(own) and len(c.actor) == 1,
        f"{next(iter(own), '')} is of one of several kinds of actors, and this run has one: set "
        "correction.",
    )
    for key, corrections in (own | c.shadow_lists).items():
        for one, other in ((corrections, c.correction), (c.correction, corrections)):
            for label, spec in one.chosen().items():
                refuse(
                    _of_the_run(spec) and other.get(label) != spec,
                    f"{shown(key, corrections)} and {shown('correction', c.correction)} differ "
                    f"in {label}, which decides what all actors sample or what the loss is of: "
                    "use it with the same settings in both, or in neither.",
                )


def dvp_of(c: RunConfig) -> DvpSpec | None:
    """The settings of DVP, which all kinds of actors share; None: a run without it."""
    found = (spec for spec in c.correction.chosen().values() if isinstance(spec, DvpSpec))
    return next(found, None)


def check_shares(c: RunConfig) -> None:
    """Check shares of new groups, and groups of several kinds."""
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
    """Check that each set-point has a setting to move."""
    for label, actor in c.actor.items():
        if actor.target is not None:
            moves = actor.target.moves
            refuse(
                actor.target.most is not None and moves != "layers",
                f"actor.{label}.target.most={actor.target.most} is of moves=layers, and this one "
                f"moves {moves}: leave it out.",
            )
            _CHECKED[actor.target.moves](c, label, actor.target)


def _staleness(c: RunConfig, label: str, target: TargetSpec) -> None:
    least, eta = 1.0 if target.least is None else target.least, c.schedule.max_staleness
    refuse(
        eta <= least,
        f"actor.{label}.target moves the admitted staleness between actor.{label}.target.least="
        f"{least:g} and schedule.max_staleness={eta}, which leaves no range: raise "
        "schedule.max_staleness.",
    )
    refuse(
        c.schedule.lag is not None,
        f"actor.{label}.target moves the admitted staleness, which schedule.lag={c.schedule.lag} "
        "keeps: use one or the other.",
    )


def _pages(c: RunConfig, label: str, target: TargetSpec) -> None:
    sparse = c.actor[label].sparse
    refuse(
        sparse is None or sparse.blocks_by_length is None,
        f"actor.{label}.target.moves=pages moves actor.{label}.sparse.blocks_by_length, which is "
        "not set: use a sparse actor and give the pages to begin with.",
    )
    refuse(
        target.least is not None and target.least < 2,
        f"actor.{label}.target.least={target.least} must be at least 2 with moves=pages: the "
        "first page and the own one are always kept.",
    )


def _share(c: RunConfig, label: str, target: TargetSpec) -> None:
    alone = all(actor.share is not None for actor in c.actor.values())
    refuse(
        c.actor[label].share is None or alone,
        f"actor.{label}.target.moves=share lowers actor.{label}.share, which must be set, for "
        "another kind of actors without a share, which takes the rest.",
    )
    refuse(
        target.least is not None and target.least >= 1,
        f"actor.{label}.target.least={target.least} must be below 1 with moves=share: it is a "
        f"part of actor.{label}.share.",
    )


def _layers(c: RunConfig, label: str, target: TargetSpec) -> None:
    actor, key = c.actor[label], f"actor.{label}.target.moves=layers"
    refuse(
        actor.rounding == "none",
        f"{key} moves the layers that emulated rounding leaves out, and actor.{label}.rounding="
        "none: choose a format. vLLM's own FP8 cannot change its layers during a run.",
    )
    refuse(
        actor.activations != "none",
        f"{key} moves the layers whose weights are rounded, and actor.{label}.activations="
        f"{actor.activations} rounds in the same layers throughout: use activations=none.",
    )
    refuse(
        target.most is None or target.most <= actor.precise_layers,
        f"{key} needs actor.{label}.target.most, the most layers that may be precise, above actor."
        f"{label}.precise_layers={actor.precise_layers}: it is {target.most}.",
    )
    refuse(
        c.cluster.transport in GROUP_TRANSPORTS,
        f"{key} cannot be combined with cluster.transport={c.cluster.transport}, which sends all "
        "actors the same: choose ray or disk.",
    )


_CHECKED = {"staleness": _staleness, "pages": _pages, "layers": _layers, "share": _share}


def _of_the_run(spec: CorrectionSpec) -> bool:
    """Return whether a correction applies to all samples or none, unlike weights and masks."""
    whole = spec.leads_to_new or bool(spec.inner_clip_off) or bool(spec.replaces_advantage)
    return whole or isinstance(spec, DvpSpec)


def shown(key: str, corrections: CorrectionList) -> str:
    """A list in the form in which a user writes it."""
    return f"{key}=[{','.join(corrections.names)}]"
