"""Advice on kinds of actors, from the figures of steps with several of them. It has their ranking,
the mix of most effective tokens at the tolerated tail, and the start of a set-point of sparse
actors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from rlcore.commands.derived import page_ranges
from rlcore.config.schema import ActorSection, RunConfig
from rlcore.loop.shares import KindRate, best_mix
from rlcore.loop.targets import STATISTICS, PageRange
from rlcore.metrics.digest import number
from rlcore.metrics.names import split_kind
from rlcore.metrics.rows import Row
from rlcore.spec import refuse
from rlcore.types import PageRule

TOLERATED = 0.86  # agreement_p5 that Sparrow trained at
BELOW = 0.05  # share of tokens below it that this allows
SCALES = (0.5, 1.0, 2.0, 4.0)  # of the configured pages, that a calibration measures


def ranked(row: Row) -> list[dict[str, Any]]:
    """The kinds of actors of a run with several, most effective tokens an actor-second first; kinds
    below the tolerated agreement come last."""
    found = []
    for name, value in row.items():
        pooled, kind = split_kind(name)
        if kind and pooled == "worth/tokens_per_actor_s" and value is not None:
            found.append(
                {
                    "kind": kind,
                    "tokens_per_actor_s": value,
                    "agreement_p5": row.get(f"mismatch/agreement_p5@{kind}") or 0.0,
                    "fixed_share": row.get(f"mismatch/fixed_share@{kind}"),
                }
            )
    return sorted(
        found, key=lambda k: (k["agreement_p5"] < TOLERATED, -float(k["tokens_per_actor_s"]))
    )


def kind_rates(
    rows: Sequence[Row], actors: Mapping[str, ActorSection]
) -> dict[str, dict[str, KindRate]]:
    """The worth of each kind of actors over steps of a run, by label, for each second of its
    engines' steps ("actor_s"). Kinds with a price also have it for each unit of money ("price").
    Kinds without samples are left out."""
    found: dict[str, dict[str, KindRate]] = {}
    for label, actor in actors.items():
        at = f"@{label}" if len(actors) > 1 else ""
        own = [row for row in rows if _effective(row, at) > 0]
        tokens = sum(float(row[f"mismatch/tokens{at}"] or 0.0) for row in own)
        for per in ("actor_s", "price") if own else ():
            spent = sum(_spent(row, at, per, actor) for row in own)
            if not spent:
                continue
            found.setdefault(per, {})[label] = KindRate(
                tokens=tokens / spent,
                effective=sum(_effective(row, at) for row in own) / tokens,
                below=_mean(own, f"mismatch/below_086_share{at}", at),
                length=_mean(own, f"response_length/mean{at}", at),
            )
    return found


def _effective(row: Row, at: str) -> float:
    """Effective tokens of a kind in a step."""
    names = ("mismatch/tokens", "mismatch/ess", "correction/kept_share")
    return math.prod(float(row.get(f"{name}{at}") or 0.0) for name in names)


def _spent(row: Row, at: str, per: str, actor: ActorSection) -> float:
    """Seconds of a kind's engines in a step, or their price; 0 where it is unknown."""
    if at:  # of several kinds, a row has their worth
        worth = float(row.get(f"worth/tokens_per_{per}{at}") or 0.0)
        return _effective(row, at) / worth if worth else 0.0
    if per == "actor_s":
        return float(row.get("time/rollout_s") or 0.0)
    hours = actor.count * float(row.get("time/step_s") or 0.0) / 3600
    return hours * (actor.price or 0.0)


def _mean(rows: Sequence[Row], name: str, at: str) -> float:
    """Mean of a metric, weighted by the kind's tokens."""
    weights = [float(row[f"mismatch/tokens{at}"] or 0.0) for row in rows]
    values = [float(row.get(name) or 0.0) for row in rows]
    return sum(w * v for w, v in zip(weights, values)) / sum(weights)


def mix(rates: Mapping[str, Mapping[str, KindRate]]) -> dict[str, dict[str, Any]]:
    """The advised mix by what it saves: shares of new groups by kind, and the effective tokens for
    each actor-second ("actor_s") and unit of money ("price").

    `rates`: of `KindRate`s by label, for each of the two."""
    found = {}
    for per, kinds in rates.items():
        best = best_mix(kinds, BELOW) if len(kinds) > 1 else None
        if best is not None:
            found[per] = {"shares": best.groups, "effective": best.effective}
    return found


def kinds_lines(kinds: Sequence[Mapping[str, Any]], mixes: Mapping[str, Any]) -> Iterator[str]:
    """The ranking and the mix as text; nothing for a run with one kind."""
    if not kinds:
        return
    yield f"kinds by effective tokens an actor-second; below agreement {TOLERATED} last:"
    for kind in kinds:
        worth, agreement = number(kind["tokens_per_actor_s"]), number(kind["agreement_p5"])
        share = kind["fixed_share"]
        repeats = "" if share is None else f", fixed_share {number(share)}"
        yield f"  {kind['kind']:20s} {worth:>8s} tokens/s, agreement_p5 {agreement}{repeats}"
    yield from mix_lines(mixes)


