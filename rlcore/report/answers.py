"""Samples as a page or a console shows them. They are answers to the same problems before and
after, changed ones first, and the samples of training, cut to what a page can hold."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from rlcore.metrics.digest import CHANGES, Record, change, changed_first
from rlcore.metrics.run_folder import Evaluated, Run


def changes(runs: Sequence[Run], budget: int) -> list[dict[str, Any]]:
    """The first and the last answers of each evaluation of the runs: "label", "from" and "to"
    (versions), "counts" by change, "items" with "prompt_id", "prompt", "change", "before" and
    "after". Greedy answers first; items as many as fit into `budget` bytes, shared evenly."""
    found = [(run, answers) for run in runs for answers in run.answers]
    found.sort(key=lambda pair: not pair[1].label.endswith("greedy"))
    share = budget // max(len(found), 1)
    return [_changes(run, answers, len(runs) > 1, share) for run, answers in found]


def _changes(run: Run, answers: Evaluated, several: bool, budget: int) -> dict[str, Any]:
    pairs = changed_first(answers.before, answers.after)
    kinds = [change(*pair) for pair in pairs]
    items = []
    for kind, (before, after) in zip(kinds, pairs):
        item = {
            "prompt_id": str(after.get("prompt_id", "")),
            "prompt": _cut(str(after.get("prompt") or "")),
            "change": kind,
            "reference": _cut(str(after.get("reference") or "")),
            "before": _answer(before),
            "after": _answer(after),
        }
        budget -= len(json.dumps(item))
        if budget < 0:
            break
        items.append(item)
    return {
        "label": f"{run.name}, {answers.label}" if several else answers.label,
        "from": answers.first,
        "to": answers.last,
        "counts": {kind: kinds.count(kind) for kind in CHANGES},
        "items": items,
    }


def _answer(record: Record) -> dict[str, Any]:
    return {
        "text": _cut(str(record.get("response") or "")),
        "reward": record.get("reward"),
        "status": record.get("status", record.get("score_status")),
        "cut": bool(record.get("truncated")),
    }


SHOWN = (
    "prompt_id",
    "group_id",
    "sample",
    "prompt",
    "response",
    "reference",
    "turns",
    "reward",
    "advantage",
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
    """Samples with the worst mismatch first, then the newest, as many as fit into `budget` bytes.
    Samples of one group stay together; its worst token decides its place."""
    groups: dict[Any, list[dict[str, Any]]] = {}
    for run in runs:
        for sample in run.samples:
            made = shown(sample, run.name, len(runs) > 1)
            own = made.get("group_id", id(made))
            groups.setdefault((run.name, made.get("source"), own), []).append(made)
    ordered = sorted(groups.values(), key=lambda its: (-_worst(its), -its[0]["at"]))
    kept: list[dict[str, Any]] = []
    for group in ordered:
        budget -= sum(len(json.dumps(sample)) for sample in group)
        if budget < 0:
            break
        kept += group
    return kept


def _worst(group: Sequence[Record]) -> float:
    return max(abs(sample["worst"] or 0.0) for sample in group)


def shown(record: Record, run: str, several: bool) -> dict[str, Any]:
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
