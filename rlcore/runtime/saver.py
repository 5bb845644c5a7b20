"""The run's checkpoints as the controller asks for them: cut between two steps, written while training goes on."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlcore.config.schema import RunConfig
from rlcore.errors import DeadlineExceeded, StageError
from rlcore.metrics.names import is_accuracy
from rlcore.runtime import checkpoint
from rlcore.runtime.cluster import RoleLost
from rlcore.runtime.controller import Controller


class RunSaver:
    """`controller.Saver` over the checkpoints folder of a run directory. One checkpoint at a time.

    What the disk refuses is told in one line, and the run goes on; only its last checkpoint must succeed.
    """

    def __init__(self, config: RunConfig, root: Path, model_path: str, note: Callable[[str], None]) -> None:
        c = config.checkpoint
        self._root, self._model_path, self._seed, self._note = root, model_path, config.seed, note
        self._keep = checkpoint.Retention(c.keep, c.keep_every, c.keep_best, c.best_is)
        self._writing: asyncio.Task[None] | None = None
        self._unsaved = 0  # in a row

    async def begin(self, controller: Controller) -> None:
        step = controller.progress.step
        try:
            folder = checkpoint.begin(self._root, step)
        except OSError as e:
            self._writing = asyncio.create_task(_failed(e))
            return
        await controller.cut_parts(str(folder / "learner"))
        progress, awaited = asdict(controller.progress), controller.evaluator.awaited
        if awaited is not None:
            progress["evaluated"] = -1  # a resume finds no evaluation under way: what is due is started again
        state = {
            "progress": progress,
            "prompts": controller.prompts.state(),
            "model_path": self._model_path,
            "seed": self._seed,
        }
        self._writing = asyncio.create_task(self._write(controller, step, folder, state, awaited))

    async def _write(
        self, controller: Controller, step: int, folder: Path, state: dict[str, Any], awaited: int | None
    ) -> None:
        scores = state["progress"]["scores"]
        try:
            await controller.write_parts(str(folder / "buffer"))
            where = (self._root, step, folder, state)
            await asyncio.to_thread(checkpoint.commit, *where, keep=self._keep, scores=scores, awaited=awaited)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    async def done(self, *, last: bool = False) -> None:
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            await writing
        except RoleLost:
            raise
        except (OSError, StageError, DeadlineExceeded) as e:  # also a disk that is only slow
            self._unsaved += 1
            if last:
                newest = self._newest()
                raise StageError(f"the last checkpoint could not be written ({e}); the newest is {newest}") from e
            self._note(f"a checkpoint could not be written ({e}): the run goes on, the newest is {self._newest()}")
            return
        if self._unsaved:
            self._note(f"the checkpoint is written again, after {self._unsaved} that could not be: {self._newest()}")
        self._unsaved = 0

    def scored(self, version: int, results: Mapping[str, float], scores: dict[str, float]) -> None:
        best = self._keep.best
        if best is None:
            return
        if best in results:
            scores[str(version)] = results[best]
        else:
            has = ", ".join(sorted(name for name in results if is_accuracy(name))) or "nothing that could be judged"
            self._note(f"checkpoint.keep_best={best} is not in the evaluation of version {version}, which has {has}")

    async def poll(self) -> None:
        if self._writing is not None and self._writing.done():
            await self.done()

    def cancel(self) -> None:
        if self._writing is not None:
            self._writing.cancel()

    def _newest(self) -> str:
        return max((f.name for f in self._root.glob("step_*")), default="none")


async def _failed(error: OSError) -> None:
    raise error
