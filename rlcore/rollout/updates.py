"""Weight updates in the thread that owns an engine: drained first if asked, one at a time."""

from __future__ import annotations

import time
from collections.abc import Callable

from rlcore.errors import DeadlineExceeded
from rlcore.interfaces import RolloutEngine
from rlcore.rollout.commands import Update, fail, settle
from rlcore.rollout.counters import Counters
from rlcore.weights.manifest import verify_checksums


class Updates:
    """Applies updates to the engine. `before_load` is called while the old weights still serve."""

    def __init__(
        self, engine: RolloutEngine, counters: Counters, before_load: Callable[[], None]
    ) -> None:
        self._engine = engine
        self._counters = counters
        self._before_load = before_load
        self._draining: Update | None = None

    @property
    def draining(self) -> bool:
        """Whether an update waits for running requests to finish."""
        return self._draining is not None

    def begin(self, update: Update) -> None:
        """Apply an update, at once or, with on_publish=finish, when running requests are done."""
        update.begun = time.monotonic()
        if update.on_publish == "finish":
            self._engine.begin_drain()
            self._draining = update
            self.advance()
        else:
            self._apply(update)

    def advance(self) -> None:
        """Apply the waiting update if the engine has drained; fail it after its timeout."""
        update = self._draining
        if update is None:
            return
        waited = time.monotonic() - update.begun
        if self._engine.drained():
            self._draining = None
            self._counters.drain_s += waited
            self._apply(update)
        elif waited > update.timeout_s:
            self._draining = None
            self._engine.end_drain()
            update.future.set_exception(
                DeadlineExceeded(
                    f"waited {waited:.1f} s for running requests to finish before version "
                    f"{update.version} (schedule.on_publish=finish, schedule.publish_timeout_s)"
                )
            )

    def _apply(self, update: Update) -> None:
        self._before_load()
        self._counters.loading_until = time.monotonic() + update.timeout_s
        try:
            settle(update.future, lambda: self._load(update))
        finally:
            self._counters.loading_until = 0.0
            self._counters.heartbeat = time.monotonic()

    def _load(self, update: Update) -> dict[str, float]:
        begun = time.monotonic()
        try:
            self._engine.update_weights(update.version, update.weights, update.on_publish)
        finally:
            self._engine.end_drain()  # also after a refused update: the old weights stay in use
        if update.manifest is not None:
            verify_checksums(update.manifest, self._engine.checksums(update.manifest.checksums))
        stop_s = time.monotonic() - begun
        self._counters.update_stop_s += stop_s
        self._counters.updates += 1
        self._counters.version = update.version
        return {"stop_s": stop_s, "drain_s": begun - update.begun}

    def end(self, error: BaseException) -> None:
        """Fail the update that waits, if any."""
        if self._draining is not None:
            fail(self._draining.future, error)
            self._draining = None
