"""Time as the loop sees it: the event loop's clock, so that a simulated clock can drive every
wait."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field


def now() -> float:
    """Seconds on the clock of the running event loop; only differences are meaningful."""
    return asyncio.get_running_loop().time()


@dataclass(slots=True)
class Clocks:
    """Seconds of one step, by what they were spent on. Example: Clocks({"learn": 1.5})"""

    parts: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the duration of the block to a part."""
        start = now()
        try:
            yield
        finally:
            self.parts[name] = self.parts.get(name, 0.0) + now() - start
