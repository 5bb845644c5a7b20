"""The tokens that the engine has sampled so far for one request, and the trajectory made of them.
numpy only."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import numpy as np

from rlcore.models.routes import ROUTES, RouteLog
from rlcore.types import PAGE_RULE, ActorKind, FinishReason, Request, Trajectory

if TYPE_CHECKING:
    from rlcore.rollout.text import StopWatcher

# Rows are views into the arrays of a whole step, or wait in a group of steps; they are copied
# regularly so that these can be freed.
_COMPACT_EVERY = 256

# ids int32 or int64 and log-probs float32 of tokens, both [n, >= k+1], column 0 the sampled token
Arrays: TypeAlias = tuple[np.ndarray, np.ndarray]


class RowGroup(Protocol):
    """Log-prob rows of some steps, which an engine keeps until they are asked for."""

    def take(self, rows: list[int]) -> Arrays:
        """The rows of these numbers."""


class KeptRows(NamedTuple):
    """Rows of a group, by number."""

    group: RowGroup
    rows: list[int]


Rows: TypeAlias = Arrays | KeptRows


def leading(rows: Rows | None, count: int) -> Rows | None:
    """The first rows."""
    if isinstance(rows, KeptRows):
        return rows._replace(rows=rows.rows[:count])
    return rows and (rows[0][:count], rows[1][:count])


@dataclass(slots=True)
class Draw:
    """One request in flight: its tokens, log-prob rows and the versions that sampled them."""

    request: Request
    draw_id: str  # unique: a request that was lost and is asked for again is another draw
    budget: int  # tokens this request may sample in all
    version: int  # policy version when it was queued
    watcher: StopWatcher | None = None
    tokens: list[int] = field(default_factory=list)
    # (first token, version); the last one is current
    switches: list[tuple[int, int]] = field(default_factory=list)
    queued_at: float = field(default_factory=time.monotonic)
    started_at: float | None = None  # when its first output arrived
    resubmissions: int = 0  # after an abort, with the tokens it had
    decoding_since: float | None = None  # on the book's clock; None: it waits for its next token
    decoded_s: float = 0.0  # before it was withdrawn last
    extras: dict[str, np.ndarray] = field(default_factory=dict)  # further arrays of its record
    routes: RouteLog = field(default_factory=RouteLog)  # experts of the tokens it was computed of
    _rows: list[Rows] = field(default_factory=list)  # in order
    _blocks: int = 0  # leading entries that were copied already
    _uncopied: int = 0  # rows of the others

    def __post_init__(self) -> None:
        self.switches.append((0, self.version))

    @property
    def started(self) -> bool:
        """True if an engine works on the draw, or has sampled some of it."""
        return self.started_at is not None

    def withdrawn(self) -> None:
        """The draw has left its engine; its sampled tokens stay."""
        self.decoding_since = None
        if not self.tokens:
            self.started_at = None

    def extend(self, token_ids: list[int], rows: Rows | None) -> None:
        """Append the tokens of one step and their log-prob rows."""
        if self.started_at is None:
            self.started_at = time.monotonic()
        self.tokens += token_ids
        if rows is None:
            return
        last = self._rows[-1] if self._rows else None
        if isinstance(rows, KeptRows) and isinstance(last, KeptRows) and last.group is rows.group:
            last.rows.extend(rows.rows)
        else:
            self._rows.append(rows)
        self._uncopied += len(token_ids)
        if self._uncopied >= _COMPACT_EVERY:
            self._compact()

    def _compact(self) -> None:
        self._rows[self._blocks :] = [self._joined(self._rows[self._blocks :])]
        self._blocks += 1
        self._uncopied = 0

    def _joined(self, rows: list[Rows]) -> Arrays:
        """Copies of rows [sum n, width], of fewer columns where an engine gives fewer, since its
        vocabulary is smaller."""
        found = [r.group.take(r.rows) if isinstance(r, KeptRows) else r for r in rows]
        # A step whose requests differ in k gives all of them the widest rows, so widths vary.
        width = min(self.request.sampling.logprobs_k + 1, *(ids.shape[1] for ids, _ in found))
        ids, logp = (np.concatenate([a[:, :width] for a in part]) for part in zip(*found))
        return ids, logp

    def go_on(self, begun: Trajectory) -> None:
        """Take over the tokens that another engine sampled for this request before it was cut."""
        versions = begun.token_version
        starts = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist()]
        self.tokens = begun.sampled_ids.tolist()
        self.switches = [(s, int(versions[s])) for s in starts]
        self.switches.append((len(self.tokens), self.version))
        self.routes = RouteLog(begun.extras.get(ROUTES))
        if self.request.sampling.logprobs_k >= 0:
            ids, logp = begun.sampled_ids[:, None], begun.logp_inf[:, None]
            rows = [ids, begun.topk_ids], [logp, begun.topk_logp]
            self._rows = [(np.concatenate(rows[0], axis=1), np.concatenate(rows[1], axis=1))]
        if self.watcher is not None:
            for token in self.tokens:
                self.watcher.push(token)
        # seconds rather than times: the other engine may be on another machine
        now = time.monotonic()
        self.started_at = now - begun.timings["generate_s"]
        self.queued_at = self.started_at - begun.timings["queue_s"]

    def switch(self, version: int) -> None:
        """Tokens from now on were sampled by `version`."""
        self.switches.append((len(self.tokens), version))

    def token_versions(self) -> np.ndarray:
        """[S] int32: the version that sampled each token."""
        starts = np.array([s for s, _ in self.switches] + [len(self.tokens)])
        return np.repeat(np.array([v for _, v in self.switches], np.int32), np.diff(starts))

    def finish(self, reason: FinishReason, actor_id: str, actor_kind: ActorKind) -> Trajectory:
        """The trajectory: one turn after the prompt.

        Raises RuntimeError if log-prob rows and tokens disagree.
        """
        logp, topk_ids, topk_logp = self._arrays()
        request, prompt = self.request, len(self.request.prompt_ids)
        routes = self.routes.rows()
        if routes is not None:
            self.extras[ROUTES] = routes
        if request.page_rule is not None:
            self.extras[PAGE_RULE] = request.page_rule.array()
        token_ids = np.empty(prompt + len(self.tokens), np.int32)
        token_ids[:prompt] = request.prompt_ids
        token_ids[prompt:] = self.tokens
        now = time.monotonic()
        started = now if self.started_at is None else self.started_at
        return Trajectory(
            token_ids=token_ids,
            sampled=np.arange(len(token_ids)) >= prompt,
            logp_inf=logp,
            topk_ids=topk_ids,
            topk_logp=topk_logp,
            token_version=self.token_versions(),
            turn_starts=np.array([prompt], np.int32),
            actor_id=actor_id,
            actor_kind=actor_kind,
            group_id=request.group_id,
            prompt_id=request.prompt_id,
            sample_index=request.sample_index,
            finish_reason=reason,
            draw_id=self.draw_id,
            purpose=request.purpose,
            timings={"queue_s": started - self.queued_at, "generate_s": now - started},
            extras=self.extras,
        )

    def _arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(logp_inf [S] float32, topk_ids [S, k] int32, topk_logp [S, k] float32)."""
        t, k = len(self.tokens), self.request.sampling.logprobs_k
        if k < 0 or t == 0:  # NaN if none were requested, so that using them is noticed
            return np.full(t, np.nan, np.float32), *_padding(t, max(k, 0))
        if not self._rows:
            raise RuntimeError(f"{self.request.request_id}: the engine gave no log-prob rows")
        ids, logp = self._joined(self._rows)
        ids = ids.astype(np.int32, copy=False)  # vLLM's second runner gives int64
        if ids[:, 0].tolist() != self.tokens:
            raise RuntimeError(
                f"{self.request.request_id}: the engine's log-prob rows do not match its tokens"
            )
        # Tokens cut off by top-p, top-k or min-p have no log-prob.
        topk_logp = np.ascontiguousarray(logp[:, 1:])
        topk_ids = np.where(np.isfinite(topk_logp), ids[:, 1:], np.int32(-1))
        if ids.shape[1] <= k:
            more_ids, more_logp = _padding(t, k + 1 - ids.shape[1])
            topk_ids = np.concatenate([topk_ids, more_ids], axis=1)
            topk_logp = np.concatenate([topk_logp, more_logp], axis=1)
        return np.ascontiguousarray(logp[:, 0], np.float32), topk_ids, topk_logp


def _padding(tokens: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """(ids, log-probs) [tokens, columns] without an entry."""
    shape = (tokens, columns)
    return np.full(shape, -1, np.int32), np.full(shape, -np.inf, np.float32)
