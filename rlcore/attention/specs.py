"""Settings of block top-k attention, and what follows from them alone. No torch."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from math import ceil
from typing import ClassVar, Literal

from rlcore.spec import Spec, Unread, refuse, setting
from rlcore.types import PageRule

_EVERYWHERE = 2**40  # a position beyond any context
STRETCHES = 32  # most entries of `blocks_by_length`
#: subtracted before rounding a share up, so that 0.1 * 30 gives 3 pages on every device
ROUNDING_SLACK = 1e-9


class SparseSpec(Spec):
    """The selection of pages of keys that each query attends to (METHODS.md, DistillSparse).

    Examples: SparseSpec(block_size=16, blocks=24),
    SparseSpec(blocks_by_length=(29, 61, 93), length_step=2048), as Sparrow's (arXiv 2606.08446)
    """

    unread: ClassVar[tuple[Unread, ...]] = (
        Unread(
            ("length_step",),
            lambda spec: spec.blocks_by_length is None,
            "blocks_by_length is null: the budget does not go by position",
        ),
        Unread(
            ("prompt_block",),
            lambda spec: spec.prompt != "block",
            "prompt is not block: no positions choose together",
        ),
    )

    block_size: int = setting(16, "size of a page", unit="tokens", gt=0)
    blocks: int | None = setting(
        None, "pages each query attends to; the first and its own are always among them", gt=1
    )
    share: float | None = setting(
        None, "instead of blocks: share of the context's pages, rounded up", gt=0, le=1
    )
    blocks_by_length: tuple[int, ...] | None = setting(
        None,
        "instead of blocks: pages by position, an entry for each length_step tokens of the "
        "context, the last from there on; never falling",
        min_length=1,
        max_length=STRETCHES,
    )
    length_step: int = setting(
        1024, "positions that share an entry of blocks_by_length", unit="tokens", gt=0
    )
    prompt: Literal["sparse", "block", "dense"] = setting(
        "sparse",
        "sparse: prompt positions choose their pages as responses do; block: the first of "
        "each prompt_block positions chooses for them all; dense: they attend to all before them",
    )
    prompt_block: int = setting(
        128,
        "positions that choose together, a multiple of block_size",
        unit="tokens",
        gt=0,
        le=4096,
    )

    def check(self, key: str) -> None:
        given = [self.blocks, self.share, self.blocks_by_length]
        refuse(
            sum(budget is not None for budget in given) != 1,
            f"{key}.blocks={self.blocks}, {key}.share={self.share} and {key}.blocks_by_length="
            f"{_shown(self.blocks_by_length)}: give exactly one of them, the budget in pages, as a "
            "share of the context or in pages by position.",
        )
        refuse(
            self.prompt == "block" and self.prompt_block % self.block_size != 0,
            f"{key}.prompt_block={self.prompt_block} must be a multiple of {key}.block_size="
            f"{self.block_size}, so that positions that choose together begin with a page.",
        )
        if self.blocks_by_length is None:
            return
        falls = any(a > b for a, b in pairwise(self.blocks_by_length))
        refuse(
            falls or self.blocks_by_length[0] < 2,
            f"{key}.blocks_by_length={_shown(self.blocks_by_length)} must not fall and must be at "
            "least 2: the first page and the own one are always kept.",
        )
        refuse(
            self.length_step % self.block_size != 0,
            f"{key}.length_step={self.length_step} must be a multiple of {key}.block_size="
            f"{self.block_size}, so that a page has one budget.",
        )

    @property
    def needs_prompts(self) -> bool:
        """True if the pages of a position depend on where the prompt of its sequence ends."""
        return self.prompt != "sparse"

    @property
    def page_share(self) -> float:
        """`share` where the budget is one. Raises RuntimeError otherwise."""
        if self.share is None:
            raise RuntimeError("the budget is a number of blocks, not a share")
        return self.share

    def max_budget(self, pages: int) -> int:
        """The largest budget, in pages, of any query that sees at most `pages` pages."""
        if self.blocks is not None:
            return min(pages, self.blocks)
        if self.blocks_by_length is not None:
            stretch = (pages - 1) * self.block_size // self.length_step
            return min(pages, self.blocks_by_length[min(stretch, len(self.blocks_by_length) - 1)])
        return min(pages, max(2, ceil(pages * self.page_share - ROUNDING_SLACK)))

    @property
    def dense_positions(self) -> int:
        """Positions from the start whose budget covers every page: there the rule equals dense
        attention."""
        if self.blocks is not None:
            return self.blocks * self.block_size
        if self.blocks_by_length is not None:
            return self._dense_by_length(self.blocks_by_length) * self.block_size
        if self.page_share == 1.0:
            return _EVERYWHERE
        pages = 2
        while self.max_budget(pages + 1) > pages:
            pages += 1
        return pages * self.block_size

    def _dense_by_length(self, blocks: tuple[int, ...]) -> int:
        """Pages from the start that a budget by position covers."""
        size = self.length_step // self.block_size
        before = 0
        for budget in blocks[:-1]:
            if budget < before + size:
                return max(budget, before)
            before += size
        return max(blocks[-1], before)

    def under(self, rule: PageRule | None) -> SparseSpec:
        """These settings with the pages that a request was sampled by; None: as they are."""
        return self if rule is None else _under(self, rule)


@lru_cache(maxsize=256)
def _under(spec: SparseSpec, rule: PageRule) -> SparseSpec:
    budget = {"blocks_by_length": rule.blocks, "length_step": rule.length_step}
    return spec.model_copy(update={"blocks": None, "share": None, **budget})


def _shown(blocks: tuple[int, ...] | None) -> str:
    """The text by which a user sets it."""
    return "null" if blocks is None else f"[{','.join(map(str, blocks))}]"
