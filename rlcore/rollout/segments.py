"""What the engine has sampled so far for one request, and the trajectory it ends as. numpy only."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from rlcore.types import ActorKind, FinishReason, Request, Trajectory

if TYPE_CHECKING:
    from rlcore.rollout.stop_text import StopWatcher

_COMPACT_EVERY = 256  # rows are views into arrays shared by a whole step: copy them out before they pile up


@dataclass(slots=True)
class Sample:
    """One request in flight: its tokens, log-prob rows and the versions that sampled them."""

    request: Request
    budget: int  # tokens this request may sample in all
    version: int  # policy version when it was queued
    watcher: StopWatcher | None = None
    tokens: list[int] = field(default_factory=list)
    switches: list[tuple[int, int]] = field(default_factory=list)  # (first token, version); the last one is current
    queued_at: float = field(default_factory=time.monotonic)
    started_at: float | None = None  # when its first token arrived
    segments: int = 0  # times it was resubmitted after an abort
    _ids: list[np.ndarray] = field(default_factory=list)  # rows [n, >=k+1] int32, column 0 the sampled token
    _logp: list[np.ndarray] = field(default_factory=list)  # the same shape, float32
    _blocks: int = 0  # leading arrays that are copied out already

    def __post_init__(self) -> None:
        self.switches.append((0, self.version))

    def extend(self, token_ids: list[int], rows: tuple[np.ndarray, np.ndarray] | None) -> None:
        """Append the tokens of one step and their log-prob rows."""
        if self.started_at is None:
            self.started_at = time.monotonic()
        self.tokens += token_ids
        if rows is not None:
            self._ids.append(rows[0])
            self._logp.append(rows[1])
            if len(self._ids) - self._blocks >= _COMPACT_EVERY:
                self._compact()

    def _compact(self) -> None:
        width = self.request.sampling.logprobs_k + 1
        for rows in (self._ids, self._logp):
            rows[self._blocks :] = [_joined(rows[self._blocks :], width)]
        self._blocks += 1

    def switch(self, version: int) -> None:
        """From the next token on, `version` samples."""
        self.switches.append((len(self.tokens), version))

    def token_versions(self) -> np.ndarray:
        """[T] int32: the version that sampled each token."""
        starts = np.array([s for s, _ in self.switches] + [len(self.tokens)])
        return np.repeat(np.array([v for _, v in self.switches], np.int32), np.diff(starts))

    def finish(self, reason: FinishReason, actor_id: str, actor_kind: ActorKind) -> Trajectory:
        """The trajectory, unscored. Raises RuntimeError if log-prob rows and tokens disagree."""
        logp, topk_ids, topk_logp = self._arrays()
        now = time.monotonic()
        started = now if self.started_at is None else self.started_at
        return Trajectory(
            prompt_ids=np.asarray(self.request.prompt_ids, np.int32),
            response_ids=np.asarray(self.tokens, np.int32),
            logp_inf=logp,
            topk_ids=topk_ids,
            topk_logp=topk_logp,
            token_version=self.token_versions(),
            actor_id=actor_id,
            actor_kind=actor_kind,
            group_id=self.request.group_id,
            prompt_id=self.request.prompt_id,
            sample_index=self.request.sample_index,
            finish_reason=reason,
            purpose=self.request.purpose,
            timings={"queue_s": started - self.queued_at, "generate_s": now - started},
        )

    def _arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        t, k = len(self.tokens), self.request.sampling.logprobs_k
        if k < 0:  # asked for none: NaN, so that using them shows
            return np.full(t, np.nan, np.float32), np.empty((t, 0), np.int32), np.empty((t, 0), np.float32)
        if not self._ids:
            return np.empty(0, np.float32), np.empty((0, k), np.int32), np.empty((0, k), np.float32)
        width = min(k + 1, min(r.shape[1] for r in self._ids))
        ids, logp = _joined(self._ids, width), _joined(self._logp, width)
        if len(ids) != t or not np.array_equal(ids[:, 0], self.tokens):
            raise RuntimeError(f"{self.request.request_id}: the engine's log-prob rows do not belong to its tokens")
        topk_ids, topk_logp = np.full((t, k), -1, np.int32), np.full((t, k), -np.inf, np.float32)
        inside = np.isfinite(logp[:, 1:])  # tokens cut off by top-p, top-k or min-p have no log-prob
        topk_ids[:, : width - 1] = np.where(inside, ids[:, 1:], -1)
        topk_logp[:, : width - 1] = logp[:, 1:]
        return np.ascontiguousarray(logp[:, 0], np.float32), topk_ids, topk_logp


def _joined(rows: list[np.ndarray], width: int) -> np.ndarray:
    """[sum n, width]: rows below each other; a batch that mixes values of k makes them of different widths."""
    if len({r.shape[1] for r in rows}) == 1:
        return np.concatenate(rows)[:, :width]
    return np.concatenate([r[:, :width] for r in rows])
