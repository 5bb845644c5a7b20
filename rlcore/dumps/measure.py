"""Measures a stream of answers: the mismatch by kind, position and age, and what each correction
would do with it. A few hundred answers are in memory at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlcore.corrections.ais import AisSpec
from rlcore.corrections.drift import policy_distance
from rlcore.corrections.mismatch import (
    AGE_BINS,
    mismatch_accumulate,
    mismatch_metrics,
    mismatch_values,
)
from rlcore.corrections.numerics import ONE_RANK
from rlcore.corrections.pipeline import Pipeline, build
from rlcore.corrections.regimes import EIGHTHS, eighths, fixed_share
from rlcore.corrections.shadow import compared
from rlcore.corrections.specs import CORRECTIONS
from rlcore.dumps.rows import Row
from rlcore.objectives.specs import ObjectiveSpec
from rlcore.registry import load_object
from rlcore.types import StepTensors

ANSWERS = 256  # a batch: what corrections that look at whole batches see
LONGEST = 1_000_000  # tokens of a batch, padding included; with a top k each counts as 1 + k
KINDS = 16  # that are told apart
OTHERS = "others"  # the kind of all further ones
SHADOWS = ("tis", "mis", "icepop", "minpro", "vesp", "veto", "m2po", "ais", "jackpot")
OF_TOP_K = ("jackpot",)
ALL = ""  # the kind that stands for all


class Running:
    """Sums and maxima over batches, one after the other: what a reduction over ranks is over ranks.
    Each batch must make the same calls in the same order; the last batch's results are of all."""

    def __init__(self) -> None:
        self._totals: list[Tensor] = []
        self._at = 0

    def begin(self) -> None:
        """The calls of the next batch follow."""
        self._at = 0

    def __call__(self, values: Tensor) -> Tensor:
        return self._merge(values, torch.add)

    def max(self, values: Tensor) -> Tensor:
        return self._merge(values, torch.maximum)

    def _merge(self, values: Tensor, merge: Any) -> Tensor:
        if self._at == len(self._totals):
            self._totals.append(values.clone())
        else:
            self._totals[self._at] = merge(self._totals[self._at], values)
        self._at += 1
        return self._totals[self._at - 1].clone()


@dataclass(slots=True)
class Measured:
    """One kind's figures, by the names of `mismatch/*` without the group."""

    figures: dict[str, float] = field(default_factory=dict)
    by_eighth: list[float | None] = field(default_factory=list)  # k3, of each eighth of answers
    by_age: dict[int, tuple[int, float]] = field(default_factory=dict)  # from age: tokens, k3
    shadows: dict[str, dict[str, float]] = field(default_factory=dict)


class Meter:
    """The running measure of one kind."""

    def __init__(self, pipelines: Mapping[str, Pipeline]) -> None:
        self._pipelines = pipelines
        self._running: dict[str, Running] = {}
        self._tokens = self._answers = 0
        self.measured = Measured()

    def add(self, step: StepTensors, *, repeats: bool, aged: bool, gains: bool) -> None:
        """Measure one batch. `repeats`, `aged`, `gains`: whether token ids, versions and advantages
        are known."""
        found = self.measured
        self._tokens += int(step.mask.sum())
        self._answers += len(step.mask)
        figures = mismatch_metrics(step, self._next("mismatch"), AisSpec())
        found.figures = {k.removeprefix("mismatch/"): v for k, v in figures.items()}
        found.figures |= {
            "answers": float(self._answers),
            "tokens": float(self._tokens),
            "length": self._tokens / max(self._answers, 1),
        }
        if repeats and step.repeats is not None:
            found.figures |= fixed_share(
                step.logp_ref, step.logp_inf, step.mask, step.repeats, self._next("repeats")
            )
        if (ids := step.topk_ids_inf) is not None:
            assert step.topk_logp_inf is not None and step.ref_logp_at_inf_ids is not None
            least, _ = policy_distance(ids, step.topk_logp_inf, step.ref_logp_at_inf_ids)
            both = torch.stack([least.where(step.mask, 0.0).sum(), step.mask.sum()])
            summed, tokens = self._next("tv")(both).tolist()
            found.figures["tv"] = summed / max(tokens, 1.0)
        found.by_eighth = [v[1] for v in self._split(step, eighths(step.mask), EIGHTHS, "eighth")]
        if aged:
            ages = torch.bucketize(_age(step), torch.tensor(AGE_BINS), right=True) - 1
            split = self._split(step, ages, len(AGE_BINS), "age")
            found.by_age = {
                least: (count, value)
                for least, (count, value) in zip(AGE_BINS, split)
                if value is not None
            }
        for label, pipeline in self._pipelines.items():
            if label in OF_TOP_K and step.topk_ids_inf is None:
                continue
            corrected = pipeline.correct(step, ONE_RANK, measure=False)
            weight = corrected.weight.double().where(corrected.mask, 0.0)
            plain = step.mask.double()
            weights = (corrected.mask, weight, plain)
            values = compared(step.mask, step.advantages, *weights, self._next(label))
            if not gains:
                values.pop("cosine", None)
            found.shadows[label] = values

    def _next(self, name: str) -> Running:
        running = self._running.setdefault(name, Running())
        running.begin()
        return running

    def _split(
        self, step: StepTensors, part: Tensor, count: int, name: str
    ) -> list[tuple[int, float | None]]:
        """Tokens and k3 of each part; None without tokens."""
        running = self._next(name)
        found = []
        for number in range(count):
            own = step.mask & (part == number)
            tokens = int(running(own.sum()))
            summed = running(mismatch_accumulate(step.logp_ref, step.logp_inf, own))
            found.append((tokens, mismatch_values(summed)["kl_k3"] if tokens else None))
        return found


