"""The run's checkpoints as the controller asks for them: cut between two steps, written while training goes on."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlcore.config.schema import RunConfig
from rlcore.errors import StageError
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
        state = {
            "progress": asdict(controller.progress),
            "prompts": controller.prompts.state(),
            "model_path": self._model_path,
            "seed": self._seed,
            "metrics": dict(controller.latest),
        }
        self._writing = asyncio.create_task(self._write(controller, step, folder, state))

    async def _write(self, controller: Controller, step: int, folder: Path, state: dict[str, Any]) -> None:
        try:
            await controller.write_parts(str(folder / "buffer"))
            await asyncio.to_thread(checkpoint.commit, self._root, step, folder, state, keep=self._keep)
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
        except (OSError, StageError) as e:
            self._unsaved += 1
            if last:
                newest = self._newest()
                raise StageError(f"the last checkpoint could not be written ({e}); the newest is {newest}") from e
            self._note(f"a checkpoint could not be written ({e}): the run goes on, the newest is {self._newest()}")
            return
        if self._unsaved:
            self._note(f"the checkpoint is written again, after {self._unsaved} that could not be: {self._newest()}")
        self._unsaved = 0

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