def mix_lines(mixes: Mapping[str, Any]) -> Iterator[str]:
    """The mix as text."""
    if not mixes:
        yield f"  no mix of them holds agreement {TOLERATED} over all tokens"
    for per, best in mixes.items():
        shares = " ".join(f"actor.{label}.share={s:.2f}" for label, s in best["shares"].items())
        unit = "an actor-second" if per == "actor_s" else "a unit of money"
        given = f"{number(best['effective'])} tokens {unit}"
        yield f"  most at agreement {TOLERATED}: {shares}, {given}"


def calibrated(
    config: RunConfig, step: Callable[[RunConfig], Row]
) -> dict[str, dict[str, list[Any]]]:
    """The start of the set-points of sparse actors, by label: the least pages of each stretch whose
    statistic reaches the target's value, and the measurements.

    `step`: the row of one step of a run. Raises UserError for a run without such a target.
    """
    ranges = page_ranges(config)
    chosen = {
        label: actor.target
        for label, actor in config.actor.items()
        if actor.target is not None and actor.target.moves == "pages"
    }
    refuse(
        not chosen,
        "calibrate=true measures the start of a set-point, and no actor has one of pages: set "
        "actor.LABEL.target.moves=pages.",
    )
    found: dict[str, dict[str, list[Any]]] = {}
    for label, target in chosen.items():
        several = len(config.actor) > 1
        name = f"mismatch/stretch_{{}}/{STATISTICS[target.statistic]}"
        name += f"@{label}" if several else ""
        measured: list[tuple[tuple[int, ...], list[float | None]]] = []
        for blocks in _tried(ranges[label]):
            row = step(_with_pages(config, label, blocks))
            measured.append((blocks, [row.get(name.format(n + 1)) for n in range(len(blocks))]))
        least = 2.0 if target.least is None else target.least
        starts = []
        for n, most in enumerate(ranges[label].most):
            points = [(b[n], v[n]) for b, v in measured]
            known = [(pages, value) for pages, value in points if value is not None]
            starts.append(least_pages(known, target.value, least=round(least), most=most))
        found[label] = {
            "measured": [{"blocks": list(b), "statistic": v} for b, v in measured],
            "blocks_by_length": list(accumulate(starts, max)),
        }
    return found


def _tried(pages: PageRange) -> list[tuple[int, ...]]:
    """Each stretch's pages at every scale, at most all of them."""
    tried = []
    for scale in SCALES:
        wanted = (max(2, round(b * scale)) for b in pages.rule.blocks)
        tried.append(tuple(accumulate((min(w, m) for w, m in zip(wanted, pages.most)), max)))
    return list(dict.fromkeys(tried))


def _with_pages(config: RunConfig, label: str, blocks: tuple[int, ...]) -> RunConfig:
    """The run with these pages, without set-points."""
    actor = config.actor[label]
    assert actor.sparse is not None
    rule = PageRule(0, actor.sparse.length_step, blocks)
    changed = actor.model_copy(update={"sparse": actor.sparse.under(rule), "target": None})
    return config.model_copy(update={"actor": {**config.actor, label: changed}})


def least_pages(points: Sequence[tuple[int, float]], value: float, *, least: int, most: int) -> int:
    """The fewest pages whose statistic reaches `value`, by measured (pages, statistic).

    Linear in the logarithm of pages between two points, and to agreement 1 at `most`, where all
    pages are read; a statistic that falls with pages counts as noise. Without points: `least`.
    """
    if not points:
        return least
    known = sorted({**{most: 1.0}, **{p: s for p, s in points if p < most}}.items())
    reached = list(accumulate((s for _, s in known), max))
    for i, ((pages, _), high) in enumerate(zip(known, reached)):
        if high < value:
            continue
        if i == 0:
            return max(least, pages)
        (before, _), low = known[i - 1], reached[i - 1]
        share = (value - low) / (high - low)
        wanted = math.exp(math.log(before) + share * math.log(pages / before))
        return max(least, min(most, math.ceil(wanted - 1e-9)))
    return most


def calibration_lines(found: Mapping[str, Mapping[str, list[Any]]]) -> Iterator[str]:
    """The start of each set-point, as text."""
    for label, its in found.items():
        yield f"set-point of actor.{label}, statistic by stretch of positions:"
        for tried in its["measured"]:
            values = " ".join("-" if v is None else number(v) for v in tried["statistic"])
            yield f"  pages {','.join(map(str, tried['blocks'])):20s} {values}"
        start = ",".join(map(str, its["blocks_by_length"]))
        yield f"  start with actor.{label}.sparse.blocks_by_length=[{start}]"
