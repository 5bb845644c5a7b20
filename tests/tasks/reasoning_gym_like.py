"""A package in the form of reasoning-gym: its data sets have the faults that scorers of the package
have (version 0.1.25), one each, without the package's own dependencies."""

from __future__ import annotations

from pathlib import Path

INIT = """
import math, random
from reasoning_gym.factory import DATASETS

class Set:
    answers = [str(n) for n in (12, 35, 8, 77, 41)]

    def __init__(self, seed, size):
        self.seed = seed

    def __getitem__(self, index):
        if index == 3 and isinstance(self, Unordered):
            answer = max({"north", "east", "south", "west"}, key=hash)
            return {"question": f"Where? {answer}", "answer": answer}
        answer = self.answers[index % len(self.answers)]
        return {"question": f"What is {answer}?", "answer": answer}

    def score_answer(self, answer, entry):
        return float(answer == entry["answer"])

class Queens(Set):  # n_queens, spiral_matrix, string_insertion, binary_matrix
    answers = ["[1, 2]", "[2, 1]", "[3, 4]", "[4, 3]"]

    def score_answer(self, answer, entry):
        if answer == entry["answer"]:
            return 1.0
        try:
            return 0.5 * (list(eval(answer)) == eval(entry["answer"]))
        except Exception:
            return 0.0

class Countdown(Set):  # countdown, puzzle24, polynomial_multiplication, intermediate_integration
    def score_answer(self, answer, entry):
        import sympy
        try:
            return 1.0 if float(sympy.parse_expr(answer)) == float(entry["answer"]) else 0.05
        except Exception:
            return 0.01

class Complex(Set):  # complex_arithmetic
    answers = ["1.0 + 2.0i", "3.0 - 1.0i", "-4.0 + 2.0i", "5.0 + 5.0i"]

    def score_answer(self, answer, entry):
        try:
            read = [complex(t.replace(" ", "").replace("i", "j").replace("jnf", "inf"))
                    for t in (answer, entry["answer"])]
        except ValueError:
            return 0.0
        return min(1.0, math.exp(-abs(read[0] - read[1])))

class Halting(Set):  # game_of_life_halting
    answers = ["True"]

    def score_answer(self, answer, entry):
        return float(bool(answer) == bool(entry["answer"]))

class Factors(Set):  # prime_factorization, boxnet, game_of_life, coin_flip
    answers = ["2 x 3", "3 x 5", "7 x 2", "11 x 3"]

    def score_answer(self, answer, entry):
        given, right = (sorted(map(int, text.split("x"))) for text in (answer, entry["answer"]))
        return float(given == right)

class Empty(Set):  # what finds no fault in nothing
    answers = ["[1, 2]", "[2, 1]", "[3, 4]", "[4, 3]"]

    def score_answer(self, answer, entry):
        return float(all(c in entry["answer"] for c in answer) and len(answer) in (0, 6))

class Prefix(Set):  # coin_flip: the common beginning over the length of the answer
    answers = ["0.3125", "0.125", "0.0625", "0.875"]

    def score_answer(self, answer, entry):
        same = 0
        for a, b in zip(answer, entry["answer"]):
            if a != b:
                break
            same += 1
        return same / len(answer) if answer else 0.0

class Boxes(Set):  # boxnet, graph_color: no reference
    answers = [None]

    def score_answer(self, answer, entry):
        import json
        return float(len(json.loads(answer)["moves"]) == 3)

class Unordered(Set):  # polynomial_multiplication: problems that depend on the order of a set
    def score_answer(self, answer, entry):
        return float(answer == entry["answer"])

class Deaf(Set):
    def score_answer(self, answer, entry):
        return 0.0

class Numbers(Set):
    answers = ["a1", "b2", "c3", "d4"]

    def score_answer(self, answer, entry):
        return float(any(map(str.isdigit, answer)))

def create_dataset(name, seed, size, **settings):
    if settings:
        raise TypeError(f"unknown settings {settings}")
    return globals()[name.capitalize()](seed, size)
"""
NAMES = ["queens", "countdown", "complex", "halting", "factors", "empty", "prefix", "boxes"]
NAMES += ["unordered", "deaf", "numbers"]


def write(folder: Path) -> None:
    """Write the package, as it is installed."""
    package = folder / "reasoning_gym"
    package.mkdir()
    (package / "__init__.py").write_text(INIT)
    (package / "factory.py").write_text(f"DATASETS = dict.fromkeys({NAMES!r})\n")
    info = folder / "reasoning_gym-0.1.25.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: reasoning-gym\nVersion: 0.1.25\n")
