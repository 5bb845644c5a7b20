"""A decoding core without a model: its tokens follow from (request seed, position) alone."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from timing import deadline

from rlcore.interfaces import RolloutEngine, StepLoad, Wake, WeightStream
from rlcore.models.fresh import build_char_tokenizer
from rlcore.rollout.request_book import CoreRequest, DecodeCore, Output, RequestBook
from rlcore.rollout.specs import ActorSpec, EngineJob
from rlcore.seeding import derive_seed
from rlcore.testing.records import make_sampling
from rlcore.types import OnPublish, Request, Trajectory
from rlcore.weights.manifest import tensor_checksum

ALPHABET = "abcdefghijklmnopqrstuvwxyz"
VOCAB = len(ALPHABET) + 3
JOB = EngineJob(ActorSpec(max_num_seqs=4), "bf16-0", "none", max_len=64, logprobs_k=3)
WEIGHTS = {"w": torch.ones(2), "b": torch.zeros(1)}


class FakeCore(DecodeCore):
    """One token a step for up to `max_num_seqs` requests; log-probs are -1, -2, .. by rank."""

    def __init__(self, running: int = JOB.actor.max_num_seqs) -> None:
        self.running = running
        self.queue: dict[str, tuple[CoreRequest, int]] = {}  # id -> (request, tokens sampled)
        self.added: list[CoreRequest] = []

    def add(self, request: CoreRequest) -> None:
        self.queue[request.request_id] = (request, 0)
        self.added.append(request)

    def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.queue.pop(request_id, None)

    def step(self) -> Iterable[Output]:
        for request, count in list(self.queue.values())[: self.running]:
            token = 3 + derive_seed(request.seed, "fake", count) % (VOCAB - 3)
            k = max(0, request.sampling.logprobs_k)
            ids = np.array([[token, *range(k)]], np.int32)
            logp = -np.arange(1, k + 2, dtype=np.float32)[None]
            done = count + 1 == request.max_tokens
            self.queue[request.request_id] = (request, count + 1)
            if done:
                del self.queue[request.request_id]
            rows = None if request.sampling.logprobs_k < 0 else (ids, logp)
            yield Output(request.request_id, [token], rows, "length" if done else None)

    def settle(self) -> Iterable[Output]:
        return ()


class Gate:
    """Lets steps through: all of them at first, as many as `allow` says after `close`."""

    def __init__(self) -> None:
        self._left: float = math.inf
        self._changed = threading.Condition()

    def close(self) -> None:
        self._left = 0

    def allow(self, steps: float = math.inf) -> None:
        with self._changed:
            self._left += steps
            self._changed.notify()

    def enter(self) -> None:
        """Wait until a step is allowed, and take it."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._left >= 1, deadline(60))
            self._left -= 1


class FakeEngine(RolloutEngine):
    """An engine over `FakeCore`. `loading`: set it to let `update_weights` go on. `gate`: of its
    decode steps."""

    def __init__(self, job: EngineJob = JOB) -> None:
        self.core = FakeCore(job.actor.max_num_seqs)
        tokenizer = build_char_tokenizer(ALPHABET)
        self.book = RequestBook(self.core, job, tokenizer, vocab=VOCAB, salted=False)
        self.held: Mapping[str, torch.Tensor] = WEIGHTS
        self.loading = threading.Event()
        self.loading.set()
        self.fail: Exception | None = None  # raised by the next step
        self.gate = Gate()

    @property
    def version(self) -> int:
        return self.book.version

    def add(self, requests: Sequence[Request], begun: Sequence[Trajectory] = ()) -> None:
        self.book.add(requests, begun)

    def abort(self, request_ids: Iterable[str]) -> None:
        self.book.abort(request_ids)

    def cut(self, request_ids: Iterable[str]) -> list[Trajectory]:
        return self.book.cut(request_ids)

    def step(self) -> list[Trajectory]:
        if self.fail is not None:
            raise self.fail
        self.gate.enter()
        return self.book.decode()

    def unfinished(self) -> int:
        return self.book.unfinished()

    def running(self) -> int:
        return min(len(self.core.queue), self.core.running)

    def hold_newer(self, full: float) -> None:
        self.book.full_for_newer = full

    def load_of_step(self) -> StepLoad:
        return self.book.step_load

    def decoding_s(self) -> dict[str, float]:
        return self.book.decoding_s()

    def begin_drain(self) -> None:
        self.book.begin_drain()

    def end_drain(self) -> None:
        self.book.end_drain()

    def drained(self) -> bool:
        return self.book.drained()

    def update_weights(self, version: int, weights: WeightStream, on_publish: OnPublish) -> None:
        if set(weights.shapes) != set(WEIGHTS):
            raise ValueError("a weight is missing")
        assert self.loading.wait(deadline(60))
        draws = self.book.withdraw(started=True) if on_publish == "abort" else []
        self.held = {n: t for bucket in weights.buckets for n, t in bucket.items()}
        self.book.set_version(version)
        self.book.resubmit(draws)

    def set_version(self, version: int) -> None:
        self.book.set_version(version)

    def sleep(self) -> float:
        self.book.hold_all()
        return 3.0

    def wake(self, what: Wake) -> None:
        if what == "all":
            self.book.end_drain()

    def checksums(self, names: Iterable[str]) -> dict[str, int]:
        return {n: tensor_checksum(self.held[n]) for n in names}

    def close(self) -> None:
        pass


def ask(
    count: int, *, group: int = 0, prompt: Sequence[int] = (5, 9), seed: int = 7, **sampling: object
) -> list[Request]:
    """`count` samples of one prompt, seeds seed, seed + 1, ..."""
    spec = make_sampling(**{"max_new_tokens": 6, "logprobs_k": 2, **sampling})
    ids = np.array(prompt, np.int32)
    return [
        Request(group, i, f"t/train/{group}", ids, spec, seed=seed + 100 * group + i)
        for i in range(count)
    ]
