"""Builders of records: every argument has a harmless default, so that a test names only the values
that it is about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlcore.types import Answer, Episode, Group, SamplingSpec, Score, Trajectory

_SAMPLING: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "max_new_tokens": 16,
    "stop": (),
    "logprobs_k": 20,
}


def make_sampling(**changes: Any) -> SamplingSpec:
    """Full-support sampling at temperature 1."""
    return SamplingSpec(**{**_SAMPLING, **changes})


def make_trajectory(
    group_id: int = 0,
    sample_index: int = 0,
    *,
    turns: Sequence[tuple[Sequence[int], Sequence[int]]] = (((3, 4), (5, 6)),),
    version: int | Sequence[int] = 0,
    k: int = 2,
    **fields: Any,
) -> Trajectory:
    """A record of (observation ids, sampled ids) turns, `version` for all S tokens or one for each.

    Any field of `Trajectory` can be given; log-probs default to -0.5 and the top k to ids 0..k-1.
    """
    token_ids: list[int] = []
    sampled: list[bool] = []
    starts: list[int] = []
    for observed, drawn in turns:
        token_ids += [*observed, *drawn]
        starts.append(len(sampled) + len(observed))
        sampled += [False] * len(observed) + [True] * len(drawn)
    count = sum(sampled)
    defaults: dict[str, Any] = {
        "logp_inf": np.full(count, -0.5, np.float32),
        "topk_ids": np.tile(np.arange(k, dtype=np.int32), (count, 1)),
        "topk_logp": np.full((count, k), -0.7, np.float32),
        "token_version": np.broadcast_to(np.asarray(version, np.int32), (count,)).copy(),
        "actor_id": "bf16-0",
        "actor_kind": "bf16",
        "prompt_id": f"digits/train/{max(group_id, 0)}",
        "finish_reason": "stop",
        "draw_id": f"bf16-0:{group_id}:{sample_index}",
    }
    return Trajectory(
        token_ids=np.array(token_ids, np.int32),
        sampled=np.array(sampled, bool),
        turn_starts=np.array(starts, np.int32),
        group_id=group_id,
        sample_index=sample_index,
        **{**defaults, **fields},
    )


def make_score(
    trajectory: Trajectory, reward: float | None = 1.0, *, status: str = "ok", **fields: Any
) -> Score:
    """The score of a record's episode; no reward unless the status is "ok"."""
    return Score(
        group_id=trajectory.group_id,
        sample_index=trajectory.sample_index,
        draw_id=trajectory.draw_id,
        status=status,  # type: ignore[arg-type]
        reward=reward if status == "ok" else None,
        **fields,
    )


def make_answer(group_id: int = 0, sample_index: int = 0, text: str = "", **fields: Any) -> Answer:
    """Make a grader's input of one episode; one token a character."""
    defaults: dict[str, Any] = {
        "draw_id": f"bf16-0:{group_id}:{sample_index}",
        "prompt_id": f"digits/train/{max(group_id, 0)}",
        "tokens": len(text),
        "versions": (0, 0) if text else None,
    }
    return Answer(group_id=group_id, sample_index=sample_index, text=text, **{**defaults, **fields})


def make_group(
    trajectories: Sequence[Trajectory],
    rewards: Sequence[float],
    *,
    admitted_version: int = 0,
    arrival_version: int = 0,
) -> Group:
    """A group of one-record episodes. Raises ValueError without any."""
    if not trajectories:
        raise ValueError("a group needs at least one trajectory")
    first = trajectories[0]
    episodes = [Episode([t], make_score(t, r)) for t, r in zip(trajectories, rewards, strict=True)]
    return Group(first.group_id, first.prompt_id, admitted_version, episodes, arrival_version)
