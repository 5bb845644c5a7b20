"""The cost of an engine's steps by their contents: least squares over all steps, in constant
memory."""

from __future__ import annotations

import itertools
import math

import numpy as np

from rlcore.interfaces import StepLoad

NAMES = ("step_s", "request_s", "context_s", "prompt_s")
FEWEST = 16  # steps from which costs are estimated
_RCOND = 1e-9  # of the scaled normal equations; shares of the load that always go together


class StepCosts:
    """Sums over steps. A step of n requests with c tokens of context, p of them of new prompts, is
    taken to cost `step_s + n * request_s + c * context_s + p * prompt_s`, none of them negative.

    Written by one thread, read by any.
    """

    def __init__(self) -> None:
        self._sums: tuple[np.ndarray, np.ndarray, int] = (np.zeros((4, 4)), np.zeros(4), 0)

    def add(self, load: StepLoad, seconds: float) -> None:
        """One step."""
        requests = load.tokens - load.accepted  # each samples one token besides
        x = np.array([1.0, requests, load.context_tokens, load.prompt_tokens])
        products, times, steps = self._sums
        # replaced, so that another thread never reads half of an update
        self._sums = (products + np.outer(x, x), times + seconds * x, steps + 1)

    def requests_at(self, share: float) -> float:
        """How many requests of mean context cost a step this share of its `step_s`; infinity where
        requests cost nothing, and before `FEWEST` steps."""
        costs = self.fitted()
        _, tokens, contexts, _ = self._sums[0][0]
        if not costs or not tokens:
            return math.inf
        each = costs["request_s"] + costs["context_s"] * contexts / tokens
        return share * costs["step_s"] / each if each > 0 else math.inf

    def fitted(self) -> dict[str, float]:
        """Costs by `NAMES`, in seconds; nothing before `FEWEST` steps."""
        products, times, steps = self._sums
        if steps < FEWEST:
            return {}
        return dict(zip(NAMES, non_negative(products, times).tolist(), strict=True))


def non_negative(products: np.ndarray, times: np.ndarray) -> np.ndarray:
    """The x >= 0 with the least x'Ax - 2b'x, the first entry always among the free ones: by trying
    every set of free entries.

    products: A [n, n], positive semi-definite. times: b [n]. Returns [n].
    """
    n = len(times)
    scale = np.sqrt(np.maximum(np.diag(products), 1e-300))
    a, b = products / np.outer(scale, scale), times / scale
    best, least = np.zeros(n), np.inf
    for size in range(n):
        for others in itertools.combinations(range(1, n), size):
            free = [0, *others]
            found, *_ = np.linalg.lstsq(a[np.ix_(free, free)], b[free], rcond=_RCOND)
            x = np.zeros(n)
            x[free] = found
            cost = float(x @ a @ x - 2 * b @ x)
            if (found >= 0).all() and cost < least:
                best, least = x, cost
    return best / scale
