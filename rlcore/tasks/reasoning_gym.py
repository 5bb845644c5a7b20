"""Problems of the reasoning-gym package, generated offline and judged by its own scorers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from rlcore.errors import UserError
from rlcore.interfaces import Split, Task
from rlcore.seeding import derive_seed
from rlcore.tasks import format_prompt_id, parse_prompt_id
from rlcore.tasks.arguments import ArgumentError, integer, one_of
from rlcore.tasks.grades import tagged_answer
from rlcore.types import Grade, Item

# Some data sets make all their problems at once: so many share a seed.
CHUNK = 500
KEPT = 8  # of these, the last used
SEEDS = 1 << 31  # generators add the index to their seed and hand it to NumPy
INSTRUCTION = "Write the answer, and nothing else, between <answer> and </answer>."


class ReasoningGym(Task):
    """`name` is one of its datasets, and `settings` are those of the dataset's configuration.

    `answer`: the text to judge: "tags", inside the last <answer> and </answer>, which `instruction`
    asks for, or "whole", the response. The scorer's partial credit is the reward; the part
    "correct" is 1 for full credit alone. The splits are generated from seeds of their own, so that
    a problem may be in both where a dataset has few.
    """

    name = "reasoning_gym"

    def __init__(
        self,
        *,
        name: str,
        settings: Mapping[str, Any] | None = None,
        answer: str = "tags",
        instruction: str = INSTRUCTION,
        seed: int = 0,
    ) -> None:
        self._tagged = one_of("answer", answer, ("tags", "whole")) == "tags"
        self._instruction = instruction if self._tagged else ""
        integer("seed", seed, 0, 2**63 - 1)
        chosen = dict(settings or {})

        @lru_cache(KEPT)
        def chunk(split: Split, number: int) -> Any:
            return _dataset(name, chosen, derive_seed(seed, "reasoning_gym", split, number) % SEEDS)

        self._chunk = chunk
        chunk("train", 0)  # so that unsuitable settings are refused

    def size(self, split: Split) -> int | None:
        return None

    def item(self, split: Split, index: int) -> Item:
        entry = self._chunk(split, index // CHUNK)[index % CHUNK]
        asked = "\n\n".join(text for text in (entry["question"], self._instruction) if text)
        answer = entry["answer"]
        prompt_id = format_prompt_id(self.name, split, index)
        return Item(prompt_id, asked, "" if answer is None else str(answer))

    def grade(self, item: Item, response: str) -> Grade:
        # The entry that the scorer reads need not be JSON, so it is generated again.
        _, split, index = parse_prompt_id(item.prompt_id)
        answer = tagged_answer(response) if self._tagged else response.strip()
        found = float(answer is not None)
        reward = 0.0
        if answer is not None:
            chunk = self._chunk(split, index // CHUNK)
            reward = float(chunk.score_answer(answer, chunk[index % CHUNK]))
        return Grade(reward, {"correct": float(reward >= 1), "format": found})

    def worked_answer(self, item: Item) -> str | None:
        if not item.answer:
            return None
        return f"<answer>{item.answer}</answer>" if self._tagged else item.answer

    def alphabet(self) -> str | None:
        return None


def _dataset(name: str, settings: Mapping[str, Any], seed: int) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise UserError(
            "task=reasoning_gym needs the package reasoning-gym, which is not installed: "
            f"pip install 'rlcore[reasoning-gym]' ({error})."
        ) from error
    if name not in DATASETS:
        raise ArgumentError(
            "name", name, f"is not accepted; choose one of: {', '.join(sorted(DATASETS))}."
        )
    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=CHUNK, **settings)
    except (AssertionError, TypeError, ValueError) as error:
        raise ArgumentError(
            "settings", dict(settings), f"does not suit the dataset {name}: {error}."
        ) from error
