"""Thin Ray actors around the stages. No rule lives here: each method hands plain arguments on.

What can fail at start is done in `start`, not in `__init__`, so that its error reaches the caller as itself.

Data goes rollout shell -> scorer shell -> buffer shell -> learner shells by direct calls; the controller sees counts,
ids and references only.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import ray

from rlcore.errors import StageError, UserError
from rlcore.types import Group, OnPublish, Request, Trajectory, WeightManifest

PHASE_WEIGHTS = "phase_weights.safetensors"
LEARNER_THREADS = {"watch": 1, "files": 1}  # beside the one that computes: heartbeats, waiting for files
SUBMIT_TIMEOUT_S = 600.0  # an engine thread that has not taken a command by then is stuck


class BufferShell:
    """The replay buffer behind an event loop: every method runs alone, waits are long polls with a deadline."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._snapshot: Any = None
        self._taken: dict[int, dict[int, Group]] = {}  # step -> its groups, decoded once for all ranks

    async def start(self, options: dict[str, Any]) -> int:
        from rlcore.buffer.store import ReplayBuffer

        self.buffer = ReplayBuffer(**options)
        return os.getpid()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def add(self, trajectories: Sequence[Trajectory]) -> None:
        """Scored training trajectories from the scorer."""
        self.buffer.add(trajectories)
        await self._notify()

    async def alive(self) -> bool:
        return True

    async def set_versions(self, published: int, learner: int) -> None:
        self.buffer.set_versions(published=published, learner=learner)
        await self._notify()

    async def wait_room(self, timeout_s: float, all_done: bool, total: int) -> int:
        """Groups that may be admitted now, `total` over the whole run; waits up to `timeout_s` for there to be some.

        `all_done` asks that nothing is in flight first: synchronous schedules admit in whole waves, so that which
        samples share an engine step never depends on timing.
        """

        return int(await self._poll(lambda: self._room(all_done, total), timeout_s))

    def _room(self, all_done: bool, total: int) -> int:
        buffer, ledger = self.buffer, self.buffer.ledger
        if all_done and buffer.reissue():
            return 0
        return max(0, min(buffer.room(buffer.published), total - ledger.consumed - len(ledger.live)))

    async def wait_ready(self, step: int, timeout_s: float, wave: int | None) -> bool:
        """True as soon as the batch of `step`, the next one, can be taken.

        `wave`: the groups of the whole run, in synchronous schedules: everything that may be admitted has to be there
        first, so that a phase cut short by the end of a plan begins as a whole one does.
        """

        def ready() -> bool:
            if wave is not None and (self.buffer.reissue() or self._room(False, wave)):
                return False
            return self.buffer.ready(step)

        return bool(await self._poll(ready, timeout_s))

    async def _poll(self, value: Callable[[], Any], timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        async with self._changed:
            while not (now := value()):
                left = deadline - time.monotonic()
                if left <= 0:
                    return now
                try:
                    await asyncio.wait_for(self._changed.wait(), left)
                except TimeoutError:
                    return value()
            return now

    async def admit(self, prompt_ids: list[str]) -> list[int]:
        return self.buffer.admit(prompt_ids, self.buffer.published)

    async def take(self, step: int) -> tuple[list[tuple[int, int]], dict[str, float]]:
        """(group id, response tokens) of the batch for `step`, and the batch's statistics."""
        groups = self.buffer.take(step)
        if groups is None:
            raise StageError(f"the batch of step {step} was asked for before it was ready")
        self._taken[step] = {g.group_id: g for g in groups}
        await self._notify()
        return [(g.group_id, g.tokens) for g in groups], self.buffer.batch_metrics(step)

    async def payload(self, step: int, group_ids: list[int]) -> list[Group]:
        """Taken groups, for a learner rank."""
        return [self._taken[step][g] for g in group_ids]

    async def commit(self, step: int) -> None:
        """The batch of `step` was trained on."""
        self.buffer.commit(step)
        del self._taken[step]
        await self._notify()

    async def in_flight(self) -> dict[int, tuple[str, tuple[int, ...]]]:
        """group id -> (prompt id, sample indices not arrived yet) of the incomplete groups."""
        return {m.group_id: (m.prompt_id, m.sample_indices) for m in self.buffer.reissue()}

    async def waiting_for(self, step: int) -> str:
        return self.buffer.waiting_for(step)

    async def metrics(self) -> dict[str, float]:
        """Counts for a metrics row; also checks that every account matches."""
        self.buffer.check()
        return self.buffer.metrics()

    async def samples(self, step: int, n: int) -> list[Trajectory]:
        return self.buffer.peek(step, n)

    async def snapshot(self) -> None:
        """Fix what `save` will write, by reference."""
        self._snapshot = self.buffer.snapshot()

    async def save(self, folder: str) -> None:
        """Write the snapshot, beside whatever else is asked."""
        from rlcore.buffer.journal import save

        snapshot, self._snapshot = self._snapshot, None
        await asyncio.to_thread(save, folder, snapshot)

    async def load(self, folder: str) -> None:
        from rlcore.buffer.journal import load

        load(folder, self.buffer)
        await self._notify()


class ScorerShell:
    """Grader processes between rollout and buffer; keeps evaluation verdicts (numbers, not payloads)."""

    def __init__(self, buffer: str, options: dict[str, Any], tokenizer_path: str) -> None:
        self._buffer, self._options, self._tokenizer_path = ray.get_actor(buffer), options, tokenizer_path
        # purpose -> (group id, sample index) -> verdict; keyed, because a reissued request may answer twice
        self._evals: dict[str, dict[tuple[int, int], dict[str, Any]]] = defaultdict(dict)
        self._lock = threading.Lock()
        self._forwards: list[Any] = []
        if ray.get_runtime_context().was_current_actor_reconstructed:
            self.start()  # Ray has restarted this process: nobody else will

    def start(self) -> int:
        from rlcore.models import decode_response, load_tokenizer
        from rlcore.tasks.scoring import Scorer

        tokenizer = load_tokenizer(self._tokenizer_path)
        self._decode = lambda ids: decode_response(tokenizer, ids)
        self.scorer = Scorer(**self._options, decode=self._decode, on_scored=self._scored)
        return os.getpid()

    def pid(self) -> int:
        """This process; another number than before means that what it held is lost. Raises what stopped the scoring."""
        self.scorer.check()
        with self._lock:
            sent = self._forwards
            done, self._forwards = ray.wait(sent, num_returns=len(sent), timeout=0) if sent else ([], [])
        ray.get(done)  # the buffer refusing a trajectory is an error of the run
        return os.getpid()

    def submit(self, trajectories: list[Trajectory]) -> None:
        """Unscored trajectories from a rollout shell."""
        self.scorer.submit(trajectories)

    def _scored(self, trajectories: list[Trajectory]) -> None:
        train = [t for t in trajectories if t.purpose == "train"]
        with self._lock:
            for t in trajectories:
                if t.purpose != "train":
                    self._evals[t.purpose][t.group_id, t.sample_index] = self._verdict(t)
            if train:
                self._forwards.append(self._buffer.add.remote(train))

    def _verdict(self, t: Trajectory) -> dict[str, Any]:
        correct = None if t.reward is None else t.reward_parts.get("correct", t.reward)
        return {
            "prompt_id": t.prompt_id,
            "sample": t.sample_index,
            "status": t.score_status,
            "reward": t.reward,
            "correct": correct,
            "length": len(t.response_ids),
            "truncated": t.finish_reason == "length",
            "prompt": self._decode(t.prompt_ids),
            "response": self._decode(t.response_ids),
        }

    def evaluation_progress(self, purpose: str) -> int:
        """Verdicts of one evaluation that have come so far."""
        with self._lock:
            return len(self._evals[purpose])

    def evaluation(self, purpose: str) -> list[dict[str, Any]]:
        """All verdicts of one evaluation, which is then forgotten."""
        with self._lock:
            return list(self._evals.pop(purpose, {}).values())

    def decode(self, trajectories: list[Trajectory]) -> list[dict[str, Any]]:
        """Readable records of trajectories, for samples/."""
        return [
            {
                "prompt_id": t.prompt_id,
                "prompt": self._decode(t.prompt_ids),
                "response": self._decode(t.response_ids),
                "reward": t.reward,
                "score_status": t.score_status,
                "reward_parts": t.reward_parts,
                "finish_reason": t.finish_reason,
                "actor": t.actor_id,
                "actor_kind": t.actor_kind,
                "versions": [int(t.token_version.min(initial=0)), int(t.token_version.max(initial=0))],
                "tokens": len(t.response_ids),
            }
            for t in trajectories
        ]

    def close(self) -> None:
        self.scorer.close()


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


class LearnerShell:
    """One DeepSpeed rank."""

    def __init__(self, buffer: Any, transport: str, transport_folder: str) -> None:
        self._buffer, self._transport, self._folder = buffer, transport, transport_folder
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: list[Future[object]] = []
        self._phase_weights: dict[str, Any] = {}  # rank 0: name -> float32 tensor of what is trained

    def start(self, options: dict[str, Any]) -> int:
        from rlcore.learner.learner import LearnerRank
        from rlcore.runtime.weights import make_transport

        self.rank = LearnerRank(**options)
        self.transport: Any = make_transport(self._transport, self._folder)
        return os.getpid()

    def join(self, host: str, port: int, rank: int, world_size: int, timeout_s: float) -> None:
        """Join the broadcast group that weights travel through."""
        from rlcore.runtime.weights import join_group

        self.transport = join_group(self._transport, host, port, rank, world_size, timeout_s)

    @ray.method(concurrency_group="watch")
    def alive(self) -> bool:
        return True

    def address(self) -> tuple[str, int]:
        """Where rank 0 listens for the others, when ranks may be on several nodes."""
        from rlcore.runtime.cluster import free_port

        host = ray.util.get_node_ip_address()
        return host, free_port(host=host)

    def begin_phase(self, shares: dict[int, list[int]], long: bool, resumed: str | None, timeout_s: float) -> float:
        """Fetch this rank's groups of an update phase (step -> group ids), compute p_ref. Returns seconds of fetching.

        `long`: the phase has several steps, so the weights it begins with are kept for a checkpoint in its middle.
        `resumed`: such a checkpoint; p_ref is computed under the weights kept, then its own are loaded.
        """
        start = time.monotonic()
        refs = [self._buffer.payload.remote(step, ids) for step, ids in sorted(shares.items())]
        steps: list[list[Group]] = ray.get(refs, timeout=timeout_s)
        fetched = time.monotonic() - start
        if resumed is not None:
            self._load_phase_weights(resumed)
        elif long:
            self._phase_weights = self.rank.trained_weights()
        self.rank.begin_phase(steps, first=resumed is None)
        if resumed is not None:
            self.rank.load(resumed, keep_phase=True)
        return fetched

    def _load_phase_weights(self, folder: str) -> None:
        from safetensors.torch import load_file

        self._phase_weights = load_file(os.path.join(folder, PHASE_WEIGHTS))
        self.rank.load_weights(self._phase_weights)

    def train_step(self, step: int) -> dict[str, float]:
        return self.rank.train_step(step)

    def sft_step(self, step: int, examples: list[tuple[list[int], list[int]]]) -> dict[str, float]:
        return self.rank.sft_step(step, examples)

    def publish(self, version: int, dtype: str, full: bool, seed: int, resumed: str | None, copy: bool = False) -> Any:
        """Gather the full weights (all ranks take part); rank 0 returns (manifest, handle), the others None.

        `copy`: those of the sparse copy (DistillSparse), adapters merged. `resumed`: a checkpoint made in the middle of
        a phase; what the phase began with is published.
        """
        from rlcore.weights.manifest import make_manifest

        if resumed is not None:
            self._load_phase_weights(resumed)
        tensors = self.rank.state_for_publish(dtype, copy=copy)
        if self.rank.rank != 0:
            return None
        manifest = make_manifest(version, tensors, full=full, seed=seed)
        return manifest, self.transport.publish(manifest, tensors)

    def follow(self, manifest: WeightManifest, handle: Any) -> None:
        """Take these weights as the frozen policy that KL is taken to (a draft's learner follows the policy)."""
        self.rank.load_frozen(self.transport.receive(manifest, handle))

    def save(self, folder: str, in_phase: bool) -> None:
        """Copy the learner's state to host memory and have it written behind; `saved` tells when it is on disk.

        `in_phase`: with the weights that the running phase began with.
        """
        self._writing = []
        self.rank.save(folder, self._write_behind)
        if in_phase and self.rank.rank == 0:
            from safetensors.torch import save_file

            path = os.path.join(folder, PHASE_WEIGHTS)
            self._write_behind(partial(save_file, self._phase_weights, path))

    def _write_behind(self, job: Callable[[], object]) -> None:
        self._writing.append(self._writer.submit(job))

    @ray.method(concurrency_group="files")
    def saved(self) -> None:
        """Return when everything of the last `save` is written; raises what the disk answered."""
        for job in self._writing:
            job.result()

    def load(self, folder: str) -> None:
        self.rank.load(folder)

    def export(self, folder: str) -> None:
        self.rank.export(folder)
