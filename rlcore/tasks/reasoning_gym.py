"""Problems of the reasoning-gym package, generated offline and judged by its own scorers."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import lru_cache
from importlib.metadata import version
from typing import Any

from rlcore.errors import UserError
from rlcore.graders.fences import tagged_answer
from rlcore.interfaces import Split, Task
from rlcore.seeding import derive_seed
from rlcore.tasks import format_prompt_id, isolation, parse_prompt_id
from rlcore.tasks.arguments import ArgumentError, integer, one_of
from rlcore.tasks.code import confining_layers
from rlcore.tasks.foreign import FULL, ForeignScorer, number, prove
from rlcore.tasks.proof import default_folder
from rlcore.types import Grade, Item

# Some data sets make all their problems at once: so many share a seed.
CHUNK = 500
KEPT = 8  # of these, the last used
SEEDS = 1 << 31  # generators add the index to their seed and hand it to NumPy
PROVEN = 4  # problems on which a scorer is proven
NAME = "reasoning_gym"
INSTRUCTION = "Write the answer, and nothing else, between <answer> and </answer>."


class ReasoningGym(Task):
    """`name` is one of its datasets, and `settings` are the dataset's configuration.

    `answer`: the text to judge: "tags", inside the last <answer> and </answer>, which `instruction`
    asks for, or "whole", the response. The scorer's partial credit is the reward; the part
    "correct" is 1 for full credit alone. The splits are generated from their own seeds, so that
    a problem may be in both where a dataset has few.

    The package runs in its own process (`isolation`), and answers in forks of it, for
    `timeout_s` seconds of CPU time at most. `scorer`: "own", the dataset's, which is proven first
    (`foreign`); or "exact": an answer is right if it is the reference, as a text or as a number.
    `confinement`, `proof_cache`: as of `rlcore.tasks.code`.
    """

    name = NAME

    def __init__(
        self,
        *,
        name: str,
        settings: Mapping[str, Any] | None = None,
        answer: str = "tags",
        instruction: str = INSTRUCTION,
        seed: int = 0,
        scorer: str = "own",
        timeout_s: float = 1.0,
        confinement: str = "full",
        proof_cache: str | None = None,
    ) -> None:
        self._tagged = one_of("answer", answer, ("tags", "whole")) == "tags"
        self._instruction = instruction if self._tagged else ""
        integer("seed", seed, 0, 2**63 - 1)
        own = one_of("scorer", scorer, ("own", "exact")) == "own"
        chosen = dict(settings or {})
        if isolation.inside():
            self._made = _Made(name, chosen, seed)
            return
        args = {"name": name, "settings": chosen, "seed": seed, "instruction": ""}
        if importlib.util.find_spec("reasoning_gym") is None:
            raise UserError(
                "task=reasoning_gym needs the package reasoning-gym, which is not installed: "
                "pip install 'rlcore[reasoning-gym]'."
            )
        limits = _limits(self.name, timeout_s, confinement)
        self._grader = isolation.IsolatedGrader(NAME, args, NAME, limits)
        self._grader.start()  # so that unsuitable settings are refused
        self._scorer: ForeignScorer | None = None
        if own:
            content = json.dumps([args, asdict(limits), version("reasoning-gym")], default=repr)
            items = [self._problem("train", index) for index in range(PROVEN)]
            self._proof = prove(items, self._grader, content, default_folder(proof_cache))
            self._check(name)
            self._scorer = ForeignScorer(self._grader, self._proof)
        elif not self._problem("train", 0).answer:
            self._grader.close()
            raise ArgumentError("scorer", scorer, f"needs references, which {name} does not have.")

    def _check(self, name: str) -> None:
        """Raise ArgumentError for a scorer that is not proven."""
        if self._proof.refused:
            self._grader.close()
            exact = " task.args.scorer=exact compares answers with the references instead."
            raise ArgumentError(
                "name",
                name,
                f"has a scorer that is not proven: {self._proof.refused}."
                f"{exact if self._proof.references else ''}",
            )

    def size(self, split: Split) -> int | None:
        return None

    def item(self, split: Split, index: int) -> Item:
        made = self._problem(split, index)
        asked = "\n\n".join(text for text in (made.question, self._instruction) if text)
        return replace(made, prompt_id=format_prompt_id(self.name, split, index), question=asked)

    def _problem(self, split: Split, index: int) -> Item:
        if isolation.inside():
            return self._made.item(split, index)
        return self._grader.item(format_prompt_id(NAME, split, index))

    def grade(self, item: Item, response: str) -> Grade:
        answer = tagged_answer(response) if self._tagged else response.strip()
        if answer is None:
            return Grade(0.0, {"correct": 0.0, "format": 0.0})
        failed: dict[str, float] = {}
        if self._scorer is None:
            reward = float(_equal(answer, item.answer))
        else:
            _, split, index = parse_prompt_id(item.prompt_id)
            asked = replace(item, prompt_id=format_prompt_id(NAME, split, index))
            credit = self._scorer.credit(asked, answer)
            reward, failed = credit.reward, {credit.failed: 1.0} if credit.failed else {}
        return Grade(reward, {"correct": float(reward >= FULL), "format": 1.0, **failed})

    def judge(self, item: Item, answer: str) -> Grade:
        """The credit of an answer by the dataset's scorer. It may execute the answer: for isolated
        processes alone, where it takes the place of `grade`."""
        return Grade(self._made.credit(item, answer))

    def worked_answer(self, item: Item) -> str | None:
        if not item.answer:
            return None
        return f"<answer>{item.answer}</answer>" if self._tagged else item.answer

    def alphabet(self) -> str | None:
        return None

    def close(self) -> None:
        """End the process of the package; the next answer starts another."""
        self._grader.close()

    def remarks(self) -> list[str]:
        return self._proof.remarks() if self._scorer is not None else []


def _limits(task: str, timeout_s: object, confinement: str) -> isolation.AnswerLimits:
    """The limits of one answer. Raises ArgumentError for a machine that cannot confine by every
    layer, unless `confinement` is "reduced"."""
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or timeout_s <= 0:
        raise ArgumentError(
            "timeout_s", timeout_s, "is not accepted: give a number of seconds above 0."
        )
    layers = confining_layers(f"task {task}", confinement)
    return isolation.AnswerLimits(timeout_s=float(timeout_s), layers=layers)


def _equal(answer: str, reference: str) -> bool:
    if answer.strip() == reference.strip():
        return True
    given = number(answer)
    return given is not None and given == number(reference)


class _Made:
    """A dataset of the package, in the process that makes its problems and scores answers."""

    def __init__(self, name: str, settings: Mapping[str, Any], seed: int) -> None:
        @lru_cache(KEPT)
        def chunk(split: Split, number: int) -> Any:
            return _dataset(name, settings, derive_seed(seed, NAME, split, number) % SEEDS)

        # An entry can take seconds to make.
        @lru_cache(KEPT)
        def entry(split: Split, index: int) -> tuple[Any, Any]:
            its = chunk(split, index // CHUNK)
            return its, its[index % CHUNK]

        self._entry = entry
        chunk("train", 0)  # so that unsuitable settings are refused

    def item(self, split: Split, index: int) -> Item:
        _, entry = self._entry(split, index)
        answer = entry["answer"]
        prompt_id = format_prompt_id(NAME, split, index)
        return Item(prompt_id, entry["question"], "" if answer is None else str(answer))

    def credit(self, item: Item, answer: str) -> float:
        _, split, index = parse_prompt_id(item.prompt_id)
        scorer, entry = self._entry(split, index)
        return float(scorer.score_answer(answer, entry))


def _dataset(name: str, settings: Mapping[str, Any], seed: int) -> Any:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

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
