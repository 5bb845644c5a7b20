"""`rlcore plan ... gpus=N`: how to divide GPUs between actors and learner, and what other actors or
failures would change."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlcore.advisor.plan import (
    ASSUMED,
    STEPS,
    beside_of,
    check_simulated,
    check_source,
    engine_of,
    episodes_of,
    lengths_of,
    planned,
    shape_of,
)
from rlcore.advisor.planner.forecast import Split, best_of, forecast, least_ranks, searched
from rlcore.advisor.planner.gpus import (
    GPUS,
    SHAPES,
    EngineShape,
    Gpu,
    Shape,
    actor_rates,
    learner_rates,
)
from rlcore.advisor.planner.picture import picture
from rlcore.advisor.planner.run import PlannedFleet
from rlcore.advisor.planner.specs import EpisodeSpec, LengthSpec, Rates
from rlcore.config.schema import RunConfig
from rlcore.errors import StageError, UserError
from rlcore.progress import waiting
from rlcore.spec import refuse

CONFIGURED = "as configured"
LONGER = 4  # times the steps, where failures are simulated: they are rare
LINE = "{:<24s} {:>8} {:>7} {:>8} {:>10} {:>10} {:>12} {:>13}  {}"
HEADER = LINE.format(
    "", "learner", "actors", "s/step", "trained/s", "staleness", "actors idle", "learner idle", ""
)


@dataclass(frozen=True, slots=True)
class Variant:
    """A kind of actors. Example: Variant("fp8", EngineShape(fp8=True), SHAPES["qwen3-8b"])"""

    name: str
    engine: EngineShape
    shape: Shape  # of the model that samples


@dataclass(frozen=True, slots=True)
class _Fleets:
    """A fleet without its division and its kind of actors."""

    config: RunConfig
    gpu: Gpu
    policy: Shape
    lengths: LengthSpec
    episodes: EpisodeSpec | None

    def fleet(
        self, variant: Variant, ranks: int, actors: int, *, failures: float = 0.0, times: int = 1
    ) -> PlannedFleet:
        """The fleet of a division. `failures`: per day and actor. `times`: a factor of the number
        of steps."""
        rates = Rates(
            lengths=self.lengths,
            episodes=self.episodes,
            learner=learner_rates(self.gpu, self.policy, ranks),
            failures_per_day=failures,
        )
        (label,) = self.config.actor
        its = actor_rates(self.gpu, variant.shape, variant.engine, context=rates.context)
        steps = STEPS * times
        return planned(self.config, {label: actors}, {label: its}, rates, steps=steps)

    def splits(self, variant: Variant, gpus: int) -> list[Split]:
        """The simulated divisions."""
        return searched(
            gpus,
            variant.engine.gpus,
            least_ranks(self.policy.parameters, self.gpu.memory_gib),
            lambda ranks, actors: forecast(self.fleet(variant, ranks, actors)),
        )


def split_plan(config: RunConfig, words: Mapping[str, str]) -> int:
    """Print the divisions of `gpus` that were simulated, and the best one of every variant and
    failure rate. `words`: the arguments of `plan` that were given. Raises UserError."""
    if "gpu" not in words or {"rates", "actors", "kinds"} & set(words):
        raise UserError(
            f"gpus={words['gpus']} needs gpu=NAME, and takes none of rates=, actors= and kinds=: "
            "rates of a file hold for one number of ranks, and a mix is of several kinds."
        )
    check_source(words, config)
    check_simulated(config)
    refuse(
        bool(beside_of(config)),
        f"gpus={words['gpus']} divides GPUs between actors and the policy's learner, and "
        f"{beside_of(config)} takes memory or GPUs too: leave gpus= out.",
    )
    refuse(
        len(config.actor) > 1,
        f"gpus={words['gpus']} needs one kind of actor, and actor=[{','.join(config.actor)}] has "
        "several: give the others as variants=.",
    )
    gpus = _whole(words["gpus"])
    variants, failures = _variants(config, words), _failures(words)
    lengths, episodes = lengths_of(config, words), episodes_of(config, words)
    fleets = _Fleets(config, _gpu(words), shape_of(config, words), lengths, episodes)
    print(f"rates: {words['gpu']}, {ASSUMED}\n{HEADER}")
    try:
        tried = {v.name: _printed(fleets, v, gpus) for v in variants}
    except ValueError as e:
        raise UserError(f"gpus={gpus} of gpu={words['gpu']} are too few: {e}.") from e
    best = best_of(tried[CONFIGURED])
    _compared(tried)
    costs = _failing(fleets, variants[0], best, failures)
    _written(words, tried, costs)
    return 0


def _printed(fleets: _Fleets, variant: Variant, gpus: int) -> list[Split]:
    with waiting("plan", f"simulating divisions of {gpus} GPUs, {variant.name}"):
        splits = fleets.splits(variant, gpus)
    best = best_of(splits)
    for s in splits:
        print(_line(variant.name, s, "best" if s is best else s.forecast.bottleneck), flush=True)
    return splits


def _line(name: str, s: Split, note: str) -> str:
    f = s.forecast
    return LINE.format(
        name,
        s.ranks,
        s.actors,
        f"{f.step_s:.3g}",
        f"{f.train_tokens_per_s:.4g}",
        f"{f.staleness_mean:.2f}",
        f"{f.actors_idle:.0%}",
        f"{f.learner_idle:.0%}",
        note,
    ).rstrip()


def _compared(tried: Mapping[str, list[Split]]) -> None:
    best = {name: best_of(splits) for name, splits in tried.items()}
    base = best[CONFIGURED].forecast.train_tokens_per_s
    print("\nthe best of each:")
    for name, s in best.items():
        print(_line(name, s, f"{s.forecast.train_tokens_per_s / base:.2f} times"))


def _failing(
    fleets: _Fleets, variant: Variant, best: Split, rates: list[float]
) -> list[dict[str, Any]]:
    """Return the cost of failures at the best division."""
    costs: list[dict[str, Any]] = []
    if not rates:
        return costs
    with waiting("plan", "simulating without failures"):
        without = forecast(fleets.fleet(variant, best.ranks, best.actors, times=LONGER))
    for rate in rates:
        name = f"{rate:g} failures a day, actor"
        fleet = fleets.fleet(variant, best.ranks, best.actors, failures=rate, times=LONGER)
        try:
            with waiting("plan", f"simulating {name}"):
                f = forecast(fleet)
        except StageError as e:
            print(f"{name}: the run ends: {e}")
            costs.append({"failures_per_day": rate, "error": str(e)})
            continue
        lost = 1 - f.train_tokens_per_s / without.train_tokens_per_s
        note = f"{lost:.1%} lost, {f.replacements} replaced"
        print(_line(name, replace(best, forecast=f), note), flush=True)
        costs.append({"failures_per_day": rate, **f.as_row(), "lost": lost})
    return costs


def _written(
    words: Mapping[str, str], tried: Mapping[str, list[Split]], costs: list[dict[str, Any]]
) -> None:
    if "out" in words:
        splits = [
            {"variant": name, "ranks": s.ranks, "actors": s.actors, **s.forecast.as_row()}
            for name, of_it in tried.items()
            for s in of_it
        ]
        found = {"splits": splits, "failures": costs}
        Path(words["out"]).write_text(json.dumps(found, indent=1) + "\n")
    if "picture" in words:
        curves = {
            name: [(float(s.ranks), s.forecast.train_tokens_per_s) for s in of_it]
            for name, of_it in tried.items()
        }
        title = f"{words['gpus']} {words['gpu']}: tokens trained on per second"
        drawn = picture(title, "GPUs of the learner, the others sample", "tokens/s", curves)
        Path(words["picture"]).write_text(drawn)


def _variants(config: RunConfig, words: Mapping[str, str]) -> list[Variant]:
    """The configured actors, and the kinds that `variants` names, such as
    fp8,sparse:2048,draft:qwen3-1.7b."""
    ((label, actor),) = config.actor.items()
    refuse(
        actor.own_model,
        f"actor.{label}.kind=draft cannot be divided by gpus=: plan actor=bf16 with "
        "variants=draft:SHAPE.",
    )
    policy = shape_of(config, words)
    rates = Rates(lengths=lengths_of(config, words), episodes=episodes_of(config, words))
    own = engine_of(actor, rates.context)
    found = [Variant(CONFIGURED, own, policy)]
    for name in filter(None, words.get("variants", "").split(",")):
        kind, _, detail = name.partition(":")
        if kind == "fp8" and not detail:
            found.append(Variant(name, replace(own, fp8=True), policy))
        elif kind == "sparse" and detail.isdigit() and int(detail):
            found.append(Variant(name, replace(own, budget=int(detail)), policy))
        elif kind == "draft" and detail in SHAPES:
            found.append(Variant(name, own, SHAPES[detail]))
        else:
            choices = ("fp8", "sparse:TOKENS", *(f"draft:{s}" for s in SHAPES))
            raise UserError.choice("variants", name, choices)
    return found


def _failures(words: Mapping[str, str]) -> list[float]:
    try:
        rates = [float(w) for w in filter(None, words.get("failures", "").split(","))]
    except ValueError:
        rates = [-1.0]
    if not all(0 < rate < 1e4 for rate in rates):
        raise UserError(f"failures={words['failures']} is not a list of positive numbers.")
    return rates


def _gpu(words: Mapping[str, str]) -> Gpu:
    if words["gpu"] not in GPUS:
        raise UserError.choice("gpu", words["gpu"], GPUS)
    return GPUS[words["gpu"]]


def _whole(text: str) -> int:
    if not text.isdigit() or int(text) < 2:
        raise UserError(f"gpus={text} is not a whole number of at least 2.")
    return int(text)
