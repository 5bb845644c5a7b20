"""Every cell of the grid, what validation says of it, and how far its expected gradient is from its
reference: as it is, and with the biases that its methods declare opened."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, permutations, product
from typing import Any, Literal, get_args, get_origin

from grid_bandit import (
    GIVEN,
    INF,
    KL_COEF,
    RHO,
    Case,
    Policies,
    expected_advantages,
    gradient,
    kl_reference,
    reference,
)
from torch import Tensor

from rlcore.config.checks import check
from rlcore.config.compose import load
from rlcore.config.sentences import validate
from rlcore.corrections.pipeline import build
from rlcore.corrections.specs import CORRECTIONS, CorrectionSpec
from rlcore.errors import UserError
from rlcore.objectives.protocols import UNCORRECTED, Bias
from rlcore.objectives.specs import (
    LOSSES,
    Aggregation,
    KlEstimator,
    ObjectiveSpec,
    advantage_class,
    loss_class,
)
from rlcore.registry import load_object

AGGREGATIONS = get_args(Aggregation)
# terms beside the policy loss: a KL in it by every estimator, one in the reward, entropy
ESTIMATORS = ("none", *get_args(KlEstimator), "reward", "entropy")
TERMS: dict[str, dict[str, Any]] = {
    "none": {"kl_coef": 0.0},
    "reward": {"kl_in": "reward"},
    "entropy": {"kl_coef": 0.0, "entropy_coef": KL_COEF},
}
EXACT = 1e-5  # an error below is none, relative to the reference's norm
# settings at which thresholds bind on the bandit; a method that is not here has its defaults
TIGHT: dict[str, dict[str, Any]] = {
    "tis": {"cap": 1.25, "floor": 0.5},
    "mis": {"low": 0.75, "high": 1.5},
    "icepop": {"low": 0.75, "high": 1.5},
    "veto": {"threshold": 0.6},
    "opsm": {"delta": 0.02},
    "m2po": {"budget": 0.1},
    "outliers": {"threshold": 0.15},
    "clip_cov": {"share": 1.0, "low": 0.05, "high": 1e9},
    "kl_cov": {"share": 0.2},
    "minpro": {"cap": 1.25},
    "dppo": {"low": 0.05, "high": 0.05, "delta": 0.5, "cap": 1.25, "penalty": 0.1},
    "jackpot": {"c1": 1.25, "c2": 1.25},
    "ais": {"cap": 1.25},
    "dvp": {"rho": RHO},
    "rapid": {"eta": 1.25},
}
NARROW = {"eps_low": 0.1, "eps_high": 0.1, "kl_ratio_cap": 1.25, "kl_coef": KL_COEF}

# the registered losses, and those with a setting of their own
LOSS_SETTINGS: dict[str, dict[str, Any]] = {name: {"loss": name} for name in LOSSES}
LOSS_SETTINGS["ppo(dual_clip=1.2)"] = {"loss": "ppo", "dual_clip": 1.2}
# to corrections these are ppo: beside several of them they are enumerated nightly
LIKE_PPO = {"ppo(dual_clip=1.2)", "gmpo", "sapo"}

Chosen = tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]  # names and their changed settings


@dataclass(frozen=True)
class Cell:
    """One combination. Example: Cell((("tis", ()),), "ppo", "token-mean", False, "none")"""

    chosen: Chosen
    loss: str  # of LOSS_SETTINGS
    aggregation: Any
    later: bool
    kl: Any  # of ESTIMATORS
    second: Chosen | None = None  # of a second kind of actors
    also: tuple[tuple[str, Any], ...] = ()  # further settings of the objective

    @property
    def specs(self) -> dict[str, CorrectionSpec]:
        return _specs(self.chosen)

    def case(self) -> Case:
        replaced = [s.replaces_advantage for s in self.specs.values() if s.replaces_advantage]
        settings = NARROW | TERMS.get(self.kl, {"kl_estimator": self.kl})
        settings |= {"aggregation": self.aggregation, "advantage": (replaced or [GIVEN])[0]}
        objective = ObjectiveSpec(**settings | LOSS_SETTINGS[self.loss] | dict(self.also))
        if self.second is None:
            return Case(self.specs, objective, self.later, pairs="advantage" in dict(self.also))
        policies = Policies(actors=("first", "second"))
        return Case(self.specs, objective, self.later, policies, _specs(self.second))


def _specs(chosen: Chosen) -> dict[str, CorrectionSpec]:
    return {name: _spec(name, settings) for name, settings in chosen}


@cache
def _spec(name: str, settings: tuple[tuple[str, Any], ...]) -> CorrectionSpec:
    found: CorrectionSpec = load_object(CORRECTIONS[name])(**TIGHT.get(name, {}), **dict(settings))
    return found


def lists(*, reverse: bool = False) -> Iterator[Chosen]:
    """No correction; every registered one, and with each other value of its switches; all pairs of
    which one weighs or constrains (two masks have nothing but their product), with `reverse` in
    both orders; safe set and veto around each that weighs."""
    alone = {name for name in CORRECTIONS if not load_object(CORRECTIONS[name]).weighs} - {"dvp"}
    yield ()
    for name in CORRECTIONS:
        yield ((name, ()),)
        yield from (((name, (switch,)),) for switch in switches(name))
    yield (("jackpot", (("target", "new"), ("short_circuit", True))),)
    for pair in permutations(CORRECTIONS, 2) if reverse else combinations(CORRECTIONS, 2):
        if not alone.issuperset(pair):
            yield tuple((name, ()) for name in pair)
    for name in CORRECTIONS:
        if load_object(CORRECTIONS[name]).weighs:
            yield (("dvp", ()), (name, ()), ("veto", ()))


def losses_of(chosen: Chosen, *, reverse: bool = False) -> list[str]:
    """The losses beside which a list is enumerated."""
    return [name for name in LOSS_SETTINGS if reverse or len(chosen) < 2 or name not in LIKE_PPO]


def switches(name: str) -> Iterator[tuple[str, Any]]:
    """Every value of a setting with few values, but the one that it has."""
    for key, setting in load_object(CORRECTIONS[name]).model_fields.items():
        if get_origin(setting.annotation) is Literal:
            values: tuple[Any, ...] = get_args(setting.annotation)
        else:
            values = (False, True) if setting.annotation is bool else ()
        yield from ((key, value) for value in values if value != setting.default)


def fleets(loss: str, *, every: bool = False) -> Iterator[Cell]:
    """Half of the lists, the other half for the next loss, each beside another list of a second
    kind of actors; with `every` all beside all that validation accepts. In turn over all means,
    steps and estimators."""
    known = list(lists())
    if not every:  # to validate what is refused by itself takes most of the time
        plain = (AGGREGATIONS[0], False, ESTIMATORS[0])
        known = [chosen for chosen in known if not refusal(Cell(chosen, loss, *plain))]
    first = list(LOSS_SETTINGS).index(loss) % 2
    for i, chosen in enumerate(known if every else known[first::2]):
        for j in range(len(known)):
            second = known[(3 * i + j + 1) % len(known)]
            term = ESTIMATORS[(i + j) % len(ESTIMATORS)]
            axes = AGGREGATIONS[(i + j) % 3], (i + j) % 2 == 1, term
            cell = Cell(chosen, loss, *axes, second)
            if not refusal(cell):
                yield cell
                if not every:
                    break


def cells(*, reverse: bool = False) -> Iterator[Cell]:
    for chosen in lists(reverse=reverse):
        losses = losses_of(chosen, reverse=reverse)
        for rest in product(losses, AGGREGATIONS, (False, True), ESTIMATORS):
            yield Cell(chosen, *rest)


# ----- validation -----


@cache
def _base(later: bool) -> dict[str, Any]:
    words = ["run_dir=grid", f"schedule={'large_batch' if later else 'on_policy'}"]
    return load(words).model_dump(mode="json")


@cache
def refusal(cell: Cell) -> str:
    """Why the configuration of a run refuses the cell, or ""."""
    specs, case = cell.specs, cell.case()
    replaced = case.objective.advantage != GIVEN
    algorithm = case.objective.model_dump() | ({} if replaced else {"advantage": "reinforce"})
    data = _base(cell.later)
    data = data | {
        "algorithm": data["algorithm"] | algorithm,
        "correction": _written(specs),
    }
    if cell.second is not None:
        (kind,) = data["actor"].values()
        own = {"correction": _written(_specs(cell.second))}
        data["actor"] = {"first": kind, "second": kind | own}
    try:
        check(validate(data))
    except UserError as error:
        return str(error)
    return ""


def _written(specs: dict[str, CorrectionSpec]) -> dict[str, Any]:
    return {name: spec.model_dump() for name, spec in specs.items()} or {"none": {}}


# ----- biases -----


def biases(case: Case) -> list[Bias]:
    """What the case's methods declare of the policy gradient; of the KL's part, where it has one.

    Without those that its settings open anyway."""
    objective = case.objective
    own = build(case.corrections, 0, objective, case.strata).biases
    found = list(ObjectiveSpec.biases)
    if objective.kl_in_loss or objective.entropy_coef:
        sampled = objective.kl_in_loss and objective.kl_estimator != "full"
        found += ObjectiveSpec.kl_biases if sampled else ()
        found += [bias for bias in own if bias != UNCORRECTED]
    else:
        # a correction that switches the inner clip off leaves the loss nothing to clip
        clips = not any(spec.inner_clip_off for spec in case.specs)
        found += [*(loss_class(objective.loss).biases if clips else ()), *own]
        found += advantage_class(objective.advantage).biases if case.pairs else ()
    return [bias for bias in found if not _holds(bias, objective)]


def _holds(bias: Bias, objective: ObjectiveSpec) -> bool:
    """Whether its settings are open already."""
    names = type(objective).model_fields
    return bool(bias.opened) and all(
        key in names and getattr(objective, key) == value for key, value in bias.opened.items()
    )


def opened(case: Case, which: Collection[Bias]) -> Case:
    """The case with some of its biases gone."""
    loss: dict[str, Any] = {}
    declared = loss_class(case.objective.loss).biases + ObjectiveSpec.kl_biases
    declared += ObjectiveSpec.biases + advantage_class(case.objective.advantage).biases
    for bias in declared:
        loss |= bias.opened if bias in which else {}
    changed = {
        key: {name: _opened(spec, case, which) for name, spec in own.items()}
        for key, own in (("corrections", case.corrections), ("second", case.second))
        if own is not None
    }
    objective = case.objective.model_copy(update=loss)
    free = replace(case, objective=objective, **changed)
    return replace(free, policies=_policies(free, {bias.where for bias in which}))


def _opened(spec: CorrectionSpec, case: Case, which: Collection[Bias]) -> CorrectionSpec:
    change: dict[str, Any] = {}
    for bias in spec.under(case.objective).biases:
        change |= bias.opened if bias in which else {}
    return spec.model_copy(update=change)


def _policies(case: Case, where: set[str]) -> Policies:
    policies = replace(case.policies, one_token="one token" in where)
    if "matched" not in where:
        return policies
    # what weights lead to is what the actor has
    anchored_later = case.anchored and case.later
    actors = ("first",) * len(policies.actors)
    return replace(policies, **{"new" if anchored_later else "ref": INF}, actors=actors)


# ----- measurement -----


def error(case: Case, **layout: int) -> float:
    """How far the policy's expected gradient is from its reference, relative to that; with a KL
    term or an entropy bonus, how far this term's own part is."""
    objective = case.objective
    if objective.kl_in_reward:
        return distance(gradient(case, **layout)[0], reference(case, expected_advantages(case)))
    off = {"kl_coef": 0.0, "entropy_coef": 0.0}
    bare = replace(case, objective=objective.model_copy(update=off))
    alone, advantages = _gradient(bare, **layout)
    if not (objective.kl_coef or objective.entropy_coef):
        given = expected_advantages(case) if case.pairs else advantages
        return distance(alone, reference(case, given))
    both, _ = _gradient(case, **layout)
    return distance((both - alone) / KL_COEF, kl_reference(case))


def distance(found: Tensor, true: Tensor) -> float:
    size = true.norm().item()
    assert size > 1e-3, "the reference is no gradient to compare with"
    return (found - true).norm().item() / size


_found: dict[str, tuple[Tensor, Tensor]] = {}


def _gradient(case: Case, **layout: int) -> tuple[Tensor, Tensor]:
    """Once for each case: cells of the KL share the policy's part."""
    if case.objective.kl_coef or case.objective.entropy_coef or layout:
        return gradient(case, **layout)
    policies = case.policies
    key = repr((case.lists, case.objective, case.later, policies.one_token, policies.actors))
    key += str(case.pairs)
    key += str([t.tolist() for t in (case.policies.ref, case.policies.new)])
    if key not in _found:
        _found[key] = gradient(case)
    return _found[key]
