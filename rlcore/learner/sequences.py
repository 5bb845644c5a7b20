"""The sequences that the model is run over: tokens in order, and a mark on those that are scored.
NumPy alone.

How the log-probs of a response are computed is decided here and nowhere else in the learner: a
`Reader` makes a sequence of each record, and packing, passes, losses and corrections ask only what
it reads, which of its positions predict, and what.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from rlcore.models.masking import Estimate
from rlcore.models.routes import ROUTES
from rlcore.types import Episode, Trajectory


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
    # [R, layers, k]: the experts of its first R tokens (`models/routes.py`); None: its own
    routes: np.ndarray | None = field(default=None, repr=False, compare=False)
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


@dataclass(frozen=True, slots=True)
class MaskedSequence:
    """One sequence of a masked-diffusion model: some positions are hidden, and each predicts the
    token at its own place. Every position attends to every other.

    Example, a prompt of two tokens and a response of two on a canvas of three:
    MaskedSequence(inputs=[5, 9, m, m, m], predicting=[2, 3], targets=[4, 7], prompt_len=2)
    """

    inputs: np.ndarray  # [W] int64, what the model reads
    predicting: np.ndarray  # [S] int64: the positions that are scored, in order
    targets: np.ndarray  # [S]: their tokens
    prompt_len: int
    sharper: float = 1.0  # as of `TokenSequence`

    bidirectional: ClassVar[bool] = True

    @classmethod
    def of_record(
        cls, t: Trajectory, sharper: float, estimate: Estimate, mask_id: int
    ) -> MaskedSequence:
        """A record as its log-probs are estimated (`models/masking.py`)."""
        prompt, targets = t.prompt_ids, t.sampled_ids
        predicting = len(prompt) + np.arange(len(targets))
        return cls(estimate.inputs(prompt, mask_id), predicting, targets, len(prompt), sharper)

    @classmethod
    def of_answer(
        cls, inputs: np.ndarray, masked: np.ndarray, tokens: np.ndarray, mask_id: int
    ) -> MaskedSequence:
        """A prompt as it is read, and an answer [n] whose `masked` tokens [n] bool are scored."""
        read = np.concatenate([inputs, np.where(masked, mask_id, tokens)]).astype(np.int64)
        places = np.flatnonzero(masked)
        return cls(read, len(inputs) + places, tokens[places], len(inputs))

    @property
    def scored(self) -> int:
        """Tokens that are predicted."""
        return len(self.targets)

    def __len__(self) -> int:
        """Positions to compute."""
        return len(self.inputs)


ScoredSequence = TokenSequence | MaskedSequence
Reader = Callable[[Trajectory, float], ScoredSequence]  # of a record and its `sharper`


def read_next_tokens(t: Trajectory, sharper: float = 1.0) -> TokenSequence:
    """As a causal model reads a record: each token is predicted by what precedes it."""
    return TokenSequence(t.token_ids, t.sampled, sharper)


def read_with_routes(t: Trajectory, sharper: float = 1.0) -> TokenSequence:
    """The same, computed with the experts that its actor chose. Raises ValueError for a record
    without them."""
    routes = t.extras.get(ROUTES)
    if routes is None and t.sampled.any():
        raise ValueError(
            f"the record of {t.request_id} does not say which experts its actor chose: it was "
            "sampled without learner.router_replay=true"
        )
    return TokenSequence(t.token_ids, t.sampled, sharper, routes)


def masked_reader(mask_id: int) -> Reader:
    """As a masked-diffusion model reads a record: by the very estimate that its actor made.

    The reader raises ValueError for a record without one.
    """

    def read(t: Trajectory, sharper: float = 1.0) -> MaskedSequence:
        return MaskedSequence.of_record(t, sharper, Estimate.of_record(t), mask_id)

    return read


def of_episode(
    episode: Episode, sharper: float = 1.0, read: Reader = read_next_tokens
) -> tuple[ScoredSequence, ...]:
    """The sequences of an episode's records, in order."""
    return tuple(read(t, sharper) for t in episode.parts)
