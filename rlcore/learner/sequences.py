"""What the model is run over: tokens in order, and which of them are scored. NumPy alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rlcore.types import Episode


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """One sequence of the model: a record of an episode, or an example with its answer.

    Position i predicts token i + 1 where `sampled[i + 1]`; the last sampled token and what follows
    it are no inputs. Raises ValueError if the first token is sampled: nothing predicts it.

    Example, an answer of two tokens: TokenSequence([5, 9, 4, 7], [0, 0, 1, 1])
    """

    token_ids: np.ndarray  # [L] integers
    sampled: np.ndarray  # [L] bool
    # the head's temperature over the one at which it was sampled: logits are multiplied by it
    sharper: float = 1.0
    #: [S] int64: the positions that predict the sampled tokens, in order
    predicting: np.ndarray = field(init=False, repr=False, compare=False)

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
        """A prompt and an answer of which every token is scored."""
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


def of_episode(episode: Episode, sharper: float = 1.0) -> tuple[TokenSequence, ...]:
    """The sequences of an episode's records, in order."""
    return tuple(TokenSequence(t.token_ids, t.sampled, sharper) for t in episode.parts)
