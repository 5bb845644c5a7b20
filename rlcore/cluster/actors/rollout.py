"""A rollout actor's process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import ray

from rlcore.cluster.delivery import Delivery, Outlets
from rlcore.cluster.jobs import Hosting, RolloutJob
from rlcore.errors import UserError
from rlcore.types import OnPublish, Request, Trajectory, WeightManifest

SUBMIT_TIMEOUT_S = 600.0  # an engine thread that has not taken a command by then is stuck
MAX_UNDELIVERED = 64  # messages in transit to one process above which delivery waits
RECHECK_S = 1.0


class RolloutActor:
    """An engine in this process, stepped by the worker's own thread; calls only queue work or read
    state."""

    def __init__(self, buffer: Any, scorer: Any, hosting: Hosting) -> None:
        self._buffer = buffer
        self._scorer = scorer
        self._hosting = hosting
        self._publish_timeout_s = hosting.schedule.publish_timeout_s
        # ids of requests taken and not delivered; each change is one atomic operation
        self._open: set[str] = set()

    def start(self, job: RolloutJob) -> int:
        from rlcore.cluster.transports import make_transport
        from rlcore.models.text import decode_response, load_tokenizer
        from rlcore.rollout.registry import start_engine
        from rlcore.rollout.worker import RolloutWorker

        tokenizer = load_tokenizer(job.tokenizer_path)
        outlets = Outlets(
            _bounded(self._buffer.add_records.remote),
            _bounded(self._scorer.submit.remote),
            self._delivered,
        )
        self.delivery = Delivery(outlets, lambda ids: decode_response(tokenizer, ids), job.stop)
        self.engine = start_engine(job.engine)
        self.worker = RolloutWorker(self.engine, self.delivery.put)
        self.transport: Any = make_transport(self._hosting)
        return os.getpid()

    def _delivered(self, trajectories: list[Trajectory]) -> None:
        self._open -= {t.request_id for t in trajectories}

    def join(self, host: str, port: int, rank: int, world_size: int) -> None:
        """Join the broadcast group that weights travel through."""
        from rlcore.cluster.transports import join_group

        self.transport = join_group(self._hosting, host, port, rank, world_size)

    def submit(self, requests: list[Request]) -> None:
        """Queue requests; a list enters the engine as one. Raises UserError for what the engine
        cannot serve."""
        self._open |= {r.request_id for r in requests}
        try:
            self.worker.submit(requests).result(timeout=SUBMIT_TIMEOUT_S)
        except ValueError as e:
            raise UserError(f"a rollout actor refused a request: {e}") from e

    def abort(self, request_ids: list[str]) -> None:
        self.worker.abort(request_ids)
        self._open -= set(request_ids)

    def open_requests(self) -> list[str]:
        return list(self._open)

    def update_weights(
        self, manifest: WeightManifest, handle: Any, on_publish: OnPublish
    ) -> dict[str, float]:
        """Receive, load between two engine steps, and verify arrival. Returns seconds of each
        part."""
        limit, start = self._publish_timeout_s, time.monotonic()
        tensors = self.transport.receive(manifest, handle)
        received = time.monotonic()
        loading = self.worker.update_weights(
            manifest.version, tensors, on_publish, manifest=manifest, timeout_s=limit
        )
        return {"receive_s": received - start, **loading.result(timeout=limit)}

    def set_version(self, version: int) -> dict[str, float]:
        """Note a new version of the policy; the weights of a frozen draft stay."""
        start = time.monotonic()
        self.worker.set_version(version).result(timeout=self._publish_timeout_s)
        return {"receive_s": 0.0, "stop_s": time.monotonic() - start, "drain_s": 0.0}

    def status(self) -> dict[str, Any]:
        """The worker's counters, with the process's memory."""
        import psutil

        status = self.worker.status()
        if self.delivery.error is not None:
            status["error"] = status["error"] or f"delivery failed: {self.delivery.error!r}"
        return {**status, "pid": os.getpid(), "rss": psutil.Process().memory_info().rss}

    def close(self) -> None:
        self.worker.close()


def _bounded(send: Callable[[Any], Any]) -> Callable[[Any], None]:
    """A sender that waits while too much of what it sent has not arrived: a slow receiver must not
    fill this process's memory. Refusals are reported by the receiver."""
    sent: list[Any] = []

    def deliver(message: Any) -> None:
        sent.append(send(message))
        while len(sent) > MAX_UNDELIVERED:
            done, _ = ray.wait(sent, num_returns=1, timeout=RECHECK_S)
            for ref in done:
                sent.remove(ref)

    return deliver
