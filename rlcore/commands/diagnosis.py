"""`rlcore doctor KEY=VALUE ...`: whether a configured run would start, and how far apart its actors
and its learner are, before it is paid for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rlcore.commands.advice import Advice, advise
from rlcore.commands.probe import Probe
from rlcore.commands.watch import course_of
from rlcore.config.schema import RunConfig
from rlcore.metrics.cells import number

# In the order in which they are shown: metric, what it is.
FIGURES = {
    "abs_dlogp_mean": "mean |log p_ref - log p_inf| (nats)",
    "abs_dlogp_max": "largest |log p_ref - log p_inf| (nats)",
    "kl_k3": "KL(p_inf || p_ref) (nats)",
    "ess": "effective sample size (share)",
    "acceptance": "mean of min(1, p_ref/p_inf)",
    "truncated_share": "tokens with p_ref/p_inf above 2",
    "masked_share": "tokens with p_ref/p_inf outside [0.5, 2]",
    "unlikely_share": "tokens outside the learner's safe set",
    "veto_share": "sequences with a ratio below 1e-4",
}


def diagnosis(config: RunConfig, found: Probe, forecast: Sequence[str]) -> dict[str, Any]:
    """Everything that is said of a configured run, for JSON and for text. `forecast`: lines of the
    planner's, none where it was not asked."""
    stale = course_of(config).staleness_bound
    shown: dict[str, Any] = {
        "starts": found.started,
        "seconds": round(found.seconds, 1),
        "error": found.error,
        "staleness_bound": stale,
        "forecast": list(forecast),
    }
    if not found.row:
        return shown
    advice = advise(found.row, stale=stale)
    figures = {name: found.row.get(f"mismatch/{name}") for name in FIGURES}
    return shown | {
        "tokens": found.row.get("train/tokens"),
        "mismatch": {name: value for name, value in figures.items() if value is not None},
        "worst_tokens": [asdict(token) for token in found.worst],
        "advice": asdict(advice) | {"configured": judged_choice(config, advice)},
    }


def judged_choice(config: RunConfig, advice: Advice) -> str:
    """What the run's own choice of corrections is to this advice, in a sentence."""
    chosen = tuple(config.correction.chosen())
    idle = [name for name in chosen if name in advice.without and name not in advice.use]
    missing = [name for name in advice.use if name not in chosen]
    said = f"correction=[{','.join(chosen) or 'none'}] "
    if not idle and not missing:
        return said + "fits."
    parts = [f"lacks {', '.join(missing)}"] if missing else []
    parts += [f"has {', '.join(idle)}, which nothing here calls for"] if idle else []
    return said + " and ".join(parts) + "."


def lines(shown: Mapping[str, Any]) -> list[str]:
    """The same as text."""
    if not shown["starts"]:
        return [f"FAIL  a run of this configuration did not take a step: {shown['error']}"]
    said = [f"ok    a run of this configuration took a step after {shown['seconds']:.0f} s"]
    if "mismatch" not in shown:
        return said
    said += ["", f"actors against learner, {number(shown['tokens'])} fresh tokens, no correction:"]
    said += [f"  {FIGURES[k]:44s} {number(v)}" for k, v in shown["mismatch"].items()]
    if shown["worst_tokens"]:
        said += ["worst tokens (p_ref/p_inf, after what text, token):"]
    for token in shown["worst_tokens"]:
        ratio = number(math.exp(token["log_ratio"]))
        said.append(
            f"  {ratio:>8s}  {token['before']!r} {token['text']!r}  "
            f"{token['actor']} {token['prompt_id']}"
        )
    return said + _advised(shown)


def _advised(shown: Mapping[str, Any]) -> list[str]:
    advice = shown["advice"]
    use = ",".join(advice["use"])
    said = ["", f"advice: correction={f'[{use}]' if ',' in use else use or 'none'}"]
    said += [f"  {sentence}" for sentence in advice["because"]]
    said += [f"  not {name}: {why}" for name, why in advice["without"].items()]
    said.append(f"  the run's {advice['configured']}")
    bound = shown["staleness_bound"]
    if bound:
        said.append(
            f"staleness: this schedule trains on tokens up to {bound} steps old, which adds to the "
            "mismatch above."
        )
        wanted = ["  rates=FILE or gpu=NAME forecasts how old they will be."]
        said += [f"  {line}" for line in shown["forecast"]] or wanted
    return said
