"""The interface between the request book and what decodes its requests. numpy only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rlcore.types import FinishReason, SamplingSpec


@dataclass(frozen=True, slots=True)
class CoreRequest:
    """A request as the core receives it, new or resubmitted with the tokens it already has.

    Example: CoreRequest("train:17:0", [3, 4, 5, 9], 3, sampling, max_tokens=63, seed=1)
    """

    request_id: str
    token_ids: Sequence[int]  # the prompt, then the response tokens sampled before
    prompt_len: int  # tokens of the prompt alone
    sampling: SamplingSpec
    max_tokens: int  # still to be sampled
    seed: int
    cache_salt: str | None = None  # requests share cached prefixes only within the same salt


class Output(NamedTuple):
    """What one step sampled for one request. Without tokens it says that the core has begun with
    it."""

    request_id: str
    tokens: list[int]
    # ids and log-probs [tokens, >= k+1], the sampled token first; None if none were asked for
    rows: tuple[np.ndarray, np.ndarray] | None
    finish: FinishReason | None  # None: unfinished
    extras: Mapping[str, np.ndarray] | None = None  # of a finished one: further arrays by name
    # [n, layers, k]: the experts of the next n tokens that the core has read of it since it was
    # queued (`models/routes.py`); None where it records none
    routes: np.ndarray | None = None


class DecodeCore(ABC):
    """Requests in, tokens and log-prob rows out, one step at a time."""

    @abstractmethod
    def add(self, request: CoreRequest) -> None:
        """Queue a request."""

    @abstractmethod
    def abort(self, request_ids: list[str]) -> None:
        """Drop requests that are queued or running."""

    @abstractmethod
    def step(self) -> Iterable[Output]:
        """One step. Raises RuntimeError if a request failed or the model is lost."""

    @abstractmethod
    def settle(self) -> Iterable[Output]:
        """What steps that were begun have yet to give, without beginning another; nothing is in
        flight then. Raises as `step` does."""
