"""An actor that decodes at given rates. Its clock goes from one event to the next, not from token
to token."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import numpy as np

from rlcore.loop.specs import ScheduleSpec, SupervisionSpec
from rlcore.planner.specs import ActorRates
from rlcore.seeding import derive_seed
from rlcore.testing.fake_actors import FakeActor, Speed
from rlcore.testing.fakes import FakeBuffer, FakeScorer
from rlcore.types import OnPublish, Request

LONGEST_S = 5.0  # between two looks at the engine: contexts grow, and heartbeats must not age


class RatedActor(FakeActor):
    """`unit` tokens of a real run are one token here, so that long answers stay cheap to simulate.

    What a published version stops is a decode step that ends first; running requests then have
    their prefixes computed again, unless they were finished before (`schedule.on_publish`).
    """

    def __init__(
        self,
        name: str,
        buffer: FakeBuffer,
        scorer: FakeScorer,
        *,
        rates: ActorRates,
        tokens: Callable[[Request], int],
        limits: tuple[ScheduleSpec, SupervisionSpec],
        unit: int,
        prompt: int,
    ) -> None:
        """`tokens`: how many simulated ones a request samples. `prompt`: real tokens of every
        prompt."""
        self.rates = rates
        self.unit = unit
        self.prompt = prompt
        self._cold: set[str] = set()  # running requests whose keys and values must be computed
        speed = Speed(
            step_s=rates.step_seconds([prompt]) * unit,
            load_s=rates.load_s,
            start_s=rates.start_s,
            max_running=rates.max_running,
        )
        super().__init__(name, buffer, scorer, speed=speed, tokens=tokens, limits=limits)

    async def _engine(self) -> None:
        while True:
            self._work.clear()
            if not self._can_step():
                self._stepped_at = self._now()
                await self._work.wait()
                continue
            before = set(self._running)
            self._fill()
            self._cold |= set(self._running) - before
            await self._prefill()
            await self._decode()
            await self._awake.wait()

    async def _prefill(self) -> None:
        """Prompts of what was begun, and prefixes that new weights made stale."""
        cold = [self._running[name] for name in self._cold if name in self._running]
        self._cold.clear()
        tokens = sum(self.prompt + len(d.versions) * self.unit for d in cold)
        if tokens:
            await self._spend(tokens / self.rates.prefill_tokens_per_s)

    async def _decode(self) -> None:
        """Steps until a request ends, or until something reaches the actor."""
        running = list(self._running.values())
        if not running:
            return
        contexts = [self.prompt + len(d.versions) * self.unit for d in running]
        step_s = self.rates.step_seconds(contexts) * self.unit
        version = self.version
        steps = min(d.wanted - len(d.versions) for d in running)
        steps = max(1, min(steps, int(LONGEST_S / step_s)))
        begun, done = self._now(), steps
        if await self._disturbed(steps * step_s):
            # the step that is under way ends before anything else happens
            done = min(steps, max(1, math.ceil((self._now() - begun) / step_s)))
            await asyncio.sleep(max(0.0, begun + done * step_s - self._now()))
        self._busy_s += done * step_s
        self._steps += done
        self._stepped_at = self._now()
        for drawing in running:
            if self._running.get(drawing.request.request_id) is not drawing:
                continue  # withdrawn meanwhile
            drawing.versions += [version] * done
            drawing.decoding_s += done * step_s
            if len(drawing.versions) >= drawing.wanted:
                self._finish(drawing)

    async def _disturbed(self, seconds: float) -> bool:
        """Decode for so long, or until something reaches the actor: whether it did."""
        over: list[bool] = []

        def end() -> None:
            over.append(True)
            self._work.set()

        timer = self._loop().call_later(seconds, end)
        await self._work.wait()
        timer.cancel()
        return not over

    async def _spend(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._busy_s += seconds
        self._stepped_at = self._now()

    async def _stop(self, on_publish: OnPublish) -> None:
        await super()._stop(on_publish)
        self._work.set()

    async def _take(self, version: int) -> dict[str, float]:
        self._cold |= set(self._running)
        return await super()._take(version)

    @property
    def busy_s(self) -> float:
        """Seconds of decoding and of computing prompts so far."""
        return self._busy_s


def answer_length(run_seed: int, request: Request, median: float, spread: float) -> float:
    """Tokens of one answer, log-normal: depends on the request's seed alone."""
    rng = np.random.default_rng(derive_seed(run_seed, "length", request.seed))
    return float(median * math.exp(spread * rng.standard_normal()))


def of_names(name: str) -> str:
    """The label of an actor's name. Example: "fp8-3" -> "fp8"."""
    return name.rpartition("-")[0]
