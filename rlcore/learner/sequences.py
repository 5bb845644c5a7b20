"""The sequences that the model is run over: tokens in order, and a mark on those that are scored.
NumPy alone. Only this file decides how the log-probs of a response are computed. A `Reader` makes a
sequence of each record. Packing, passes, losses and corrections see only its inputs, the positions
that predict, and their targets. Models without exact log-probs have their own reader
(`learner/protocols.py: LogProbEstimator`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol

import numpy as np

from rlcore.models.routes import ROUTES
from rlcore.types import Episode, PageRule, Trajectory


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """One sequence of the model: a record of an episode, or an example with its answer.

    Position i predicts token i + 1 where `sampled[i + 1]`; the last sampled token and what follows
    it are not inputs. Raises ValueError if the first token is sampled: nothing predicts it.

    Example, an answer of two tokens: TokenSequence([5, 9, 4, 7], [0, 0, 1, 1])
    """

    token_ids: np.ndarray  # [L] integers
    sampled: np.ndarray  # [L] bool
    # the head's temperature over the one at which it was sampled: logits are multiplied by it
    sharper: float = 1.0
    # [R, layers, k]: the experts of its first R tokens (`models/routes.py`); None: its own
    routes: np.ndarray | None = field(default=None, repr=False, compare=False)
    # the pages that its actor attended to; None: those of the learner's rule
    page_rule: PageRule | None = None
    #: [S] int64: the positions that predict the sampled tokens, in order
    predicting: np.ndarray = field(init=False, repr=False, compare=False)

    #: whether its positions attend to later ones too
    bidirectional: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.sampled):
            raise ValueError(
                f"a sequence of {len(self.token_ids)} tokens has a mask of {len(self.sampled)}"
            )
        if len(self.sampled) and self.sampled[0]:
            raise ValueError("a sequence begins with a sampled token, which nothing predicts")
        # found once: packing asks for lengths again and again
        object.__setattr__(self, "predicting", np.flatnonzero(self.sampled) - 1)

    @classmethod
    def of_answer(cls, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> TokenSequence:
        """The sequence of a prompt and an answer whose tokens are all scored."""
        token_ids = np.array([*prompt_ids, *answer_ids], dtype=np.int64)
        return cls(token_ids, np.arange(len(token_ids)) >= len(prompt_ids))

    @property
    def scored(self) -> int:
        """Sampled tokens."""
        return len(self.predicting)

    @property
    def prompt_len(self) -> int:
        """Length of the first observation; 0 if nothing is sampled."""
        return int(self.predicting[0]) + 1 if len(self.predicting) else 0

    @property
    def targets(self) -> np.ndarray:
        """[S]: the sampled tokens."""
        return self.token_ids[self.sampled]

    def __len__(self) -> int:
        """Positions to compute."""
        return int(self.predicting[-1]) + 1 if len(self.predicting) else 0

    @property
    def inputs(self) -> np.ndarray:
        """Input ids of those positions."""
        return self.token_ids[: len(self)]


class ScoredSequence(Protocol):
    """One sequence of any model, as passes use it."""

    bidirectional: ClassVar[bool]

    def __len__(self) -> int:
        """Positions to compute."""

    @property
    def inputs(self) -> np.ndarray:
        """[len] integers, what the model reads."""

    @property
    def predicting(self) -> np.ndarray:
        """[S] int64: the positions that are scored, in order."""

    @property
    def targets(self) -> np.ndarray:
        """[S]: the tokens that these positions predict."""

    @property
    def scored(self) -> int:
        """S."""

    @property
    def prompt_len(self) -> int:
        """Tokens before the first scored one."""

    @property
    def sharper(self) -> float:
        """See `TokenSequence`."""


Reader = Callable[[Trajectory, float], ScoredSequence]  # of a record and its `sharper`


def read_next_tokens(t: Trajectory, sharper: float = 1.0) -> TokenSequence:
    """The reader of causal models: each token is predicted from the tokens before it."""
    return TokenSequence(t.token_ids, t.sampled, sharper, page_rule=PageRule.of_record(t.extras))


def read_with_routes(t: Trajectory, sharper: float = 1.0) -> TokenSequence:
    """The reader of causal models that compute the experts that the actor chose. Raises ValueError
    for a record without them."""
    routes = t.extras.get(ROUTES)
    if routes is None and t.sampled.any():
        raise ValueError(
            f"the record of {t.request_id} does not say which experts its actor chose: it was "
            "sampled without learner.router_replay=true"
        )
    return replace(read_next_tokens(t, sharper), routes=routes)


def of_episode(
    episode: Episode, sharper: float = 1.0, read: Reader = read_next_tokens
) -> tuple[ScoredSequence, ...]:
    """The sequences of an episode's records, in order."""
    return tuple(read(t, sharper) for t in episode.parts)
