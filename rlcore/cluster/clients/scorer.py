"""The client of a graders' process."""

from __future__ import annotations

from typing import Any

import ray

from rlcore.cluster.calls import call, get
from rlcore.cluster.jobs import Hosting, ScorerJob
from rlcore.loop.clients import ScorerClient

WHO = "the graders' process"
SAMPLES_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 15.0


class RayScorer(ScorerClient):
    """Answers to evaluations have the deadline of the evaluation. Ray restarts this process and
    repeats calls that it did not answer."""

    def __init__(self, handle: Any, started: Any, hosting: Hosting, job: ScorerJob) -> None:
        """`started`: its answer to `start`, or a reference that is done when it has started."""
        self.handle = handle
        self.starting = [(started, "the graders to start")]
        self._hang_timeout_s = hosting.supervision.hang_timeout_s
        self._evaluation_timeout_s = job.evaluation.timeout_s

    async def _verdicts(self, ref: Any) -> Any:
        limit, key = self._evaluation_timeout_s, "evaluation.timeout_s"
        return await call(ref, timeout_s=limit, what="verdicts", key=key, who=WHO)

    async def evaluation_progress(self, purpose: str) -> int:
        return int(await self._verdicts(self.handle.evaluation_progress.remote(purpose)))

    async def evaluation(self, purpose: str) -> list[dict[str, Any]]:
        return list(await self._verdicts(self.handle.evaluation.remote(purpose)))

    async def evaluation_shown(self, purpose: str, count: int) -> list[dict[str, Any]]:
        return list(await self._verdicts(self.handle.evaluation_shown.remote(purpose, count)))

    async def samples(self, step: int, count: int) -> list[dict[str, Any]]:
        ref = self.handle.samples.remote(step, count, SAMPLES_TIMEOUT_S)
        what, key = "readable samples", "logging.samples_per_step"
        return list(await call(ref, timeout_s=SAMPLES_TIMEOUT_S, what=what, key=key, who=WHO))

    async def pid(self) -> int:
        """Its process; another number means that it was restarted. Raises what stopped scoring."""
        limit, key = self._hang_timeout_s, "cluster.hang_timeout_s"
        ref, what = self.handle.pid.remote(), f"a heartbeat of {WHO}"
        return int(await call(ref, timeout_s=limit, what=what, key=key, who=WHO))

    async def notes(self) -> list[str]:
        """Sentences for the user since the last call, such as of a reward that does not answer."""
        limit, key = self._hang_timeout_s, "cluster.hang_timeout_s"
        ref = self.handle.notes.remote()
        return list(await call(ref, timeout_s=limit, what="notes", key=key, who=WHO))

    def restart(self) -> None:
        """End the process; Ray starts another one."""
        ray.kill(self.handle, no_restart=False)

    def close(self) -> None:
        """End the grading processes. Blocks."""
        get(
            self.handle.close.remote(),
            timeout_s=CLOSE_TIMEOUT_S,
            what="the graders to close",
            key="task.grade_timeout_s",
        )

    def kill(self) -> None:
        """End the process for good."""
        ray.kill(self.handle)
