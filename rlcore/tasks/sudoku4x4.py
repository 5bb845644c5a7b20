"""4x4 sudoku with exactly one solution: `1.3./...` is answered by the full grid."""

from __future__ import annotations

import re
from functools import cache
from itertools import combinations, permutations

import numpy as np

from rlcore.graders.fences import tagged_answer
from rlcore.tasks.arguments import ArgumentError, integer, one_of, share
from rlcore.tasks.grades import weighted
from rlcore.tasks.procedural import ProceduralTask
from rlcore.types import Grade, Item

RELABELLINGS = list(permutations("1234"))
TEXT = (
    "Fill in this 4x4 sudoku: every row, column and 2x2 box holds 1, 2, 3 and 4 once. A dot is an "
    "empty cell, rows are separated by a slash: {puzzle}. Put the filled grid, in the same "
    "notation, between <answer> and </answer>."
)


class Sudoku4x4(ProceduralTask):
    """Puzzles with min_empty to max_empty empty cells (the difficulty).

    style "short" asks `1.34/...=` and expects the bare grid, "text" asks in English and expects
    <answer> tags. reward = (1 - format_reward) * correct + format_reward * well-formed; the part
    "cells" is the share of empty cells that are filled in correctly.
    """

    name = "sudoku4x4"

    def __init__(
        self,
        *,
        min_empty: int = 4,
        max_empty: int = 8,
        style: str = "text",
        format_reward: float = 0.1,
        seed: int = 0,
    ) -> None:
        integer("min_empty", min_empty, 1, 12)
        if integer("max_empty", max_empty, 1, 12) < min_empty:
            raise ArgumentError(
                "max_empty", max_empty, f"is below task.args.min_empty={min_empty}."
            )
        self._short = one_of("style", style, ("short", "text")) == "short"
        self._format_reward = share("format_reward", format_reward)
        self._empties = range(min_empty, max_empty + 1)
        super().__init__(
            {str(e): len(RELABELLINGS) * len(unique_puzzles(e)) for e in self._empties}, seed
        )

    def problem(self, stratum: int, rank: int) -> Item:
        place, relabelling = divmod(rank, len(RELABELLINGS))
        grid_index, clues = map(int, unique_puzzles(self._empties[stratum])[place])
        labels = str.maketrans("1234", "".join(RELABELLINGS[relabelling]))
        grid = reduced_grids()[grid_index].translate(labels)
        puzzle = _rows("".join(c if clues >> i & 1 else "." for i, c in enumerate(grid)))
        question = f"{puzzle}=" if self._short else TEXT.format(puzzle=puzzle)
        return Item("", question, _rows(grid), {"puzzle": puzzle})

    def grade(self, item: Item, response: str) -> Grade:
        text = response.strip() if self._short else tagged_answer(response) or ""
        filled = re.sub(r"\s+", "", text)
        well_formed = re.fullmatch(r"[1-4]{4}(/[1-4]{4}){3}", filled) is not None
        empty = [i for i, c in enumerate(item.meta["puzzle"]) if c == "."]
        right = sum(filled[i] == item.answer[i] for i in empty) if well_formed else 0
        return weighted(
            filled == item.answer,
            well_formed,
            self._format_reward,
            answer=filled,
            cells=right / len(empty),
        )

    def worked_answer(self, item: Item) -> str | None:
        return item.answer if self._short else f"<answer>{item.answer}</answer>"

    def alphabet(self) -> str | None:
        return "1234./=" if self._short else None


def _rows(cells: str) -> str:
    return "/".join(cells[i : i + 4] for i in range(0, 16, 4))


@cache
def reduced_grids() -> list[str]:
    """The 12 solved grids whose first row is 1234; relabelling the digits gives all 288."""
    grids = ["1234"]
    for _ in range(3):
        grids = [g + "".join(row) for g in grids for row in RELABELLINGS if _fits(g + "".join(row))]
    return grids


def _fits(cells: str) -> bool:
    rows = len(cells) // 4
    columns = [cells[c::4] for c in range(4)]
    boxes = [
        cells[r * 4 + c :][:2] + cells[r * 4 + 4 + c :][:2]
        for r in range(0, rows - 1, 2)
        for c in (0, 2)
    ]
    return all(len(set(part)) == len(part) for part in columns + boxes)


@cache
def unique_puzzles(empty: int) -> np.ndarray:
    """[N, 2] int64: (reduced grid, bit mask of its clue cells) of every puzzle with one solution.

    Clues determine a grid iff they hit every set of cells in which it differs from another grid.
    """
    relabellings = [str.maketrans("1234", "".join(labels)) for labels in RELABELLINGS]
    everything = [grid.translate(labels) for grid in reduced_grids() for labels in relabellings]
    masks = np.array(
        [sum(1 << i for i in clues) for clues in combinations(range(16), 16 - empty)],
        dtype=np.int64,
    )
    found = []
    for index, grid in enumerate(reduced_grids()):
        differences = {
            sum(1 << i for i in range(16) if grid[i] != other[i]) for other in everything
        } - {0}
        keep = np.ones(len(masks), dtype=bool)
        for difference in differences:
            if not any(d & difference == d and d != difference for d in differences):
                keep &= (masks & difference) != 0
        found.append(np.stack([np.full(keep.sum(), index, dtype=np.int64), masks[keep]], axis=1))
    return np.concatenate(found)
