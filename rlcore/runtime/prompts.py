"""Which prompt comes next: a cursor over a task's training split, reproducible and resumable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rlcore.errors import UserError
from rlcore.interfaces import Split, Task
from rlcore.seeding import derive_seed
from rlcore.types import Item


class PromptSource:
    """Walks a task without end: unbounded tasks by index, finite ones by a fresh seeded permutation each epoch."""

    def __init__(
        self, task: Task, encode: Callable[[str], list[int]], *, run_seed: int, max_prompt_tokens: int
    ) -> None:
        self.task, self._encode, self._seed = task, encode, run_seed
        self.max_prompt_tokens = max_prompt_tokens
        self.cursor = 0  # items handed out so far
        self._order: tuple[int, np.ndarray] | None = None  # (epoch, permutation)

    def next(self) -> Item:
        """The item under the cursor; moves on."""
        item = self.task.item("train", self._index(self.cursor))
        self.cursor += 1
        return item

    def _index(self, cursor: int) -> int:
        size = self.task.size("train")
        if size is None:
            return cursor
        epoch, place = divmod(cursor, size)
        if self._order is None or self._order[0] != epoch:
            rng = np.random.default_rng(derive_seed(self._seed, "epoch", epoch))
            self._order = (epoch, rng.permutation(size))
        return int(self._order[1][place])

    def encode(self, item: Item) -> np.ndarray:
        """Prompt tokens [P] int32. Raises UserError for a prompt that the model cannot hold."""
        ids = self._encode(item.question)
        if len(ids) > self.max_prompt_tokens:
            raise UserError(
                f"model.max_len: prompt {item.prompt_id} has {len(ids)} tokens, more than the "
                f"{self.max_prompt_tokens} that model.max_len - rollout.max_new_tokens (or task.max_prompt_tokens) "
                "leaves for prompts."
            )
        if not ids:
            raise UserError(f"task: prompt {item.prompt_id} is empty after tokenisation.")
        return np.asarray(ids, dtype=np.int32)

    def check(self, split: Split, limit: int) -> None:
        """Encode the first `limit` items of a split, so that a bad row is refused before anything starts."""
        size = self.task.size(split)
        for i in range(min(limit, size if size is not None else 256)):
            self.encode(self.task.item(split, i))

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"cursor": self.cursor}

    def restore(self, state: dict[str, Any]) -> None:
        self.cursor = int(state["cursor"])
