"""What happens to a group the moment its last sample has come: fail it, filter it, or keep its best samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from rlcore.errors import UserError

Select = Callable[[Sequence[float]], Sequence[int] | None]

FILTERED_EQUAL = "filtered_equal_rewards"
TOO_FEW = "too_few_samples"


def all_equal(rewards: Sequence[float]) -> bool:
    """Such a group has no advantage to learn from (dynamic sampling; DAPO, arXiv:2503.14476, eq. 11)."""
    return all(r == rewards[0] for r in rewards)


def keep_best(rewards: Sequence[float], keep: int) -> list[int]:
    """Indices of the `keep` highest rewards, ascending; ties go to the earlier sample."""
    best = sorted(range(len(rewards)), key=lambda i: (-rewards[i], i))[:keep]
    return sorted(best)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Either `kept` (positions in the rewards given), or the reason why the group leaves."""

    kept: tuple[int, ...] = ()
    failed: str = ""
    evicted: str = ""


def best_of(keep: int, samples_per_group: int) -> Select:
    """`keep_best` as a selection. Raises UserError unless 1 <= keep <= samples_per_group."""
    if not 0 < keep <= samples_per_group:
        raise UserError(
            f"algorithm.keep_best={keep} is not accepted; choose 1 to rollout.samples_per_prompt={samples_per_group}."
        )
    return partial(keep_best, keep=keep)


@dataclass(frozen=True, slots=True)
class SelectionPolicy:
    """Applied once per complete group, in this order: enough samples, dynamic filtering over all of them, selection."""

    min_samples: int = 2  # fewer usable samples (score ok) fail the group
    filter_equal: bool = False
    select: Select | None = None  # rewards -> positions to keep; None keeps all

    def judge(self, rewards: Sequence[float]) -> Verdict:
        """`rewards` of the usable samples by sample_index. Raises ValueError if `select` returns bad positions."""
        if len(rewards) < self.min_samples:
            return Verdict(failed=TOO_FEW)
        if self.filter_equal and all_equal(rewards):
            return Verdict(evicted=FILTERED_EQUAL)
        kept = None if self.select is None else self.select(list(rewards))
        if kept is None:
            return Verdict(kept=tuple(range(len(rewards))))
        if not kept or len(set(kept)) != len(kept) or not all(0 <= i < len(rewards) for i in kept):
            raise ValueError(f"select returned {list(kept)} for a group of {len(rewards)} samples")
        return Verdict(kept=tuple(sorted(kept)))
