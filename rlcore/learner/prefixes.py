"""Sequences as a tree of their common prefixes. NumPy alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlcore.learner.sequences import TokenSequence

# Keys and values that attention reads again take less memory than the activations of a position
_REPEATS = 4


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """U nodes, one for each distinct prefix of some sequences' inputs.

    Example, [5, 9, 4] and [5, 9, 7]: PrefixTree([5, 9, 4, 7], [0, 1, 2, 2], [[0, 1, 2],
    [0, 1, 3]], [0, 2])
    """

    tokens: np.ndarray  # [U] int64, last token of each prefix
    depths: np.ndarray  # [U] int64, its position
    paths: list[np.ndarray]  # of each sequence: [L] int64, the nodes of its positions
    firsts: list[int]  # of each sequence: the position from which on it added its nodes

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Of each sequence: positions, and those that it added."""
        return [(len(path), len(path) - first) for path, first in zip(self.paths, self.firsts)]

    @classmethod
    def of(cls, sequences: Sequence[TokenSequence]) -> PrefixTree:
        inputs = [np.asarray(s.inputs, dtype=np.int64) for s in sequences]
        keys = [sort_key(s) for s in sequences]
        order = sorted(range(len(inputs)), key=lambda i: (keys[i], i))
        paths: list[np.ndarray] = [np.empty(0, dtype=np.int64)] * len(inputs)
        firsts = [0] * len(inputs)
        nodes, before = 0, None
        for i in order:
            # in this order no earlier sequence has more in common with it than the one before
            first = 0 if before is None else common_length(inputs[before], inputs[i])
            end = nodes + len(inputs[i]) - first
            shared = paths[i] if before is None else paths[before][:first]
            paths[i] = np.concatenate([shared, np.arange(nodes, end)])
            firsts[i] = first
            nodes, before = end, i
        tokens = [inputs[i][firsts[i] :] for i in order]
        depths = [np.arange(firsts[i], len(inputs[i])) for i in order]
        return cls(np.concatenate(tokens), np.concatenate(depths), paths, firsts)


def in_batches(parts: Sequence[Sequence[TokenSequence]], budget: int) -> list[list[int]]:
    """Which episodes share a micro-batch of at most `budget` distinct prefixes.

    Episodes that begin alike follow each other, those with the longest sequences first; a group
    that does not fit is continued in another micro-batch, which computes its prompt again. What
    attention reads of shared positions, once for every sequence, is bounded too. An episode beyond
    the budget is alone; those without sequences are left out.
    """
    batches: list[list[int]] = []
    before: TokenSequence | None = None
    nodes = keys = 0
    for i in _alike(parts):
        added = _added(parts[i], before)
        nodes, keys = nodes + added, keys + sum(map(len, parts[i]))
        if not batches or max(nodes, keys / _REPEATS) > budget:
            batches.append([])
            nodes, keys = _added(parts[i], None), sum(map(len, parts[i]))
        batches[-1].append(i)
        before = parts[i][-1]
    return batches


def _alike(parts: Sequence[Sequence[TokenSequence]]) -> list[int]:
    """Episodes by first observation, then by what follows it."""
    clusters: dict[bytes, list[tuple[bytes, int]]] = {}
    for i, sequences in enumerate(parts):
        if sequences:
            first = sequences[0]
            key = sort_key(first)
            clusters.setdefault(key[: 4 * first.prompt_len], []).append((key, i))
    longest = {
        prompt: max(len(s) for _, i in members for s in parts[i])
        for prompt, members in clusters.items()
    }
    order = sorted(clusters, key=lambda prompt: (-longest[prompt], clusters[prompt][0][1]))
    return [i for prompt in order for _, i in sorted(clusters[prompt])]


def _added(sequences: Sequence[TokenSequence], before: TokenSequence | None) -> int:
    """Positions that follow the common prefix of each sequence with the one before it."""
    added = 0
    for s in sequences:
        inputs = s.inputs
        added += len(inputs) - (0 if before is None else common_length(before.inputs, inputs))
        before = s
    return added


def sort_key(sequence: TokenSequence) -> bytes:
    """Orders sequences by their inputs: those with a common prefix are neighbours."""
    return np.asarray(sequence.inputs, dtype=">u4").tobytes()


def common_length(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the longest common prefix."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    at = int(differ.argmax()) if n else 0
    return at if n and differ[at] else n
