"""Samples as text for people: verdicts of an evaluation, records of samples/. No Ray in here."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from rlcore.serialization import StoredEpisode, load_trajectory
from rlcore.types import Answer, Score, Trajectory

PIECES_KEPT = 4096  # tokens of a sample that are written one by one
TEXTS = ("prompt", "response")  # of a verdict
UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what the first bytes of a character are decoded to


def verdict(answer: Answer, score: Score) -> dict[str, Any]:
    """Return the record that an evaluation keeps of one sample."""
    correct = None if score.reward is None else score.parts.get("correct", score.reward)
    return {
        "prompt_id": answer.prompt_id,
        "sample": answer.sample_index,
        "status": score.status,
        "reward": score.reward,
        "correct": correct,
        "answer": score.answer,
        "length": answer.tokens,
        "versions": list(answer.versions or ()),
        "truncated": answer.finish_reason == "length",
        "prompt": answer.prompt,
        "response": answer.text,
    }


def without_texts(verdict: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a verdict that is sent to the loop."""
    return {name: value for name, value in verdict.items() if name not in TEXTS}


def first_shown(verdicts: Iterable[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """The first verdicts of an evaluation by prompt and sample."""
    return heapq.nsmallest(count, verdicts, key=lambda v: (v["prompt_id"], v["sample"]))


def readable(episode: StoredEpisode, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    """One sample as `samples/` shows it: with several turns, everything after the first prompt, and
    each turn by itself.

    "token_versions": [[version, tokens in a row that it sampled], ...]. "pieces": for each turn the
    text of each sampled token, of the first PIECES_KEPT tokens.
    """
    parts = [load_trajectory(record) for record in episode.records]
    first, last, score = parts[0], parts[-1], episode.score
    texts = [decode(t.token_ids[int(t.turn_starts[0]) :].tolist()) for t in parts]
    versions = np.concatenate([t.token_version for t in parts])
    turns = _turns(parts, score, decode)
    versions_of_tokens = [[int(v), len(list(run))] for v, run in itertools.groupby(versions)]
    return {
        "prompt_id": first.prompt_id,
        "group_id": first.group_id,
        "sample": first.sample_index,
        "prompt": decode(first.prompt_ids.tolist()),
        "response": "\n".join(texts),
        "reward": score.reward,
        "score_status": score.status,
        "reward_parts": score.parts,
        "finish_reason": last.finish_reason,
        "actor": first.actor_id,
        "actor_kind": first.actor_kind,
        "versions": [int(versions.min()), int(versions.max())] if len(versions) else [],
        "tokens": len(versions),
        "token_versions": versions_of_tokens,
        "pieces": _pieces_of_turns(parts, decode),
        **({"turns": turns} if len(turns) > 1 else {}),
    }


def pieces(ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[str]:
    """The text that each token adds to those before it. A character of several tokens belongs to
    the last of them."""
    found: list[str] = []
    start = done = 0  # the tokens from start to done give the context that spaces depend on
    for end in range(1, len(ids) + 1):
        text = decode(ids[start:end])
        if text.endswith(UNFINISHED) and end < len(ids):
            found.append("")
            continue
        found.append(text[len(decode(ids[start:done])) :])
        start, done = done, end
    return found


def _pieces_of_turns(
    parts: Sequence[Trajectory], decode: Callable[[Sequence[int]], str]
) -> list[list[str]]:
    found, left = [], PIECES_KEPT
    for t in parts:
        turns = np.searchsorted(t.turn_starts, np.flatnonzero(t.sampled), side="right")
        for turn in range(1, len(t.turn_starts) + 1):
            found.append(pieces(t.sampled_ids[turns == turn][:left].tolist(), decode))
            left -= len(found[-1])
    return found


def _turns(
    parts: Sequence[Trajectory], score: Score, decode: Callable[[Sequence[int]], str]
) -> list[dict[str, Any]]:
    """Return the prompt and the response of each turn; a further part repeats the whole prompt. The
    prompt of the first turn is the sample's prompt."""
    turns: list[dict[str, Any]] = []
    for t in parts:
        seen = int(t.turn_starts[0]) if not turns else 0  # tokens shown so far
        starts = [*map(int, t.turn_starts), len(t.sampled)]
        for start, following in itertools.pairwise(starts):
            # what follows a turn's tokens is observed
            end = start + int(np.count_nonzero(t.sampled[start:following]))
            observed, said = t.token_ids[seen:start], t.token_ids[start:end]
            turn: dict[str, Any] = {
                "part": t.part,
                "observed": decode(observed.tolist()),
                "said": decode(said.tolist()),
            }
            if score.turn_rewards:
                turn["reward"] = score.turn_rewards[len(turns)]
            turns.append(turn)
            seen = end
    return turns
