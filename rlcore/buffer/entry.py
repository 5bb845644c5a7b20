"""A live group as the store holds it, and the statistics of its samples."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from rlcore.serialization import load_trajectory
from rlcore.types import FinishReason, Group, ScoreStatus, Trajectory


@dataclass(slots=True)
class Sample:
    """What stays readable of a stored trajectory without decoding it."""

    status: ScoreStatus
    reward: float | None
    reward_parts: dict[str, float]
    tokens: int  # response tokens
    finish_reason: FinishReason
    payload: bytes | None  # serialised trajectory; None where it will not be trained on

    @classmethod
    def of(cls, t: Trajectory, payload: bytes) -> Sample:
        """Facts and payload of a scored trajectory; a failed score keeps no payload."""
        usable = t.score_status == "ok"
        parts = dict(t.reward_parts)
        return cls(t.score_status, t.reward, parts, len(t.response_ids), t.finish_reason, payload if usable else None)

    @property
    def usable(self) -> bool:
        return self.status == "ok"


@dataclass(slots=True)
class Entry:
    """One live group: its samples as they arrive, then its uses."""

    group_id: int
    prompt_id: str
    admitted_version: int
    samples: dict[int, Sample] = field(default_factory=dict)  # by sample_index
    finished: bool = False
    arrival_version: int = 0
    uses: int = 0  # committed steps
    last_step: int = -1  # newest committed step that used it
    taken_by: list[int] = field(default_factory=list)  # uncommitted steps
    losses: int = 0  # times that whoever sampled it was lost or late

    @property
    def task(self) -> str:
        return self.prompt_id.split("/", 1)[0]

    @property
    def size(self) -> int:
        """Payload bytes."""
        return sum(len(s.payload) for s in self.samples.values() if s.payload is not None)

    def usable(self) -> list[Sample]:
        """Scored samples by sample_index, whether or not selection kept them."""
        return [s for _, s in sorted(self.samples.items()) if s.usable]

    def kept(self) -> list[Sample]:
        """Samples with a payload, by sample_index: what is trained on."""
        return [s for _, s in sorted(self.samples.items()) if s.payload is not None]

    def decode(self) -> Group:
        """The group with its kept trajectories."""
        trajectories = [load_trajectory(s.payload) for s in self.kept() if s.payload is not None]
        return Group(self.group_id, self.prompt_id, self.admitted_version, trajectories, self.arrival_version)

    def state(self) -> dict[str, Any]:
        """JSON-able state without payloads, of which only the presence is noted."""
        samples = {
            index: {**{k: v for k, v in asdict(s).items() if k != "payload"}, "payload": s.payload is not None}
            for index, s in sorted(self.samples.items())
        }
        return {**{name: getattr(self, name) for name in _PLAIN}, "taken_by": list(self.taken_by), "samples": samples}

    @classmethod
    def from_state(cls, state: dict[str, Any], payloads: Iterable[bytes]) -> Entry:
        """The inverse of `state`; takes its payloads off the iterator in order of sample_index."""
        source = iter(payloads)
        samples = {
            int(index): Sample(**{**fields, "payload": next(source) if fields["payload"] else None})
            for index, fields in state["samples"].items()
        }
        return cls(**{name: state[name] for name in _PLAIN}, samples=samples)


_PLAIN = (
    *("group_id", "prompt_id", "admitted_version", "finished", "arrival_version"),
    *("uses", "last_step", "taken_by", "losses"),
)


@dataclass(slots=True)
class Arrivals:
    """Running sums over every sample that arrived, kept or not. Rewards over usable samples only."""

    samples: int = 0
    tokens: int = 0
    scored: int = 0
    reward_sum: float = 0.0
    reward_squares: float = 0.0

    def add(self, sample: Sample) -> None:
        """Count one sample."""
        self.samples += 1
        self.tokens += sample.tokens
        if sample.reward is not None:
            self.scored += 1
            self.reward_sum += sample.reward
            self.reward_squares += sample.reward**2

    def metrics(self) -> dict[str, float]:
        """Totals and means since the start of the run; they depend on when they are read."""
        metrics = {"buffer/arrived_samples": float(self.samples), "buffer/arrived_tokens": float(self.tokens)}
        if self.samples:
            metrics["buffer/arrived_response_length_mean"] = self.tokens / self.samples
        if self.scored:
            mean = self.reward_sum / self.scored
            metrics["buffer/arrived_reward_mean"] = mean
            metrics["buffer/arrived_reward_std"] = math.sqrt(max(0.0, self.reward_squares / self.scored - mean**2))
        return metrics


def batch_metrics(entries: Iterable[Entry]) -> dict[str, float]:
    """Rewards and lengths over all usable samples of a batch, before selection, in a fixed order of summation."""
    groups = list(entries)
    samples = [s for e in groups for s in e.usable()]
    rewards = [s.reward for s in samples if s.reward is not None]
    lengths = [s.tokens for s in samples]
    kept = [s.reward for e in groups for s in e.kept() if s.reward is not None]
    mean = math.fsum(rewards) / len(rewards)
    metrics = {
        "reward/mean": mean,
        "reward/std": math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / len(rewards)),
        "response_length/mean": sum(lengths) / len(lengths),
        "response_length/max": float(max(lengths)),
        "response_length/truncated_share": sum(s.finish_reason == "length" for s in samples) / len(samples),
    }
    if len(kept) < len(rewards):
        metrics["reward/kept_mean"] = math.fsum(kept) / len(kept)
    for name in sorted({n for s in samples for n in s.reward_parts}):
        values = [s.reward_parts[name] for s in samples if name in s.reward_parts]
        metrics[f"reward_parts/{name}"] = math.fsum(values) / len(values)
    return metrics
