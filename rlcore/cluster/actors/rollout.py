"""A rollout actor's process."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import ray

from rlcore.cluster.delivery import Delivery, Outlets
from rlcore.cluster.specs import Hosting
from rlcore.environments.specs import EnvironmentJob
from rlcore.errors import UserError
from rlcore.interfaces import Wake
from rlcore.rollout.specs import EngineJob
from rlcore.rollout.text import TextSettings
from rlcore.serialization import dump_trajectory, load_trajectory
from rlcore.types import OnPublish, Request, Trajectory, WeightManifest, is_turn

if TYPE_CHECKING:
    from rlcore.cluster.teacher_engines import TeacherOutlet
    from rlcore.environments.player import Players

T = TypeVar("T")
SUBMIT_TIMEOUT_S = 600.0  # an engine thread that has not taken a command by then is stuck


class RolloutActor:
    """An engine in this process, stepped by the worker's own thread; calls only queue work or read
    state."""

    def __init__(self, buffer: Any, scorer: Any, hosting: Hosting) -> None:
        """`buffer`: (handle, name). `scorer`: the graders on the driver's node."""
        self._buffer, self._buffer_name = buffer
        self._scorer = scorer
        self._hosting = hosting
        self._publish_timeout_s = hosting.schedule.publish_timeout_s
        # ids of requests taken and not delivered; each change is one atomic operation
        self._open: set[str] = set()

    def start(
        self,
        engine: EngineJob,
        text: TextSettings,
        environments: Sequence[EnvironmentJob] = (),
        teacher: TeacherOutlet | None = None,
    ) -> int:
        """`environments`: of the tasks whose episodes have several turns. `teacher`: scores records
        on their way to the buffer."""
        from rlcore.cluster.clients.scorer import scorer_name
        from rlcore.cluster.delivery import NodeOutlet
        from rlcore.cluster.placement import shard_name
        from rlcore.cluster.transports import make_group, make_transport
        from rlcore.models.folder import read_config
        from rlcore.models.text import decode_response, load_tokenizer
        from rlcore.rollout.specs import start_engine
        from rlcore.rollout.text import PromptEncoder
        from rlcore.rollout.worker import HAND_OVER_S, HAND_OVER_TURNS_S, RolloutWorker

        tokenizer = load_tokenizer(text.tokenizer_path)
        node_id = ray.get_runtime_context().get_node_id()
        graders = scorer_name(self._buffer_name, node_id)
        outlets = Outlets(
            NodeOutlet("add_records", shard_name(self._buffer_name, node_id), self._buffer),
            NodeOutlet("submit", graders, self._scorer),
            NodeOutlet("submit_scored", graders, self._scorer),
            self._delivered,
            teacher,
        )
        decode = partial(decode_response, tokenizer)
        size = int(read_config(engine.policy_path or engine.model_path)["vocab_size"])
        self.delivery = Delivery(outlets, decode, text.stop, text.in_pieces, text.raw, size)
        self.prompts = PromptEncoder(load_tokenizer(text.tokenizer_path), text)
        self.engine = start_engine(engine)
        self.players = self._players(engine, text, environments)
        finished = self.players.finished if self.players else self.delivery.put
        interval = HAND_OVER_TURNS_S if self.players else HAND_OVER_S
        turns = self.players is not None
        self.worker = RolloutWorker(self.engine, finished, interval, turns=turns)
        if self.players:
            self.players.start(self.worker)
        joined = self._hosting.transport.joined
        self.transport: Any = None if joined else make_transport(self._hosting)
        self.receiver: Any = make_group(self._hosting).receiver() if joined else None
        if engine.sleeps:  # the learner's rank on this GPU starts next
            self.sleep()
        return os.getpid()

    def _players(
        self, engine: EngineJob, text: TextSettings, environments: Sequence[EnvironmentJob]
    ) -> Players | None:
        from rlcore.environments.player import Exits, Players
        from rlcore.models.text import load_tokenizer

        if not environments:
            return None
        actor = engine.actor_id, engine.actor.reported_kind
        exits = Exits(self.delivery.put, self.delivery.put)
        tokenizers = [load_tokenizer(text.tokenizer_path) for _ in environments]
        return Players(environments, tokenizers, actor, exits)

    def _delivered(self, trajectories: list[Trajectory]) -> None:
        self._open -= {t.request_id for t in trajectories}

    def submit(self, requests: list[Request], begun: Sequence[bytes] = ()) -> None:
        """Queue requests; a list enters the engine as one. Raises UserError for what the engine
        cannot serve. `begun`: their records that `cut` of another actor returned."""
        self._open |= {r.request_id for r in requests}
        requests = self.prompts.encoded(requests)
        if self.players is not None:
            self.players.submit([r for r in requests if self.players.plays(r)])
            requests = [r for r in requests if not self.players.plays(r)]
        earlier = [load_trajectory(record) for record in begun]
        try:
            self.worker.submit(requests, earlier).result(timeout=SUBMIT_TIMEOUT_S)
        except ValueError as e:
            raise UserError(f"a rollout actor refused a request: {e}") from e

    def abort(self, request_ids: list[str]) -> None:
        if self.players is not None:
            self.players.abort(request_ids)
        self.worker.abort(request_ids)
        self._open -= set(request_ids)

    def cut(self, request_ids: list[str]) -> tuple[list[str], list[bytes]]:
        """Drop requests: (ids of the unfinished ones, their records so far). Episodes stay, since
        their environments are in this process."""
        cut = self.worker.cut(request_ids).result(timeout=SUBMIT_TIMEOUT_S)
        ids = [t.request_id for t in cut]
        self._open -= set(ids)
        return ids, [dump_trajectory(t) for t in cut]

    def open_requests(self) -> list[str]:
        return list(self._open)

    def update_weights(
        self, manifest: WeightManifest, handle: Any, on_publish: OnPublish
    ) -> dict[str, float]:
        """Receive, load between two engine steps, and verify arrival. Returns seconds of each
        part."""
        from rlcore.weights.adapters import receive
        from rlcore.weights.stream import announced

        limit = self._publish_timeout_s
        waited = Waited(receive(self.transport, manifest, handle))
        loading = self.worker.update_weights(
            manifest.version,
            announced(manifest, waited),
            on_publish,
            manifest=manifest,
            timeout_s=limit,
        )
        took = loading.result(timeout=limit)
        return {"receive_s": waited.seconds, **took}

    def prepare_weights(self, manifest: WeightManifest, on_publish: OnPublish) -> None:
        """Group transports: return when the engine has stopped for a publication, so that the
        learner may send it."""
        from rlcore.weights.arrival import Arrival
        from rlcore.weights.stream import announced

        limit = self._publish_timeout_s
        self._arrival = arrival = Arrival(limit)
        buckets = self.receiver.buckets(manifest, arrival)
        self._loading = self.worker.update_weights(
            manifest.version,
            announced(manifest, buckets),
            on_publish,
            manifest=manifest,
            timeout_s=limit,
        )
        either: list[Future[Any]] = [arrival.reached, self._loading]
        wait(either, timeout=limit, return_when=FIRST_COMPLETED)
        if not arrival.reached.done():
            self._loading.result(timeout=0)

    def transfer(self, verb: str, payload: Any) -> None:
        """Called by the learner's sender: have the engine's thread carry out a request before it
        goes on."""
        self._arrival.ask(verb, payload)

    def finish_weights(self) -> dict[str, float]:
        """Return when the engine has proven the weights that it was sent, and goes on; seconds of
        each part."""
        took = self._loading.result(timeout=self._publish_timeout_s)
        return {"receive_s": self._arrival.seconds, **took}

    def set_version(self, version: int) -> dict[str, float]:
        """Note a new version of the policy; the weights of a frozen draft stay."""
        start = time.monotonic()
        self.worker.set_version(version).result(timeout=self._publish_timeout_s)
        return {"receive_s": 0.0, "stop_s": time.monotonic() - start, "drain_s": 0.0}

    def sleep(self) -> dict[str, float]:
        """Free the engine's memory and decode nothing until it is awake; seconds and GiB."""
        start = time.monotonic()
        freed = self.worker.sleep().result(timeout=self._publish_timeout_s)
        return {"sleep_s": time.monotonic() - start, "freed_gib": freed / 2**30}

    def wake(self, what: Wake) -> dict[str, float]:
        """Take the engine's memory back, for "weights" or "all"; seconds."""
        start = time.monotonic()
        self.worker.wake(what).result(timeout=self._publish_timeout_s)
        return {"wake_s": time.monotonic() - start}

    def status(self) -> dict[str, Any]:
        """The worker's counters, with the process's memory."""
        import psutil

        status = self.worker.status()
        if self.delivery.error is not None:
            status["error"] = status["error"] or f"delivery failed: {self.delivery.error!r}"
        if self.players is not None:
            if self.players.error is not None:
                status["error"] = status["error"] or f"playing failed: {self.players.error!r}"
            # episodes have a deadline of their own, and cannot move to another actor
            decoding = {i: s for i, s in status["decoding_s"].items() if not is_turn(i)}
            status = {**status, "playing": self.players.status(), "decoding_s": decoding}
        return {**status, "pid": os.getpid(), "rss": psutil.Process().memory_info().rss}

    def close(self) -> None:
        if self.players is not None:
            self.players.close()
        self.worker.close()


class Waited(Generic[T]):
    """An iterable that counts the seconds spent waiting for its next item."""

    def __init__(self, items: Iterable[T]) -> None:
        self._items = items
        self.seconds = 0.0

    def __iter__(self) -> Iterator[T]:
        items, over = iter(self._items), object()
        while True:
            begun = time.monotonic()
            item = next(items, over)
            self.seconds += time.monotonic() - begun
            if item is over:
                return
            yield item  # type: ignore[misc]
            del item
