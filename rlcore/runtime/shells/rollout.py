"""A rollout actor's process."""

from __future__ import annotations

import os
import time
from typing import Any

from rlcore.errors import UserError
from rlcore.types import OnPublish, Request, Trajectory, WeightManifest

SUBMIT_TIMEOUT_S = 600.0  # an engine thread that has not taken a command by then is stuck


class RolloutShell:
    """A vLLM engine in this process, stepped by the worker's own thread; calls only queue work or read state."""

    def __init__(self, scorer: Any, transport: str, transport_folder: str) -> None:
        self._scorer, self._transport, self._folder = scorer, transport, transport_folder
        self._open: set[str] = set()  # ids of requests taken and not finished; each change is one atomic operation

    def start(self, engine: dict[str, Any]) -> int:
        from rlcore.rollout.vllm_engine import VllmEngine
        from rlcore.rollout.worker import RolloutWorker
        from rlcore.runtime.weights import make_transport

        self.engine = VllmEngine(**engine)
        self.worker = RolloutWorker(self.engine, self._finished)
        self.transport: Any = make_transport(self._transport, self._folder)
        return os.getpid()

    def _finished(self, trajectories: list[Trajectory]) -> None:
        self._scorer.submit.remote(trajectories)
        self._open -= {t.request_id for t in trajectories}

    def join(self, host: str, port: int, rank: int, world_size: int, timeout_s: float) -> None:
        """Join the broadcast group that weights travel through."""
        from rlcore.runtime.weights import join_group

        self.transport = join_group(self._transport, host, port, rank, world_size, timeout_s)

    def submit(self, requests: list[Request]) -> None:
        """Queue requests; a list enters the engine as one. Raises UserError for what the engine cannot serve."""
        self._open |= {r.request_id for r in requests}
        try:
            self.worker.submit(requests).result(timeout=SUBMIT_TIMEOUT_S)
        except ValueError as e:
            raise UserError(f"a rollout actor refused a request: {e}") from e

    def abort(self, request_ids: list[str]) -> bool:
        self.worker.abort(request_ids)
        self._open -= set(request_ids)
        return True

    def open_requests(self) -> list[str]:
        """Requests taken and not finished."""
        return list(self._open)

    def update_weights(
        self, manifest: WeightManifest, handle: Any, on_publish: OnPublish, timeout_s: float
    ) -> dict[str, float]:
        """Receive, load between two engine steps, and prove arrival. Returns seconds of each part."""
        start = time.monotonic()
        tensors = self.transport.receive(manifest, handle)
        received = time.monotonic()
        loading = self.worker.update_weights(
            manifest.version, tensors, on_publish, manifest=manifest, timeout_s=timeout_s
        )
        return {"receive_s": received - start, **loading.result(timeout=timeout_s)}

    def stamp(self, version: int, timeout_s: float) -> dict[str, float]:
        """Note a new version of the policy; the weights of a frozen draft stay."""
        start = time.monotonic()
        self.worker.stamp(version).result(timeout=timeout_s)
        return {"receive_s": 0.0, "stop_s": time.monotonic() - start, "drain_s": 0.0}

    def status(self) -> dict[str, Any]:
        """The worker's counters, with the process's memory."""
        import psutil

        return {**self.worker.status(), "pid": os.getpid(), "rss": psutil.Process().memory_info().rss}

    def close(self) -> None:
        self.worker.close()
