"""Run checkpoints: when one is due, its state between two steps, and the writing of it while
training continues, in the one thread that writes to the disk."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from shutil import copyfile
from typing import Any, TypeVar

from rlcore.errors import DeadlineExceeded, OwnershipLost, RoleLost, StageError
from rlcore.files import replace_file
from rlcore.loop import checkpoint
from rlcore.loop.role_protocols import Clients
from rlcore.loop.run_plan import Progress
from rlcore.loop.specs import CheckpointSpec
from rlcore.loop.timing import now

T = TypeVar("T")
POLL_S = 0.02


class Disk(Executor):
    """Runs each job in its own thread that ends with the process: unlike in a thread pool, one that
    hangs keeps neither later jobs nor the exit waiting."""

    def __init__(self) -> None:
        self._running = 0
        self._lock = threading.Lock()

    @property
    def running(self) -> int:
        """Jobs that have not ended, including abandoned ones."""
        return self._running

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Start a job."""
        future: Future[T] = Future()
        with self._lock:
            self._running += 1

        def work() -> None:
            result, error = None, None
            try:
                result = fn(*args, **kwargs)
            except BaseException as e:  # passed to the waiter, as by any executor
                error = e
            # first: a waiter that sees the result must not see the job running
            with self._lock:
                self._running -= 1
            if error is None:
                future.set_result(result)  # type: ignore[arg-type]
            else:
                future.set_exception(error)

        threading.Thread(target=work, name="disk", daemon=True).start()
        return future

    async def idle(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` of real time; return whether every job has ended."""
        deadline = time.monotonic() + timeout_s
        while self._running and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
        return not self._running

    async def run(self, job: Callable[[], T], *, timeout_s: float, what: str) -> T:
        """A job's result. Raises DeadlineExceeded after `timeout_s`; the job may go on."""
        running = asyncio.get_running_loop().run_in_executor(self, job)
        # not wait_for: it would cancel a job that has begun, and lose what it raises
        done, _ = await asyncio.wait([running], timeout=timeout_s)
        if not done:
            running.add_done_callback(lambda late: late.cancelled() or late.exception())
            raise DeadlineExceeded(f"the disk took more than {timeout_s:g} s to {what}")
        return running.result()

    def leave(self, job: Callable[[], object]) -> None:
        """Run a job in the background and ignore its errors."""
        running = asyncio.get_running_loop().run_in_executor(self, job)
        running.add_done_callback(lambda ended: ended.cancelled() or ended.exception())


COST_SHARE = 0.02  # of the time between two checkpoints that a run may stand still for one


class CheckpointPace:
    """Decides when a checkpoint is due, and measures what each one costs.

    Time is the event loop's (`timing.now`).
    """

    def __init__(self, spec: CheckpointSpec, note: Callable[[str], None]) -> None:
        self.interval_s = spec.every_s  # grows where one checkpoint costs more than COST_SHARE
        self._every = spec.every
        self._note = note
        self._since = 0.0  # when the last one was taken, or the run began
        self._standstill_s = 0.0  # since the last `take_standstill_s`

    def begin(self) -> None:
        """Start the time to the first checkpoint."""
        self._since = now()

    def due_by_steps(self, step: int) -> bool:
        """Return whether `checkpoint.every` divides `step`."""
        return bool(self._every) and step % self._every == 0

    def due_by_time(self) -> bool:
        """Return whether the last checkpoint was taken at least `interval_s` ago."""
        return bool(self.interval_s) and now() - self._since >= self.interval_s

    @contextlib.contextmanager
    def taking(self) -> Iterator[None]:
        """A context around everything that training stands still for. The interval grows if that
        took too long."""
        begun = now()
        try:
            yield
        finally:
            self._since = now()
            self._spent(self._since - begun)

    def _spent(self, seconds: float) -> None:
        self._standstill_s += seconds
        if 0 < self.interval_s < seconds / COST_SHARE:
            # by half at least: checkpoints of a growing run are each a little slower
            self.interval_s = max(seconds / COST_SHARE, 1.5 * self.interval_s)
            self._note(
                f"training stood still for {seconds:.1f} s for a checkpoint: those by time come "
                f"every {self.interval_s:.0f} s from now on, so that they cost at most "
                f"{COST_SHARE:.0%} of the run (checkpoint.every_s)"
            )

    def take_standstill_s(self) -> float:
        """Seconds that training stood still for checkpoints since the last call."""
        seconds, self._standstill_s = self._standstill_s, 0.0
        return seconds


FOLDER_S = 10.0  # to make an empty folder, for which the run stands still


@dataclass(frozen=True, slots=True)
class CheckpointRequest:
    """The loop's own part of a checkpoint.

    Example: CheckpointRequest(Progress(step=5), {"cursor": 80}, False)
    """

    progress: Progress
    prompts: Mapping[str, Any]  # state of the prompt source
    in_phase: bool  # the step is in the middle of an update phase
    awaited: int | None = None  # the version whose evaluation is running

    def state(self) -> dict[str, Any]:
        """As JSON. A resume finds no evaluation under way: one that is due is started again."""
        progress = asdict(self.progress)
        if self.awaited is not None:
            progress["evaluated"] = -1
        return {"progress": progress, "prompts": dict(self.prompts)}


def _unguarded() -> None:
    """No guard: the folder has no owner."""


class Saver:
    """Makes checkpoints in a run's folder of them, one at a time.

    A disk that is full, slow or hung costs a checkpoint, which is noted in one line, and the run
    continues; only its last checkpoint must succeed.
    """

    def __init__(
        self,
        spec: CheckpointSpec,
        root: Path,
        facts: Mapping[str, Any],
        *,
        note: Callable[[str], None],
        is_accuracy: Callable[[str], bool],
        guard: Callable[[], None] = _unguarded,
    ) -> None:
        """`facts`: further facts that a checkpoint records (model_path, seed). `is_accuracy`:
        whether a metric is one that `keep_best` is likely to mean. `guard`: raises OwnershipLost
        once the run's folder is another command's."""
        self._spec = spec
        self._root = root
        self._facts = dict(facts)
        self._note = note
        self._is_accuracy = is_accuracy
        self._guard = guard
        self._disk = Disk()
        self._removing = Disk()  # a slow removal holds no checkpoint up
        self._writing: asyncio.Task[None] | None = None
        self._removal: asyncio.Future[None] | None = None
        self._newest = checkpoint.newest_name(root)
        self._unsaved = 0  # in a row
        self._refusals = 0  # of the session

    @property
    def newest_step(self) -> int:
        """The step of the newest checkpoint; 0: none."""
        return checkpoint.step_of(Path(self._newest)) if self._newest != "none" else 0

    @property
    def busy(self) -> bool:
        """True if a checkpoint is being written."""
        return self._writing is not None and not self._writing.done()

    async def begin(self, clients: Clients, cut: CheckpointRequest, *, last: bool = False) -> None:
        """Snapshot the state of all processes, which must not change meanwhile, and start writing
        it. The `last` one waits a moment for pending work of the disk, such as the removal of an
        earlier, unfinished one."""
        stack, step = ExitStack(), cut.progress.step
        state = cut.state() | self._facts

        def new_folder() -> Path:
            self._guard()
            return stack.enter_context(checkpoint.new_checkpoint(self._root, step))

        try:
            if not await self._disk.idle(FOLDER_S if last else 0.0):
                raise DeadlineExceeded("the disk has not ended what it was asked for before")
            what = "make the folder of a checkpoint"
            folder = await self._disk.run(new_folder, timeout_s=FOLDER_S, what=what)
        except (OSError, DeadlineExceeded, OwnershipLost) as e:
            self._writing = asyncio.create_task(_failed(e))
            return
        try:
            await clients.learner.save(str(folder / "learner"), in_phase=cut.in_phase)
            await clients.buffer.snapshot()
        except BaseException as e:
            self._abandon(stack, e)
            raise
        self._writing = asyncio.create_task(
            self._write(clients, folder, state, stack, awaited=cut.awaited)
        )

    async def _write(
        self,
        clients: Clients,
        folder: Path,
        state: dict[str, Any],
        stack: ExitStack,
        *,
        awaited: int | None,
    ) -> None:
        limit = self._spec.write_timeout_s
        try:
            await clients.buffer.save(str(folder / "buffer"), timeout_s=limit)
            await clients.learner.saved(timeout_s=limit)
        except BaseException as e:
            self._abandon(stack, e)
            raise
        progress = state["progress"]
        name = checkpoint.name_of(progress["step"])

        def seal() -> None:
            with stack:  # removes the folder if it cannot be sealed
                self._guard()
                with suppress(OSError):  # a run goes on without its rows
                    copyfile(self._root.parent / checkpoint.ROWS, folder / checkpoint.ROWS)
                replace_file(folder / checkpoint.STATE, json.dumps(state, indent=1))

        what = f"seal the checkpoint (checkpoint.write_timeout_s={limit:g})"
        await self._disk.run(seal, timeout_s=limit, what=what)
        self._newest = name
        self._remove(progress, awaited)

    def _remove(self, progress: Mapping[str, Any], awaited: int | None) -> None:
        """Remove older checkpoints, in the background: they only take space, and the next removal
        takes any that are left."""
        if self._removing.running:
            return
        spec, newest = self._spec, self._root / self._newest
        self._removal = asyncio.get_running_loop().run_in_executor(
            self._removing,
            lambda: checkpoint.prune(
                self._root,
                spec,
                progress["scores"],
                newest=newest,
                awaited=awaited,
                alarm=progress["alarm"],
            ),
        )
        self._removal.add_done_callback(self._removed)

    def _removed(self, removal: asyncio.Future[None]) -> None:
        if removal.cancelled() or (error := removal.exception()) is None:
            return
        self._note(
            f"old checkpoints could not be removed ({error}): they stay in {self._root} until the "
            f"next one is written (checkpoint.keep={self._spec.keep})"
        )

    def _abandon(self, stack: ExitStack, why: BaseException) -> None:
        """Have the written part of a checkpoint removed."""
        self._disk.leave(lambda: stack.__exit__(type(why), why, why.__traceback__))

    async def done(self, *, last: bool = False) -> None:
        """Wait for the checkpoint being written, after the `last` one also a moment for the removal
        of older ones. Raises StageError if it is the `last` one and the disk refused it."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            await writing
        except (RoleLost, OwnershipLost):
            raise
        except (OSError, StageError, DeadlineExceeded) as e:  # also for a disk that is only slow
            self._refused(e, last)
            return
        if self._unsaved:
            self._note(
                f"the checkpoint is written again, after {self._unsaved} that could not be: "
                f"{self._newest}"
            )
        self._unsaved = 0
        if last and self._removal is not None:
            await asyncio.wait([self._removal], timeout=FOLDER_S)

    def _refused(self, error: Exception, last: bool) -> None:
        self._unsaved += 1
        self._refusals += 1
        if last:
            raise StageError(
                f"the last checkpoint could not be written ({error}); the newest is {self._newest}"
            ) from error
        self._note(
            f"a checkpoint could not be written ({error}): the run continues, the newest is "
            f"{self._newest}"
        )

    async def poll(self) -> None:
        """Finish the checkpoint, as `done` does, if it is written already."""
        if self._writing is not None and self._writing.done():
            await self.done()

    def metrics(self) -> dict[str, float]:
        """`checkpoint/*` as of now."""
        return {
            "checkpoint/step": float(self.newest_step),
            "checkpoint/failed": float(self._refusals),
        }

    def skipped(self, step: int) -> None:
        """Note that the checkpoint of `step` is left out, since the one before is still being
        written."""
        self._note(
            f"the checkpoint of step {step} is left out: the one before is still being written"
        )

    def scored(
        self, version: int, results: Mapping[str, float], scores: dict[str, dict[str, float]]
    ) -> None:
        """Note in `scores` (by metric) what an evaluation of `version` says of its checkpoint."""
        best = self._spec.keep_best
        if best is None:
            return
        if best in results:
            scores.setdefault(best, {})[str(version)] = results[best]
            return
        has = ", ".join(sorted(name for name in results if self._is_accuracy(name)))
        self._note(
            f"checkpoint.keep_best={best} is not in the evaluation of version {version}, which has "
            f"{has or 'nothing that could be judged'}"
        )

    def cancel(self) -> None:
        """Abandon the checkpoint being written."""
        if self._writing is not None:
            self._writing.cancel()


async def _failed(error: Exception) -> None:
    raise error
