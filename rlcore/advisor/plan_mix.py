"""The mix of kinds of actors that a plan advises, from what earlier runs of these kinds measured.
Either all of it counts, or their tails alone at the rates of a forecast."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from rlcore.advisor.kinds_advice import TOLERATED, kind_rates, mix, mix_lines
from rlcore.advisor.planner.forecast import Forecast
from rlcore.config.compose import load
from rlcore.config.schema import RunConfig
from rlcore.errors import UserError
from rlcore.loop.shares import KindRate
from rlcore.metrics.digest import number
from rlcore.metrics.rows import run_rows

Rates = dict[str, dict[str, KindRate]]  # for each actor-second and unit of money, by label
UNKNOWN = (
    "mix: none, since the tail of each kind is unknown before a run: kinds=RUN[,RUN] names runs of "
    "these kinds, or what rlcore doctor json=true printed of them"
)


def measured_kinds(sources: str, config: RunConfig) -> Rates:
    """The worth of each of the run's kinds of actors, from run directories or files of `rlcore
    doctor json=true`, with commas between; a later one replaces an earlier one.

    Raises UserError for a source that cannot be read, and where a kind of the run is in none.
    """
    found: Rates = {}
    for source in sources.split(","):
        for per, kinds in _read(Path(source), sources).items():
            own = {label: kind for label, kind in kinds.items() if label in config.actor}
            found.setdefault(per, {}).update(own)
    missing = [label for label in config.actor if label not in found.get("actor_s", {})]
    if missing:
        raise UserError(
            f"kinds={sources} measured no tokens of {', '.join(missing)}: name a run of each of "
            f"actor=[{','.join(config.actor)}]."
        )
    return {per: kinds for per, kinds in found.items() if len(kinds) == len(config.actor)}


def _read(source: Path, given: str) -> Rates:
    if (source / "config.yaml").is_file():
        config = load([f"run_dir={source}", "resume=auto"])
        return kind_rates(run_rows(source), config.actor)
    try:
        run = json.loads(source.read_text())["run"]
        return {
            per: {label: KindRate(**kind) for label, kind in kinds.items()}
            for per, kinds in run["rates"].items()
        }
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise UserError(
            f"kinds={given}: {source} is neither a run directory nor a file that rlcore doctor "
            "json=true printed after a step."
        ) from e


def at_forecast(rates: Rates, forecasts: Mapping[str, Forecast], config: RunConfig) -> Rates:
    """The measured kinds at the pace of forecasts of fleets of one kind each, by label: tokens for
    each second that an engine decodes, and for the price of it."""
    paces = {}
    for label, forecast in forecasts.items():
        engines = config.actor[label].count * (1.0 - forecast.actors_idle)
        paces[label] = forecast.rollout_tokens_per_s / engines
    prices = {label: config.actor[label].price for label in paces}
    of_s = rates["actor_s"]
    found = {"actor_s": {n: of_s[n]._replace(tokens=pace) for n, pace in paces.items()}}
    if None not in prices.values():
        hourly = {n: paces[n] * 3600 / (price or 1.0) for n, price in prices.items()}
        found["price"] = {n: of_s[n]._replace(tokens=value) for n, value in hourly.items()}
    return found


def advised(rates: Rates, origin: str) -> Iterator[str]:
    """The kinds and their mix as text. `origin`: of the rates and of the tails."""
    yield f"kinds of actors, {origin}:"
    for label, kind in rates["actor_s"].items():
        yield (
            f"  {label:20s} {number(kind.tokens):>8s} tokens an actor-second, effective "
            f"{number(kind.effective)}, below agreement {TOLERATED} {number(kind.below)}"
        )
    yield from mix_lines(mix(rates))