def _age(step: StepTensors) -> Tensor:
    reference = step.step if step.ref_version is None else step.ref_version
    return (reference - step.token_version).clamp(min=0)


def measure(rows: Iterable[Row]) -> tuple[dict[str, Measured], set[str]]:
    """Figures by kind of actor, all kinds together under `ALL`, and the fields that rows had."""
    pipelines = {
        label: build({label: load_object(CORRECTIONS[label])()}, 0, ObjectiveSpec())
        for label in SHADOWS
    }
    meters: dict[str, Meter] = {}
    had: set[str] = set()
    for batch in batches(rows):
        known = {name for name in Row.__dataclass_fields__ if all(r.has(name) for r in batch)}
        had |= known
        by_kind: dict[str, list[Row]] = {ALL: batch}
        for row in batch:
            if row.kind is not None:
                told = row.kind in meters or len(meters.keys() | by_kind.keys()) <= KINDS
                by_kind.setdefault(row.kind if told else OTHERS, []).append(row)
        for kind, own in by_kind.items():
            meter = meters.setdefault(kind, Meter(pipelines))
            ids = "token_ids" in known and "group" in known
            aged = "version" in known and "ref_version" in known
            gains = "advantages" in known
            meter.add(step_of(own), repeats=ids, aged=aged, gains=gains)
    if len(meters) == 2:  # one kind is all
        meters = {ALL: meters[ALL]}
    return {kind: meter.measured for kind, meter in meters.items()}, had


def batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Answers in their order, a group in one batch where its answers follow each other."""
    batch: list[Row] = []
    widest = 0
    for row in rows:
        cost = len(row.logp_inf) * (1 + len((row.topk_ids_inf or ((),))[0]))
        widest = max(widest, cost)
        same = bool(batch) and row.group is not None and row.group == batch[-1].group
        full = len(batch) >= ANSWERS and not same
        if batch and (full or widest * (len(batch) + 1) > LONGEST):
            yield batch
            batch, widest = [], cost
        batch.append(row)
    if batch:
        yield batch


def step_of(rows: Sequence[Row]) -> StepTensors:
    """A batch as corrections see one: a later policy than p_ref is not known, so p_new is p_ref."""
    width = max(len(row.logp_inf) for row in rows)

    def padded(values: Iterable[Sequence[Any]], dtype: torch.dtype, fill: float = 0) -> Tensor:
        lists = [[*value, *[fill] * (width - len(value))] for value in values]
        return torch.tensor(lists, dtype=dtype)

    groups: dict[Any, int] = {}
    ids = [groups.setdefault(r.group or ("alone", i), len(groups)) for i, r in enumerate(rows)]
    references = [r.ref_version if r.ref_version is not None else 0 for r in rows]
    latest = max(references)
    versions = []
    for row, reference in zip(rows, references):
        own = row.version if row.version is not None else [reference] * len(row.logp_inf)
        versions.append([v + latest - reference for v in own])  # its age stays
    logp_ref = padded((r.logp_ref for r in rows), torch.float32)
    gains = (r.advantages if r.advantages is not None else [1.0] * len(r.logp_inf) for r in rows)
    tensors: dict[str, Any] = {}
    if all(r.has("token_ids") for r in rows):
        tensors["token_ids"] = padded((r.token_ids or () for r in rows), torch.int64)
        tensors["repeats"] = _repeats(rows, ids, width)
    if all(r.has("topk_logp_inf") for r in rows):
        tensors |= _top(rows, width)
    return StepTensors(
        mask=padded(([1] * len(r.logp_inf) for r in rows), torch.bool),
        logp_inf=padded((r.logp_inf for r in rows), torch.float32),
        logp_ref=logp_ref,
        logp_new=logp_ref,
        rewards=torch.tensor([r.reward or 0.0 for r in rows], dtype=torch.float64),
        group_ids=torch.tensor(ids),
        advantages=padded(gains, torch.float32),
        token_version=padded(versions, torch.int32),
        sample_ids=torch.arange(len(rows)),
        step=latest,
        **tensors,
    )


def _repeats(rows: Sequence[Row], groups: Sequence[int], width: int) -> Tensor:
    """Equal numbers for tokens of a group whose kind and ids are equal from the first on."""
    numbers: dict[Any, int] = {}
    found = []
    for row, group in zip(rows, groups):
        so_far: Any = (group, row.kind, tuple(row.version or ())[:1])
        own = []
        for token in row.token_ids or ():
            so_far = numbers.setdefault((so_far, token), len(numbers))
            own.append(so_far)
        found.append([*own, *[-1] * (width - len(own))])
    return torch.tensor(found)


def _top(rows: Sequence[Row], width: int) -> dict[str, Tensor]:
    k = max(len(entry) for row in rows for entry in row.topk_ids_inf or ())
    ids, logps = (-1, torch.int64), (float("-inf"), torch.float32)
    fields = {
        "topk_ids_inf": ("topk_ids_inf", *ids),
        "topk_logp_inf": ("topk_logp_inf", *logps),
        "ref_logp_at_inf_ids": ("ref_logp_at_inf_ids", *logps),
        "topk_ids_ref": ("ref_topk_ids", *ids),
        "topk_logp_ref": ("ref_topk_logp", *logps),
    }
    found = {}
    for name, (of_step, fill, dtype) in fields.items():
        lists = [
            [[*entry, *[fill] * (k - len(entry))] for entry in getattr(row, name)]
            + [[fill] * k] * (width - len(row.logp_inf))
            for row in rows
        ]
        found[of_step] = torch.tensor(lists, dtype=dtype)
    return found
