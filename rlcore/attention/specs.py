"""Settings of block top-k attention, and what follows from them alone. No torch."""

from __future__ import annotations

from math import ceil

from rlcore.spec import Spec, refuse, setting

_EVERYWHERE = 2**40  # a position beyond any context
#: subtracted before rounding a share up, so that 0.1 * 30 gives 3 pages on every device
ROUNDING_SLACK = 1e-9


class SparseSpec(Spec):
    """The selection of pages of keys that each query attends to (METHODS.md, DistillSparse).

    Example: SparseSpec(block_size=16, blocks=24)
    """

    block_size: int = setting(16, "size of a page", unit="tokens", gt=0)
    blocks: int | None = setting(
        None, "pages each query attends to; the first and its own are always among them", gt=1
    )
    share: float | None = setting(
        None, "instead of blocks: share of the context's pages, rounded up", gt=0, le=1
    )
    sparse_prompt: bool = setting(True, "false: prompt positions attend densely")

    def check(self, key: str) -> None:
        refuse(
            (self.blocks is None) == (self.share is None),
            f"{key}.blocks={self.blocks} and {key}.share={self.share}: give exactly one of the "
            "two, the budget in pages or as a share of the context.",
        )

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
        return min(pages, max(2, ceil(pages * self.page_share - ROUNDING_SLACK)))

    @property
    def dense_positions(self) -> int:
        """Positions from the start whose budget covers every page: there the rule equals dense
        attention."""
        if self.blocks is not None:
            return self.blocks * self.block_size
        if self.page_share == 1.0:
            return _EVERYWHERE
        pages = 2
        while self.max_budget(pages + 1) > pages:
            pages += 1
        return pages * self.block_size
