"""A rank's share of one optimizer step as tensors: what the actors sent, and what the learner's passes add to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlcore.corrections.formulas.numerics import total
from rlcore.interfaces import Reduce
from rlcore.learner.packing import MicroBatch, Tokens
from rlcore.types import Group, StepTensors, TokenScores

_SAMPLES = 1 << 20  # more than any group has: sample ids are group_id * _SAMPLES + sample_index


@dataclass(slots=True)
class Scored:
    """TokenScores of every token of a step, right-padded: [B, T] or [B, T, k]; 0 where there is no token."""

    logp: Tensor
    entropy: Tensor
    topk_ids: Tensor | None = None
    topk_logp: Tensor | None = None
    logp_at_ids: Tensor | None = None
    inside: Tensor | None = None
    coverage: Tensor | None = None

    @classmethod
    def collect(
        cls, shape: torch.Size, parts: Sequence[tuple[MicroBatch, TokenScores]], device: torch.device
    ) -> Scored:
        """From the scores of micro-batches that together cover the step."""
        empty = torch.zeros(shape, dtype=torch.float32, device=device)
        out = cls(empty, empty.clone())
        for mb, scores in parts:
            for name, values in _present(scores, cls):
                if getattr(out, name) is None:
                    setattr(out, name, values.new_zeros((*shape, *values.shape[1:])))
                if len(mb.sequences):
                    getattr(out, name)[mb.sequences[mb.row], mb.column] = values
        return out

    @classmethod
    def of(cls, mb: MicroBatch, scores: TokenScores, width: int) -> Scored:
        """One micro-batch's sequences alone, [b, width]."""
        return cls(**{name: mb.dense(values, width) for name, values in _present(scores, cls)})


def _present(scores: TokenScores, fields: type[Scored]) -> list[tuple[str, Tensor]]:
    pairs = [(name, getattr(scores, name)) for name in fields.__dataclass_fields__]
    return [(name, values.detach()) for name, values in pairs if values is not None]


@dataclass(slots=True)
class StepBatch:
    """One rank's whole groups of a step. B sequences of at most T response tokens; B may be 0."""

    tokens: list[Tokens]
    sent: StepTensors  # what came from actors and graders; the learner's log-probs are zeros here
    arrival_version: Tensor  # [B] int32
    micro: list[MicroBatch] = field(default_factory=list)  # dummies at the end: as many as every other rank has
    ref: Scored | None = None  # under the policy that entered the update phase
    base: Scored | None = None  # under the frozen starting policy


def observed(sent: StepTensors, step: int, advantages: Tensor, ref: Scored, new: Scored) -> StepTensors:
    """What corrections see at optimizer step `step`: `sent` with the learner's scores under p_ref and p_new."""
    return replace(
        sent,
        step=step,
        advantages=advantages,
        logp_ref=ref.logp,
        logp_new=new.logp,
        ref_topk_ids=ref.topk_ids,
        ref_topk_logp=ref.topk_logp,
        ref_logp_at_inf_ids=ref.logp_at_ids,
        new_topk_ids=new.topk_ids,
        new_topk_logp=new.topk_logp,
        new_logp_at_inf_ids=new.logp_at_ids,
        inside=ref.inside if ref.inside is None or new.inside is None else ref.inside & new.inside,
        coverage=ref.coverage,
    )


def rows_of(step: StepTensors, rows: Tensor) -> StepTensors:
    """The same tensors for some of the sequences."""
    values: dict[str, Any] = {name: getattr(step, name) for name in step.__dataclass_fields__}
    chosen: dict[str, Any] = {name: v[rows] if isinstance(v, Tensor) else v for name, v in values.items()}
    return StepTensors(**chosen)


def build_batch(groups: Sequence[Group], *, with_topk: bool, device: torch.device) -> StepBatch:
    """Tensors of one rank's groups. Raises ValueError for a trajectory without a reward: buffers leave those out."""
    trajectories = [t for g in groups for t in g.trajectories]
    unscored = [t.request_id for t in trajectories if t.reward is None]
    if unscored:
        raise ValueError(f"trajectory {unscored[0]} has no reward and cannot be trained on")
    width = max([1, *(len(t.response_ids) for t in trajectories)])

    def dense(values: Sequence[np.ndarray], fill: float, dtype: type, *tail: int) -> Tensor:
        out: np.ndarray = np.full((len(trajectories), width, *tail), fill, dtype=dtype)
        for row, v in zip(out, values):
            row[: len(v)] = v
        return torch.from_numpy(out).to(device)

    def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    logp_inf = dense([t.logp_inf for t in trajectories], 0.0, np.float32)
    mask = dense([np.ones(len(t.response_ids), bool) for t in trajectories], False, bool)
    sent = StepTensors(
        mask=mask,
        logp_inf=logp_inf,
        logp_ref=torch.zeros_like(logp_inf),
        logp_new=torch.zeros_like(logp_inf),
        rewards=column([t.reward for t in trajectories], torch.float32),  # type: ignore[misc]
        group_ids=column([t.group_id for t in trajectories], torch.int64),
        advantages=torch.zeros_like(logp_inf),
        token_version=dense([t.token_version for t in trajectories], 0, np.int32),
        sample_ids=column([t.group_id * _SAMPLES + t.sample_index for t in trajectories], torch.int64),
        step=0,
    )
    if with_topk:
        k = max([1, *(t.topk_ids.shape[1] for t in trajectories)])
        sent.topk_ids_inf = dense([_wide(t.topk_ids, k, -1) for t in trajectories], -1, np.int64, k)
        sent.topk_logp_inf = dense([_wide(t.topk_logp, k, -np.inf) for t in trajectories], -np.inf, np.float32, k)
    arrival = column([g.arrival_version for g in groups for _ in g.trajectories], torch.int32)
    return StepBatch([Tokens(t.prompt_ids, t.response_ids) for t in trajectories], sent, arrival)


def _wide(values: np.ndarray, k: int, fill: float) -> np.ndarray:
    return np.pad(values, ((0, 0), (0, k - values.shape[1])), constant_values=fill)


def staleness_split(batch: StepBatch, step: int, reduce: Reduce) -> dict[str, float]:
    """Mean staleness of the step's tokens in two parts: before their group arrived, and in the buffer."""
    on = batch.sent.mask
    arrival = batch.arrival_version[:, None].double()
    flight = torch.where(on, arrival - batch.sent.token_version, 0.0)
    buffer = torch.where(on, step - arrival, 0.0)
    flight_sum, buffer_sum, n = total([flight, buffer, on], reduce)
    return {"staleness/in_flight_mean": flight_sum / max(n, 1.0), "staleness/in_buffer_mean": buffer_sum / max(n, 1.0)}
