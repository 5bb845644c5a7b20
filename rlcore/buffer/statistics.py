"""Statistics of the samples that arrived, and of a batch."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from rlcore.buffer.entry import ArrivedSample, Entry

MOST_UNSUMMED = 64  # different rewards


@dataclass(slots=True)
class ArrivalTotals:
    """Running sums over every sample that arrived, kept or not. Rewards over usable samples only.

    Rewards are summed exactly: rounded sums would depend on the order in which samples arrive.
    """

    samples: int = 0
    tokens: int = 0
    scored: int = 0
    reward_sum: Fraction = Fraction(0)
    reward_squares: Fraction = Fraction(0)
    # rewards that the sums do not hold yet: most are of few values, and fractions are slow
    _unsummed: Counter[float] = field(default_factory=Counter)

    def add(self, sample: ArrivedSample) -> None:
        """Count one sample."""
        self.samples += 1
        self.tokens += sample.tokens
        reward = sample.score.reward
        if reward is not None:
            self.scored += 1
            self._unsummed[reward] += 1
            if len(self._unsummed) > MOST_UNSUMMED:
                self._sum()

    def _sum(self) -> None:
        for reward, count in self._unsummed.items():
            exact = Fraction(reward)
            self.reward_sum += count * exact
            self.reward_squares += count * exact**2
        self._unsummed.clear()

    def metrics(self) -> dict[str, float]:
        """Totals and means since the start of the run; they depend on when they are read."""
        self._sum()
        metrics = {
            "buffer/arrived_samples": float(self.samples),
            "buffer/arrived_tokens": float(self.tokens),
        }
        if self.samples:
            metrics["buffer/arrived_response_length_mean"] = self.tokens / self.samples
        if self.scored:
            mean = self.reward_sum / self.scored
            metrics["buffer/arrived_reward_mean"] = float(mean)
            # below 0 only after a checkpoint of an earlier version, whose sums were rounded
            variance = max(Fraction(0), self.reward_squares / self.scored - mean**2)
            metrics["buffer/arrived_reward_std"] = math.sqrt(variance)
        return metrics

    def state(self) -> dict[str, Any]:
        """As JSON, the exact sums as text ("7/4")."""
        self._sum()
        plain = {name: getattr(self, name) for name in ("samples", "tokens", "scored")}
        return plain | {name: str(getattr(self, name)) for name in _EXACT}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> ArrivalTotals:
        """The inverse of `state`; also of an earlier one, whose sums are numbers."""
        return cls(**{**state, **{name: Fraction(state[name]) for name in _EXACT}})


_EXACT = ("reward_sum", "reward_squares")


def task_metrics(entries: Iterable[Entry], tasks: Sequence[str]) -> dict[str, float]:
    """The same by task, for a run with several: `task/<task>/...`. Of a task that the batch has no
    groups of, only their number."""
    groups = list(entries)
    metrics: dict[str, float] = {}
    for task in tasks:
        own = [e for e in groups if e.task == task]
        metrics[f"task/{task}/groups"] = float(len(own))
        if own:
            of_batch = batch_metrics(own)
            named = {_TASK_NAMES.get(name, name): value for name, value in of_batch.items()}
            metrics |= {f"task/{task}/{name}": value for name, value in named.items()}
            metrics[f"task/{task}/token_share"] = sum(e.tokens for e in own) / max(
                1, sum(e.tokens for e in groups)
            )
    return metrics


_TASK_NAMES = {
    "reward/mean": "reward_mean",
    "reward/std": "reward_std",
    "reward/kept_mean": "reward_kept_mean",
    "response_length/mean": "response_length_mean",
    "response_length/max": "response_length_max",
    "response_length/truncated_share": "truncated_share",
}


def batch_metrics(entries: Iterable[Entry]) -> dict[str, float]:
    """Rewards and lengths (sampled tokens) over all usable samples of a batch, before selection.

    Summed exactly (`math.fsum`): in whatever order samples came, two runs of one seed agree to the
    bit.
    """
    groups = list(entries)
    samples = [s for e in groups for s in e.samples.values() if s.usable]
    rewards = [s.score.reward for s in samples if s.score.reward is not None]
    lengths = [s.tokens for s in samples]
    kept = [s.score.reward for s in samples if s.records and s.score.reward is not None]
    mean = math.fsum(rewards) / len(rewards)
    cut = sum(s.finish_reason == "length" for s in samples)
    metrics = {
        "reward/mean": mean,
        "reward/std": math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / len(rewards)),
        "response_length/mean": sum(lengths) / len(lengths),
        "response_length/max": float(max(lengths)),
        "response_length/truncated_share": cut / len(samples),
    }
    if len(kept) < len(rewards):
        metrics["reward/kept_mean"] = math.fsum(kept) / len(kept)
    parts: dict[str, list[float]] = defaultdict(list)
    for s in samples:
        for name, value in s.score.parts.items():
            parts[name].append(value)
    for name, values in sorted(parts.items()):
        metrics[f"reward_parts/{name}"] = math.fsum(values) / len(values)
    return metrics
