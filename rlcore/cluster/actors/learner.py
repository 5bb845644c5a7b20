"""A learner rank's process, and the thread that writes its files while training goes on."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import ray

from rlcore.cluster.specs import Hosting
from rlcore.errors import DeadlineExceeded
from rlcore.learner.sequences import ScoredSequence
from rlcore.learner.specs import LearnerJob, RankPlace
from rlcore.references import ShardLost
from rlcore.serialization import StoredGroup, load_group
from rlcore.types import POLICY, Group, WeightManifest
from rlcore.weights.sending import Receivers, Sending

if TYPE_CHECKING:
    from rlcore.cluster.recordings import Recorder
    from rlcore.weights.group import GroupSender

Job = Callable[[], object]


class WriteBehind:
    """The jobs of one checkpoint, done in order in a thread that ends with the process.

    After an error, or once `wait` has given up, the jobs that have not begun are dropped, and with
    them the memory they hold.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._ended: Future[None] = Future()
        self._given_up = False
        threading.Thread(target=self._work, name="checkpoint", daemon=True).start()

    @property
    def running(self) -> bool:
        """True while a write is in progress."""
        return not self._ended.done()

    def put(self, job: Job) -> None:
        """Queue a job."""
        self._jobs.put(job)

    def close(self) -> None:
        """Note that no further job comes."""
        self._jobs.put(None)

    def _work(self) -> None:
        error: BaseException | None = None
        while (job := self._jobs.get()) is not None:
            if error is not None or self._given_up:
                continue
            try:
                job()
            except BaseException as e:  # raised by `wait`
                error = e
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)

    def wait(self, timeout_s: float) -> None:
        """Return when everything is written, after `close`. Raises a job's error, and
        DeadlineExceeded after `timeout_s`."""
        try:
            self._ended.exception(timeout_s)
        except TimeoutError as e:
            self._given_up = True
            raise DeadlineExceeded(
                f"the disk took more than {timeout_s:g} s to write the learner's state "
                f"(checkpoint.write_timeout_s={timeout_s:g})."
            ) from e
        self._ended.result()


class Discarded(WriteBehind):
    """Replaces a checkpoint that would have to wait for an earlier one: nothing is written."""

    def __init__(self) -> None:
        """Without a thread."""

    @property
    def running(self) -> bool:
        """False: no later checkpoint waits for this one."""
        return False

    def put(self, job: Job) -> None:
        """Drop a job."""

    def close(self) -> None:
        """Nothing."""

    def wait(self, timeout_s: float) -> None:
        """Raises DeadlineExceeded."""
        raise DeadlineExceeded(
            "the learner's disk has not ended what it was asked for at an earlier checkpoint."
        )


PHASE_WEIGHTS = "phase_weights"  # folder of a state
ANSWER_S = 5.0  # that an answer may come after its deadline
LOST_S = 1.0  # between two looks at groups that a lost node had
# Threads beside the one that computes: heartbeats, files, the next batches
LEARNER_THREADS = {"watch": 1, "files": 1, "data": 1}


