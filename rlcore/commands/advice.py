"""Which correction fits a mismatch that was measured, which is unnecessary, and why.

The bounds are those at which a correction's own defaults begin to act; the words say which figure
decided. Staleness is not in these figures: they are of one step with fresh samples.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rlcore.metrics.cells import number
from rlcore.metrics.rows import Row

# Rounding of float32 and bfloat16 arithmetic stays below these, in nats.
ROUNDING_MEAN, ROUNDING_MAX = 2e-3, 0.1
HEAVY_SHARE = 0.01  # of the tokens outside [0.5, 2]: truncation alone leaves too many far off
LOW_ESS = 0.5  # below it, weights hardly help: most of the batch counts for nothing
DIFFERENT = 0.8  # mean acceptance below which the actor is another policy rather than a noisy one


@dataclass(frozen=True, slots=True)
class Advice:
    """`use`: corrections by name, empty for none; `because`: sentences; `without`: name -> why."""

    use: tuple[str, ...]
    because: tuple[str, ...]
    without: dict[str, str] = field(default_factory=dict)


def advise(row: Row, *, stale: int) -> Advice:
    """What fits the `mismatch/*` of a row. `stale`: the age in steps that the run's schedule allows
    its samples, which adds to what was measured."""

    def of(name: str) -> float:
        return float(row.get(f"mismatch/{name}") or 0.0)

    use, because = _for_mismatch(row)
    if stale and not use:
        use = ("tis",)
        because += (
            f"samples may be up to {stale} steps old, which adds to this: truncation costs nothing "
            "where ratios are near 1, and bounds what staleness adds.",
        )
    without = {}
    if not of("truncated_share"):
        without["tis"] = "no ratio is above its cap of 2"
    if not of("masked_share"):
        without["mis"] = without["icepop"] = "no ratio is outside [0.5, 2]"
    if not of("veto_share"):
        without["veto"] = "no sequence holds a token with a ratio below 1e-4"
    if not of("unlikely_share"):
        without["dvp"] = "every token lies in the learner's safe set (p >= e^-13 of the largest)"
    if of("acceptance") > DIFFERENT:
        share = number(of("acceptance"))
        without["jackpot"] = f"p_ref would accept {share} of the tokens as they are"
    return Advice(use, because, {k: why for k, why in without.items() if k not in use})


def _for_mismatch(row: Row) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """By the figures alone."""
    figures = {name.removeprefix("mismatch/"): float(v) for name, v in row.items() if v is not None}
    mean, worst = figures.get("abs_dlogp_mean", 0.0), figures.get("abs_dlogp_max", 0.0)
    ess, masked = figures.get("ess", 1.0), figures.get("masked_share", 0.0)
    if figures.get("acceptance", 1.0) < DIFFERENT:
        said = f"mean acceptance is {number(figures['acceptance'])}, below {DIFFERENT}"
        return ("jackpot",), (
            f"{said}: the actors sample from another policy, which rejection brings nearer; "
            "ratios alone would be far from 1.",
            *_too_low(ess),
        )
    if mean < ROUNDING_MEAN and worst < ROUNDING_MAX:
        return (), (
            f"|log p_ref - log p_inf| is {number(mean)} in the mean and {number(worst)} at most: "
            "actors and learner agree to the rounding of their arithmetic.",
        )
    if masked >= HEAVY_SHARE:
        use: tuple[str, ...] = ("mis",)
        why = f"{masked:.1%} of the ratios are outside [0.5, 2]: such tokens are better left out."
    else:
        use = ("tis",)
        why = (
            f"|log p_ref - log p_inf| is {number(mean)} in the mean, and {masked:.1%} of the "
            "ratios are outside [0.5, 2]: truncated weights correct it without a large variance."
        )
    extra = []
    if figures.get("veto_share"):
        use += ("veto",)
        share = figures["veto_share"]
        extra.append(f"{share:.1%} of the sequences hold a token with a ratio below 1e-4.")
    if figures.get("unlikely_share"):
        use = ("dvp", *use)
        share = figures["unlikely_share"]
        extra.append(f"{share:.2%} of the tokens lie outside the learner's safe set.")
    return use, (why, *extra, *_too_low(ess))


def _too_low(ess: float) -> tuple[str, ...]:
    if ess >= LOW_ESS:
        return ()
    return (
        f"The effective sample size is {number(ess)}, below {LOW_ESS}: weights will waste most of "
        "the batch, and a more precise actor is worth more than any correction.",
    )
