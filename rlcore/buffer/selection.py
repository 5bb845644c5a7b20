"""What happens to a group when its last sample has arrived: it fails, is filtered, or keeps its
best samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlcore.buffer.specs import SelectionSpec

FILTERED_EQUAL = "filtered_equal_rewards"
TOO_FEW = "too_few_samples"
LEAST_SAMPLES = 2  # with fewer usable samples, a group of two or more has nothing to compare


def all_equal(rewards: Sequence[float]) -> bool:
    """Such a group has no advantage to learn from (dynamic sampling; DAPO, arXiv:2503.14476, eq.
    11)."""
    return all(r == rewards[0] for r in rewards)


def highest(rewards: Sequence[float], count: int) -> list[int]:
    """Indices of the `count` highest rewards, ascending; ties go to the earlier sample."""
    best = sorted(range(len(rewards)), key=lambda i: (-rewards[i], i))[:count]
    return sorted(best)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Either `kept` (positions in the rewards given), or the reason why the group leaves."""

    kept: tuple[int, ...] = ()
    failed: str = ""
    evicted: str = ""


def judge(rewards: Sequence[float], spec: SelectionSpec, samples_per_group: int) -> Verdict:
    """Decide what happens to a complete group. `rewards` of the usable samples (score ok), by
    sample_index."""
    if len(rewards) < min(LEAST_SAMPLES, samples_per_group):
        return Verdict(failed=TOO_FEW)
    here = spec.keep_best is not None and spec.kept_by_learner is None
    kept = highest(rewards, spec.keep_best if here and spec.keep_best else len(rewards))
    # Judged over what would be trained on: the best of a mixed group are often all equal.
    if spec.dynamic_sampling and all_equal([rewards[i] for i in kept]):
        return Verdict(evicted=FILTERED_EQUAL)
    return Verdict(kept=tuple(kept))
