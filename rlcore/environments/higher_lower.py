"""Find a hidden number: a wrong guess is answered by `>` (it is higher) or `<` (it is lower)."""

from __future__ import annotations

import random

from rlcore.environments.protocol import Action, Environment, Opening, Reply
from rlcore.types import Grade, Item

HIGHER, LOWER, UNREADABLE = ">", "<", "?"


class HigherLower(Environment):
    """The hidden number is the answer of an item of the task `higher_lower`. The reward is 1 for a
    guess that hits it within `guesses`, else 0.

    `hinted`: share of the worked guesses that heed the hints so far; the others are random. Fresh
    models learn the form of the game from them, and its strategy from the reward. `forgiving`: an
    unreadable guess is answered `?` and costs a guess; otherwise it ends the game, so that a policy
    cannot settle on wasting guesses.
    """

    def __init__(self, *, guesses: int = 4, hinted: float = 0.0, forgiving: bool = True) -> None:
        if guesses < 1 or not 0 <= hinted <= 1:
            raise ValueError("guesses must be at least 1, and hinted a share from 0 to 1")
        self._guesses = guesses
        self._hinted = hinted
        self._forgiving = forgiving

    def reset(self, item: Item, seed: int) -> Opening:
        self._number = item.answer
        self._random = random.Random(seed)
        self._range = 0, 10 ** len(item.answer)  # [low, high) after the hints so far
        self._count = 0
        self._found = False
        return Opening([{"role": "user", "content": item.question}])

    def step(self, action: Action) -> Reply:
        guess = action.text.strip()
        self._count += 1
        self._found = guess == self._number
        if self._found or self._count >= self._guesses:
            return Reply(over=True)
        hint = self._hint(guess)
        parts = {"unreadable": float(hint == UNREADABLE)}
        if hint == UNREADABLE and not self._forgiving:
            return Reply(over=True, parts=parts)
        return Reply([{"role": "user", "content": hint}], parts=parts)

    def _hint(self, guess: str) -> str:
        if len(guess) != len(self._number) or not (guess.isascii() and guess.isdecimal()):
            return UNREADABLE
        low, high = self._range
        if guess < self._number:
            self._range = max(low, int(guess) + 1), high
            return HIGHER
        self._range = low, min(high, int(guess))
        return LOWER

    def grade(self) -> Grade:
        found = float(self._found)
        return Grade(found, {"correct": found, "guesses": float(self._count)})

    def worked(self) -> str | None:
        width = len(self._number)
        heeds = self._random.random() < self._hinted
        low, high = self._range if heeds else (0, 10**width)
        return str(self._random.randrange(low, high)).zfill(width)
