"""A learner rank's process."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import ray

from rlcore.types import Group, WeightManifest

PHASE_WEIGHTS = "phase_weights.safetensors"
LEARNER_THREADS = {"watch": 1, "files": 1, "data": 1}  # beside the one that computes: heartbeats, files, next batches


class LearnerShell:
    """One DeepSpeed rank."""

    def __init__(self, buffer: Any, transport: str, transport_folder: str) -> None:
        self._buffer, self._transport, self._folder = buffer, transport, transport_folder
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: list[Future[object]] = []
        self._fetched: dict[int, list[Group]] = {}  # step -> this rank's share of its batch
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

    def address(self, port: int = 0) -> tuple[str, int]:
        """Where rank 0 listens for the others, when ranks may be on several nodes; `port` 0: any free one."""
        from rlcore.runtime.cluster import free_port

        host = ray.util.get_node_ip_address()
        return host, free_port(port, host)

    @ray.method(concurrency_group="data")
    def fetch(self, shares: dict[int, list[int]], timeout_s: float) -> None:
        """Get this rank's groups of batches to come (step -> group ids), while it trains on others."""
        refs = [self._buffer.payload.remote(step, ids) for step, ids in shares.items()]
        self._fetched |= zip(shares, ray.get(refs, timeout=timeout_s))

    def begin_phase(self, steps: list[int], long: bool, resumed: str | None) -> None:
        """Compute p_ref for the batches of an update phase, which were fetched.

        `long`: the phase has several steps, so the weights it begins with are kept for a checkpoint in its middle.
        `resumed`: such a checkpoint; p_ref is computed under the weights kept, then its own are loaded.
        """
        batches = [self._fetched.pop(step) for step in steps]
        if resumed is not None:
            self._load_phase_weights(resumed)
        elif long:
            self._phase_weights = self.rank.trained_weights()
        self.rank.begin_phase(batches, first=resumed is None)
        if resumed is not None:
            self.rank.load(resumed, keep_phase=True)

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
