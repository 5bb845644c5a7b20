"""The experts that an actor's engine chose, as records carry them. NumPy alone.

`routes` [R, layers, k] uint8 or uint16, an extra array of a record. For each of its first R tokens
and each layer of the model, it has the k experts that the engine chose as it first read the token.
A layer without experts has zeros. It never read the last token of a response, so R is one less than
the record's length. Prompts are included: the keys and values that a response attends to come out
of their experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlcore.types import Trajectory

ROUTES = "routes"  # among the extras of a record


def route_bytes(layers: int, chosen: int, experts: int) -> int:
    """Bytes that a token's routes take in a record."""
    return layers * chosen * (1 if experts <= 256 else 2)


class RouteLog:
    """Collects the routes that an engine reports for one request, each time that it is queued. An
    engine begins with the first token again whenever a request is queued; routes of tokens that
    were read before are left out.

    Example: after add([[[0, 1]], [[2, 0]]]), restart() and add([[[3, 1]], [[2, 0]], [[1, 2]]]),
    rows() is [[[0, 1]], [[2, 0]], [[1, 2]]]
    """

    def __init__(self, known: np.ndarray | None = None) -> None:
        """`known`: routes of the first tokens, from another engine."""
        self._chunks = [] if known is None else [known]
        self._known = 0 if known is None else len(known)
        self._read = 0  # tokens since the request was queued last

    def restart(self) -> None:
        """The request is queued again, with the tokens that it has."""
        self._read = 0

    def add(self, rows: np.ndarray) -> None:
        """The routes [n, layers, k] of the next n tokens."""
        new = rows[max(0, self._known - self._read) :]
        self._read += len(rows)
        if len(new):
            self._chunks.append(new)
            self._known += len(new)

    def rows(self) -> np.ndarray | None:
        """[R, layers, k]; None: the engine reported none."""
        if len(self._chunks) > 1:
            self._chunks = [np.concatenate(self._chunks)]
        return self._chunks[0] if self._chunks else None


def joined(turns: Sequence[Trajectory]) -> dict[str, np.ndarray]:
    """The routes of an episode's part, whose turns each begin with the tokens of earlier turns:
    each token has the routes of the turn that first read it."""
    log = RouteLog()
    for t in turns:
        log.restart()
        if ROUTES in t.extras:
            log.add(t.extras[ROUTES])
    rows = log.rows()
    return {} if rows is None else {ROUTES: rows}