class LearnerActor:
    """One rank of a learner: the policy's, or of a companion that has its own ranks."""

    def __init__(self, buffer: Any, hosting: Hosting, group: str = POLICY) -> None:
        """`group`: the name that the ranks' own model has among the published sets."""
        self._buffer = buffer
        self._hosting = hosting
        self._group = group
        self._transports: dict[str, Any] = {}  # name of a published set -> its own
        self._joined = hosting.transport.joined
        self._writing: list[WriteBehind] = []  # of the last `save` and of abandoned ones
        self._fetched: dict[int, list[Group]] = {}  # step -> this rank's share of its batch
        self._recorder: Recorder | None = None
        # this rank's part of the trained weights at the beginning of the phase
        self._phase_weights: dict[str, Any] = {}

    def start(self, job: LearnerJob, place: RankPlace) -> int:
        from rlcore.cluster.transports import make_group
        from rlcore.learner.rank import LearnerRank

        self.rank = LearnerRank(job, place)
        self._share = f"{self._group}-{place.rank // job.learner.parts}"
        spec = self._hosting.recorder
        first_of_share = place.rank % job.learner.parts == 0
        if spec and spec.steps and first_of_share:
            from rlcore.cluster.recordings import Recorder

            self._recorder = Recorder(
                self._hosting.run_dir,
                self._share,
                steps=spec.steps,
                most_bytes=spec.max_gib * 2**30,
                pins=place.rank == 0 and self._group == POLICY,
            )
        self._run_seed = job.run_seed
        group = make_group(self._hosting) if self._joined else None
        self.group: Any = group
        self.sender: Any = group.sender(place.rank) if group else None
        return os.getpid()

    @ray.method(concurrency_group="watch")
    def alive(self) -> bool:
        return True

    def shortcuts(self) -> list[str]:
        """Return the verdicts on the shortcuts of this rank's passes, a sentence each."""
        return [str(verdict) for verdict in self.rank.verdicts]

    def address(self, port: int = 0) -> tuple[str, int]:
        """Where rank 0 listens for the others, when ranks may be on several nodes; `port` 0: any
        free one."""
        from rlcore.cluster.placement import free_port

        host = ray.util.get_node_ip_address()
        return host, free_port(port, host)

    # ---- reinforcement learning ------------------------------------------------------------------

    @ray.method(concurrency_group="data")
    def fetch(self, shares: dict[int, list[int]], timeout_s: float) -> None:
        """Fetch this rank's groups of later batches (step -> group ids) while it trains."""
        deadline = time.monotonic() + timeout_s
        for step, ids in shares.items():
            stored = self._read(step, ids, deadline)
            self._fetched[step] = [load_group(group) for group in stored]
            if self._recorder is not None:
                self._recorder.keep(step, stored)

    def fetch_recorded(self, batches: dict[int, int], run_dir: str) -> None:
        """Take this rank's shares of batches from a run's recordings (step -> the step that its
        batch was recorded at). Raises RecordingError."""
        from rlcore.cluster.recordings import folder_of, read_recording

        for step, recorded in batches.items():
            stored = read_recording(folder_of(run_dir, recorded) / f"{self._share}.bin")
            self._fetched[step] = [load_group(group) for group in stored]

    def _read(self, step: int, ids: list[int], deadline: float) -> list[StoredGroup]:
        """Groups with their records, from the shards that keep them. Waits for samples that were
        lost with a node and are drawn again."""
        from rlcore.buffer.shard import with_records
        from rlcore.cluster.clients.shards import fetch_records

        while (left := deadline - time.monotonic()) > 0:
            ref: Any = self._buffer.stored.remote(step, ids, left)
            stored = ray.get(ref, timeout=left + ANSWER_S)
            if stored is None:
                break
            try:
                return with_records(stored, fetch_records)
            except ShardLost:  # the buffer may not know it yet
                time.sleep(LOST_S)
        raise DeadlineExceeded(
            f"the groups of step {step} were not sampled again in time, after a node was lost with "
            "their records (schedule.step_timeout_s)."
        )

    def begin_phase(
        self, steps: list[int], batches: int, keep_start: bool, resumed: str | None
    ) -> None:
        """Compute p_ref for the batches of an update phase, fetched for the first `batches` of its
        steps; the others train on them again.

        `keep_start`: the phase has several steps, so the weights it begins with are kept for a
        checkpoint in its middle. `resumed`: such a checkpoint; p_ref is computed with the kept
        weights, then the checkpoint's weights are loaded.
        """
        fetched = [self._fetched.pop(step) for step in steps[:batches]]
        if resumed is not None:
            self._load_phase_weights(resumed)
        elif keep_start:
            self._phase_weights = self.rank.held_weights()
        self.rank.begin_phase(fetched, steps=len(steps), first=resumed is None)
        if resumed is not None:
            self.rank.load(resumed, keep_phase=True)

    def _load_phase_weights(self, folder: str) -> None:
        from rlcore.learner.state_files import open_state

        with open_state(Path(folder) / PHASE_WEIGHTS) as sources:
            self.rank.load_weights(sources)
        # copied, since the checkpoint may be removed before the next one is written
        self._phase_weights = self.rank.held_weights()

    def train_step(self, step: int) -> dict[str, float]:
        return self.rank.train_step(step)

    def traced_step(
        self, step: int, folder: str | None
    ) -> tuple[dict[str, float], dict[tuple[int, int], Any], dict[str, float]]:
        return self.rank.traced_step(step, folder)

    def sample_details(self, samples: list[tuple[int, int]]) -> dict[tuple[int, int], Any]:
        return self.rank.sample_details(samples)

    def sft_step(self, step: int, examples: Sequence[ScoredSequence]) -> dict[str, float]:
        return self.rank.sft_step(step, examples)

    # ---- weights ---------------------------------------------------------------------------------

    def published(self) -> dict[str, bool]:
        """Names of the sets of weights that these ranks publish, and whether each is an adapter on
        the policy's set."""
        return {name: name in self.rank.over_policy for name in self.rank.published}

    def _transport(self, name: str) -> Any:
        """The transport of one set; with transport=disk sets of one version would otherwise share a
        file."""
        from rlcore.cluster.transports import make_transport

        if name not in self._transports:
            called = self._group if name == POLICY else name
            self._transports[name] = make_transport(self._hosting, called)
        return self._transports[name]

    def publish(
        self, version: int, name: str, dtype: str, full: bool, resumed: str | None
    ) -> tuple[WeightManifest, Any] | None:
        """Gather a set of weights (all ranks take part); rank 0 returns (manifest, handle), the
        others None. Group transports: the set is only announced, and `send` sends it. `resumed`: a
        checkpoint made in the middle of a phase; the phase's first weights are published.
        """
        from rlcore.weights.manifest import announce

        if resumed is not None:
            self._load_phase_weights(resumed)
        read = partial(self.rank.published_weights, name, dtype)
        if self._joined:  # as `send` reads them: a GPU's weights are then summed up where they are
            read = partial(read, on_device=self.group.on_device)
        shapes = self.rank.published_shapes(name)
        manifest = announce(version, shapes, dtype, read, full=full, seed=self._run_seed)
        if self._joined:
            return (manifest, None) if self.rank.rank == 0 else None
        if self.rank.rank != 0:
            # gathering is collective, and there is nothing to send here
            deque(read(), maxlen=0)
            return None
        return manifest, self._transport(name).publish(manifest, read())

    def send(self, manifest: WeightManifest, name: str, receivers: Receivers) -> Sending | None:
        """Send the set that was announced to actors that have stopped for it (all ranks take part);
        returns when they have loaded it, with the result of `GroupSender.send`."""
        read = partial(
            self.rank.published_weights,
            name,
            manifest.dtype,
            on_device=self.group.on_device,
            everywhere=self.group.everywhere,
        )
        sender: GroupSender = self.sender
        return sender.send(manifest, receivers, read)

    def follow(self, manifest: WeightManifest, handle: Any) -> None:
        """Take these weights as the frozen policy that KL is taken to (a draft's learner follows
        the policy)."""
        for bucket in self._transport(POLICY).receive(manifest, handle):
            self.rank.load_frozen(bucket)

    # ---- memory ----------------------------------------------------------------------------------

    def release(self) -> dict[str, float]:
        """Free memory for engines on these GPUs; seconds, and GiB freed and held at most since the
        last call."""
        start = time.monotonic()
        freed, peak = self.rank.release()
        return {
            "release_s": time.monotonic() - start,
            "freed_gib": freed / 2**30,
            "peak_gib": peak / 2**30,
        }

    def reclaim(self) -> dict[str, float]:
        """Take the memory back; seconds."""
        start = time.monotonic()
        self.rank.reclaim()
        return {"reclaim_s": time.monotonic() - start}

    # ---- state -----------------------------------------------------------------------------------

    def save(self, folder: str, in_phase: bool) -> None:
        """Copy the learner's state to host memory and have it written in the background; `saved`
        returns when it is on disk.

        `in_phase`: with the weights that the running phase began with.
        """
        self._writing = [earlier for earlier in self._writing if earlier.running]
        # another copy of the state would be held in memory for a disk that hangs
        behind = Discarded() if self._writing else WriteBehind()
        self._writing.append(behind)
        try:
            self.rank.save(folder, behind.put)
            if in_phase:
                from rlcore.learner.state_files import write_parts

                write_parts(Path(folder) / PHASE_WEIGHTS, self._phase_weights, behind.put)
        finally:
            behind.close()

    @ray.method(concurrency_group="files")
    def saved(self, timeout_s: float) -> None:
        """Return when everything of the last `save` is written; raises disk errors, and
        DeadlineExceeded after `timeout_s`."""
        self._writing[-1].wait(timeout_s)

    def load(self, folder: str) -> None:
        self.rank.load(folder)

    def export(self, folder: str) -> None:
        self.rank.export(folder)
