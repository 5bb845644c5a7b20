"""The samples of a report, as its page reads them: within a budget of bytes, each with its worst
token."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rlcore.metrics.run_folder import Run

SHOWN = (
    "prompt_id",
    "prompt",
    "response",
    "turns",
    "reward",
    "reward_parts",
    "score_status",
    "finish_reason",
    "actor",
    "actor_kind",
    "tokens",
    "pieces",
    "token_versions",
    "learner_version",
    "log_ratio",
    "kind",
    "source",
    "at",
)
TOKENS = 1000  # of a sample that are shown one by one; the rest is plain text
CHARS = 12_000  # of a text


def samples(runs: Sequence[Run], budget: int) -> list[dict[str, Any]]:
    """Those with the worst mismatch first, then the newest, as many as fit into `budget` bytes."""
    found = [shown(sample, run.name, len(runs) > 1) for run in runs for sample in run.samples]
    found.sort(key=lambda s: (-abs(s["worst"] or 0.0), -s["at"]))
    kept = []
    for sample in found:
        budget -= len(json.dumps(sample))
        if budget < 0:
            break
        kept.append(sample)
    return kept


def shown(record: Mapping[str, Any], run: str, several: bool) -> dict[str, Any]:
    """One sample: texts and tokens cut to what a page can hold. "worst": the log-ratio that is the
    furthest from 0, None where the sample has none."""
    sample = {key: record[key] for key in SHOWN if key in record}
    sample.setdefault("reward", None)
    sample.setdefault("at", 0)
    for key in ("prompt", "response"):
        sample[key] = _cut(str(sample.get(key) or ""))
    if "turns" in sample:
        texts = ("observed", "said")
        sample["turns"] = [t | {k: _cut(t[k]) for k in texts} for t in sample["turns"]]
        del sample["response"]  # the turns have it
    ratios = [r for r in sample.get("log_ratio") or () if r is not None and math.isfinite(r)]
    sample["worst"] = max(ratios, key=abs) if ratios else None
    if "pieces" in sample:
        sample["pieces"] = _first(sample["pieces"], TOKENS)
    if several:
        sample["source"] = f"{run}, {sample.get('source', '')}"
    return sample


def _first(pieces: Sequence[Sequence[str]], left: int) -> list[list[str]]:
    kept = []
    for turn in pieces:
        kept.append(list(turn[: max(left, 0)]))
        left -= len(turn)
    return kept


def _cut(text: str) -> str:
    return text if len(text) <= CHARS else f"{text[:CHARS]} ... ({len(text) - CHARS} more)"
