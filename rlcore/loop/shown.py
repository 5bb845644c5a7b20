"""The samples of a phase that people are shown: written when its batch comes, and again with what
the learner's first step said of their tokens."""

from __future__ import annotations

from typing import Any

from rlcore.interfaces import Reporter
from rlcore.loop.clients import Clients

VALUES_KEPT = 4096  # tokens of a sample whose ratios are written


class ShownSamples:
    """At most `count` samples of each update phase."""

    def __init__(self, clients: Clients, reporter: Reporter, count: int) -> None:
        self._scorer = clients.scorer
        self._learner = clients.learner
        self._reporter = reporter
        self._count = count
        self._samples: list[dict[str, Any]] = []
        self._step = 0

    async def fetch(self, first: int) -> None:
        """Show samples of the batch of step `first`, of which nothing else is known yet."""
        if not self._count:
            return
        self._step = first
        self._samples = await self._scorer.samples(first, self._count)
        for sample in self._samples:
            sample["learner_version"] = first
        # also now: if the step fails, these are what one looks at
        self._reporter.samples(first + 1, self._samples)

    async def complete(self) -> None:
        """After the first step on that batch: show them again, with the ratios of their tokens."""
        samples, self._samples = self._samples, []
        if not samples:
            return
        keys = [(s["group_id"], s["sample"]) for s in samples]
        found = await self._learner.log_ratios(keys)
        if not found:
            return
        for key, sample in zip(keys, samples):
            if key in found:
                sample["log_ratio"] = found[key][:VALUES_KEPT]
        self._reporter.samples(self._step + 1, samples)
