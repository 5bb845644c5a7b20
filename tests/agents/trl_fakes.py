"""Classes and reward functions as they are written for TRL."""

from __future__ import annotations

import random


class Counter:
    def __init__(self):
        self.count = 0.0

    def reset(self, step_size=1, **row):
        self.count = 0.0
        return f" In steps of {step_size} to {row['answer']}."

    def add(self, amount: int, times: float = 1.0) -> float:
        """
        Add to the counter.

        Args:
            amount: What is added.
            times: How often.

        Returns:
            The sum.
        """
        if amount < 0:
            raise ValueError("nothing is taken off")
        self.count += amount * times
        return self.count

    async def later(self) -> dict:
        """Wait for the counter."""
        return {"count": self.count}

    def parts(self) -> list:
        """Two pieces of text."""
        return [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]

    def _hidden(self):
        raise AssertionError

    async def get_reward(self):
        return self.count


class Silent:
    def reset(self):
        return None


class Drawn(Silent):
    def __init__(self):
        self.number = random.random()

    def reset(self):
        return f" {self.number} {random.random()}"

    def get_reward(self):
        return 0.0


class Prompted(Drawn):
    def reset(self, prompt):
        return f" ({', '.join(m['role'] for m in prompt)})"


class Painter(Drawn):
    def paint(self) -> list:
        """Paint."""
        return [{"type": "image", "image": b""}]


class Undocumented(Drawn):
    def guess(self, number: int) -> str:
        return "no"


class Untyped(Drawn):
    def guess(self, number):
        """
        Guess.

        Args:
            number: A number.
        """


class Needy(Drawn):
    def reset(self, target, **row):
        return None


class Own:
    def reset(self, item, seed): ...

    def step(self, action): ...

    def grade(self): ...

    def get_reward(self): ...


CHOICES = {"counter": Counter}


def total(environments, answer, **row):
    return [10.0 * getattr(e, "count", 0.0) + 0 * int(a) for e, a in zip(environments, answer)]


async def said(completions, prompts):
    assert prompts[0][0]["role"] == "user"
    return [len(messages) for messages in completions]


def nothing(environments, **row):
    return [None] * len(environments)


def many(**row):
    return [1.0, 2.0]


def ids(completion_ids, **row):
    return [0.0]
