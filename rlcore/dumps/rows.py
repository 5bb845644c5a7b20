"""One answer of a dump: its fields, and what is wrong with it.

The schema of a row, in JSON or Parquet (docs/diagnose.md):

    logp_inf, logp_ref       [T] log-probs of the sampled tokens, of the actor and of the learner
    mask                     [T] 0 or 1: tokens that count; left out: all
    advantages               [T], or one number for the answer
    reward                   one number
    group                    text or number, equal for the answers to one prompt
    kind                     text: the kind of actor that sampled it
    version, ref_version     optimizer steps behind the weights that sampled it ([T] or one number),
                             and behind those of logp_ref
    token_ids                [T]
    topk_ids_inf, topk_logp_inf, ref_logp_at_inf_ids, topk_ids_ref, topk_logp_ref
                             [T, k]: the actor's top k, the learner's log-probs at these ids, and
                             the learner's own top k
    vocabulary               entries of the vocabulary
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from rlcore.errors import UserError

TOP_K = (
    "topk_ids_inf",
    "topk_logp_inf",
    "ref_logp_at_inf_ids",
    "topk_ids_ref",
    "topk_logp_ref",
)
REQUIRED = ("logp_inf", "logp_ref")
#: what is measured from each field that a row may lack
OPTIONAL = {
    "advantages": "whether corrections turn the gradient (cosines)",
    "group": "whether the mismatch repeats (fixed_share)",
    "kind": "figures by kind of actor",
    "version": "figures by age of the samples",
    "ref_version": "figures by age of the samples",
    "token_ids": "whether the mismatch repeats (fixed_share)",
    "topk_logp_inf": "the total variation, Jackpot's weights",
}
ROUNDING = 1e-3  # a log-prob that exceeds 0 by less was rounded
MOST = 2**31  # versions and ids are below it
LARGEST = 1e300
PADDED = 4  # so many log-probs of exactly 0 in a row are a prompt's or padding
# A lower log-prob is a number that stands for none: no draw has such a token, and no logits of a
# model lie so far apart.
LEAST_INF, LEAST_REF = -200.0, -1e4


class WrongRow(Exception):
    """A row that is left out. Example: WrongRow("logp_inf", "holds NaN at token 3")"""

    def __init__(self, column: str, why: str) -> None:
        super().__init__(f"{column} {why}")
        self.column, self.why = column, why


@dataclass(frozen=True, slots=True)
class Row:
    """The sampled tokens of one answer, without those that do not count. Lists are of one length.

    Example: Row([-0.1, -2.0], [-0.1, -1.9], [1.0, 1.0], group="7", kind="fp8")
    """

    logp_inf: Sequence[float]
    logp_ref: Sequence[float]
    advantages: Sequence[float] | None = None
    reward: float | None = None
    group: str | None = None
    kind: str | None = None
    version: Sequence[int] | None = None
    ref_version: int | None = None
    token_ids: Sequence[int] | None = None
    topk_ids_inf: Sequence[Sequence[int]] | None = None
    topk_logp_inf: Sequence[Sequence[float]] | None = None
    ref_logp_at_inf_ids: Sequence[Sequence[float]] | None = None
    topk_ids_ref: Sequence[Sequence[int]] | None = None
    topk_logp_ref: Sequence[Sequence[float]] | None = None
    vocabulary: int | None = None
    certain: bool = False  # PADDED log-probs of 0 of both at an end

    def has(self, name: str) -> bool:
        return getattr(self, name) is not None


def row_of(fields: Mapping[str, Any]) -> Row:
    """Read a row of the schema. Raises WrongRow with the column."""
    inf = _numbers("logp_inf", fields.get("logp_inf"))
    ref = _numbers("logp_ref", fields.get("logp_ref"), len(inf))
    mask = _mask(fields.get("mask"), len(inf))
    on = [i for i, chosen in enumerate(mask) if chosen]
    if not on:
        raise WrongRow("mask", "leaves no sampled token")
    _check_logps("logp_inf", inf, on, LEAST_INF)
    _check_logps("logp_ref", ref, on, LEAST_REF)
    _check_sampled(inf, ref, on)
    found: dict[str, Any] = {}
    for name in ("advantages", "version", "token_ids"):
        value = fields.get(name)
        if value is None:
            continue
        value = value.tolist() if hasattr(value, "tolist") else value
        listed = _numbers(name, [value] * len(inf) if _is_number(value) else value, len(inf))
        chosen = [listed[i] for i in on]
        if any(not math.isfinite(v) for v in chosen):
            raise WrongRow(name, "is not finite")
        found[name] = chosen if name == "advantages" else [_int(name, v) for v in chosen]
    ref_version = _whole("ref_version", fields.get("ref_version"))
    vocabulary = _whole("vocabulary", fields.get("vocabulary"), least=1)
    _check_ids(found.get("token_ids", ()), vocabulary)
    _check_versions(found.get("version", ()), ref_version)
    certain = [inf[i] == 0.0 == ref[i] for i in on]
    return Row(
        [min(inf[i], 0.0) for i in on],
        [min(ref[i], 0.0) for i in on],
        **found,
        **_top(fields, on, len(inf)),
        reward=_one("reward", fields.get("reward")),
        group=None if fields.get("group") is None else str(fields["group"]),
        kind=None if fields.get("kind") is None else str(fields["kind"]),
        ref_version=ref_version,
        vocabulary=vocabulary,
        certain=len(on) > PADDED and (all(certain[:PADDED]) or all(certain[-PADDED:])),
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, Real) and not isinstance(value, bool))


def _numbers(name: str, value: Any, length: int | None = None) -> list[float]:
    if value is None:
        raise WrongRow(name, "is missing")
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        raise WrongRow(name, f"is {type(value).__name__} and not a list of numbers")
    if length is not None and len(value) != length:
        raise WrongRow(name, f"has {len(value)} entries, and logp_inf {length}")
    if not value:
        raise WrongRow(name, "holds no token")
    wrong = next((i for i, v in enumerate(value) if v is not None and not _is_number(v)), None)
    if wrong is not None:
        hint = ", and a row is one answer" if isinstance(value[wrong], (list, tuple)) else ""
        raise WrongRow(name, f"holds {type(value[wrong]).__name__} at token {wrong + 1}{hint}")
    try:
        return [math.nan if v is None else float(v) for v in value]
    except OverflowError:
        raise WrongRow(name, "holds a number that is too large") from None


def _int(name: str, value: float) -> int:
    if not abs(value) < MOST or value != int(value):  # also NaN
        raise WrongRow(name, f"holds {value:g}, which is not a whole number below 2^31")
    return int(value)


def _mask(value: Any, length: int) -> list[bool]:
    if value is None:
        return [True] * length
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, (list, tuple)):
        value = [int(v) if isinstance(v, bool) else v for v in value]
    found = _numbers("mask", value, length)
    if any(v not in (0.0, 1.0) for v in found):
        raise WrongRow("mask", "holds other numbers than 0 and 1")
    return [v == 1.0 for v in found]


def _check_logps(name: str, values: list[float], on: list[int], least: float) -> None:
    for i in on:
        value = values[i]
        if math.isnan(value):
            raise WrongRow(name, f"holds NaN at token {i + 1}")
        if value > ROUNDING:
            raise WrongRow(name, f"is {value:g} at token {i + 1}, and no log-prob is above 0")
        if value == -math.inf and name == "logp_inf":
            raise WrongRow(name, f"is -inf at token {i + 1}, which was sampled")
        if -math.inf < value < least:
            raise WrongRow(name, f"is {value:g} at token {i + 1}, which stands for no log-prob")


def _check_sampled(inf: list[float], ref: list[float], on: list[int]) -> None:
    """Trainers fill the places of prompts, of tools' answers and of padding with log-probs of 0,
    in both columns or in one."""
    for name, own, other, who in (
        ("logp_inf", inf, ref, "no actor sampled"),
        ("logp_ref", ref, inf, "the learner has not scored"),
    ):
        run = 0
        for i in on:
            run = run + 1 if own[i] == 0.0 and other[i] < -ROUNDING else 0
            if run == PADDED:
                where = f"{name} is 0 at tokens {i - PADDED + 2} to {i + 1}"
                raise WrongRow("mask", f"covers tokens that {who}: {where}")


def _check_ids(ids: Sequence[int], vocabulary: int | None) -> None:
    if any(token < 0 for token in ids):
        raise WrongRow("token_ids", f"holds {min(ids)}, which is not a token: mask covers it")
    if vocabulary is not None and ids and max(ids) >= vocabulary:
        raise WrongRow("token_ids", f"holds {max(ids)}, and vocabulary is {vocabulary}")


def _check_versions(versions: Sequence[int], reference: int | None) -> None:
    if versions and min(versions) < 0:
        raise WrongRow("version", f"is {min(versions)}: optimizer steps count from 0")
    if versions and reference is not None and max(versions) > reference:
        raise WrongRow("version", f"is {max(versions)}, after ref_version {reference}")


def _top(fields: Mapping[str, Any], on: list[int], length: int) -> dict[str, Any]:
    """The lists [T, k] of both top k, or nothing."""
    if any(fields.get(name) is None for name in TOP_K):
        return {}
    found: dict[str, list[list[Any]]] = {}
    for name in TOP_K:
        value = fields[name].tolist() if hasattr(fields[name], "tolist") else fields[name]
        if not isinstance(value, (list, tuple)) or len(value) != length:
            raise WrongRow(name, "has another number of tokens than logp_inf")
        entries = [_numbers(name, value[i]) for i in on]
        if name in ("topk_ids_inf", "topk_ids_ref"):
            found[name] = [[_int(name, v) for v in entry] for entry in entries]
        elif any(math.isnan(v) or v > ROUNDING for entry in entries for v in entry):
            raise WrongRow(name, "holds NaN or a log-prob above 0")
        else:
            found[name] = entries
    sizes = {len(entry) for lists in found.values() for entry in lists}
    if len(sizes) != 1:
        raise WrongRow("topk_ids_inf", "has another number of entries than its log-probs")
    return found


def _one(name: str, value: Any) -> float | None:
    if value is None:
        return None
    value = value.tolist() if hasattr(value, "tolist") else value
    if not _is_number(value) or not abs(value) <= LARGEST:  # also NaN
        raise WrongRow(name, "is not a finite number")
    return float(value)


def _whole(name: str, value: Any, least: int = 0) -> int | None:
    found = _one(name, value)
    if found is not None and found < least:
        raise WrongRow(name, f"is {found:g}, below {least}")
    return None if found is None else _int(name, found)


def write(path: str | Path, **columns: Any) -> int:
    """Append the answers of a batch to a JSONL file, from inside any trainer. Returns how many.

    Columns are named as in the schema. Each is a tensor or list [B, T], [B, T, k] or [B], or a list
    of B tensors of any lengths; a column that is None is left out. Padding is where `mask` is 0.
    Raises UserError for unequal batches.

        write("rows.jsonl", logp_inf=inf, logp_ref=ref, mask=mask, advantages=advantages)
    """
    lists = {
        name: [entry.tolist() if hasattr(entry, "tolist") else entry for entry in value]
        for name, value in columns.items()
        if value is not None
    }
    sizes = {name: len(value) for name, value in lists.items()}
    if len(set(sizes.values())) != 1:
        told = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise UserError(
            f"columns of {path} are of batches of unequal sizes ({told}): give each a value "
            "for every sample."
        )
    with Path(path).open("a", encoding="utf-8") as file:
        for values in zip(*lists.values(), strict=True):
            file.write(json.dumps(dict(zip(lists, values))) + "\n")
    return next(iter(sizes.values()))
