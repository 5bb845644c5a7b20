"""Denoises requests together: every step is one pass over all that run, each at its own block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from rlcore.models.specs import DiffusionSpec
from rlcore.rollout.core import CoreRequest, DecodeCore, Output
from rlcore.rollout.engines.diffusion.denoising import Denoising
from rlcore.rollout.engines.diffusion.model import MaskedModel
from rlcore.rollout.specs import ActorSpec

POSITIONS = 8192  # of a pass, where actor.max_batched_tokens leaves it to the engine
T = TypeVar("T")


class DiffusionCore(DecodeCore):
    """Gives each response whole, when its last block is denoised and its log-probs are
    estimated."""

    def __init__(
        self,
        model: MaskedModel,
        actor: ActorSpec,
        spec: DiffusionSpec,
        *,
        mask_id: int,
        end_id: int,
    ) -> None:
        self._model = model
        self._spec = spec
        self._ids = {"mask_id": mask_id, "end_id": end_id}
        self._most = actor.max_num_seqs
        self._positions = actor.max_batched_tokens or POSITIONS
        self._waiting: dict[str, CoreRequest] = {}
        self._running: dict[str, Denoising] = {}

    def add(self, request: CoreRequest) -> None:
        """Queue a request. Raises ValueError for what a masked-diffusion model does not do."""
        s = request.sampling
        if len(request.token_ids) != request.prompt_len:
            raise ValueError(
                f"{request.request_id}: a response of a masked-diffusion model is not gone on with"
            )
        if s.top_p < 1 or s.top_k or s.min_p or s.logprobs_k > 0 or s.stop:
            raise ValueError(
                f"{request.request_id}: the diffusion engine samples without top_p, top_k, min_p, "
                "stop strings and top log-probs"
            )
        if s.temperature == 0 and s.logprobs_k >= 0:
            raise ValueError(f"{request.request_id}: a greedy response has no log-probs")
        self._waiting[request.request_id] = request

    def abort(self, request_ids: list[str]) -> None:
        """Drop requests that are queued or running."""
        for request_id in request_ids:
            self._waiting.pop(request_id, None)
            self._running.pop(request_id, None)

    def running(self) -> int:
        """Requests in the current batch."""
        return len(self._running)

    def settle(self) -> Iterable[Output]:
        """Nothing is in flight between two steps."""
        return ()

    def step(self) -> Iterator[Output]:
        """One denoising step of every running request; those that it finishes."""
        yield from self._begin()
        running = list(self._running.values())
        for batch in _batches(running, [len(d.ids) for d in running], self._positions):
            self._denoise(batch)
        done = [d for d in running if d.finish is not None]
        logp: dict[str, np.ndarray] = {}
        asked = [d for d in done if d.request.sampling.logprobs_k >= 0]
        for batch in _batches(asked, [len(d.ids) for d in asked], self._positions):
            logp |= self._estimated(batch)
        for d in done:
            del self._running[d.request.request_id]
            yield _output(d, logp.get(d.request.request_id))

    def _begin(self) -> Iterator[Output]:
        while self._waiting and len(self._running) < self._most:
            request_id = next(iter(self._waiting))
            request = self._waiting.pop(request_id)
            self._running[request_id] = Denoising(request, self._spec, **self._ids)
            yield Output(request_id, [], None, None)

    def _denoise(self, batch: Sequence[Denoising]) -> None:
        places = [d.places() for d in batch]
        counts = list(map(len, places))
        states = self._model.states([d.ids for d in batch], places)
        heat = np.repeat([d.request.sampling.temperature for d in batch], counts)
        tokens, sure = self._model.candidates(
            states, heat, np.concatenate([d.uniforms() for d in batch])
        )
        ends = np.cumsum(counts)[:-1]
        for d, mine, confidence in zip(batch, np.split(tokens, ends), np.split(sure, ends)):
            d.take(mine, confidence)

    def _estimated(self, batch: Sequence[Denoising]) -> dict[str, np.ndarray]:
        """Request id -> log-probs [S] float32 of its response."""
        responses = [d.response() for d in batch]
        counts = list(map(len, responses))
        places = [d.request.prompt_len + np.arange(n) for d, n in zip(batch, counts)]
        states = self._model.states([d.estimated_inputs() for d in batch], places)
        heat = np.repeat([d.request.sampling.temperature for d in batch], counts)
        found = self._model.log_probs(states, np.concatenate(responses), heat).numpy()
        parts = np.split(found, np.cumsum(counts)[:-1])
        return {d.request.request_id: part for d, part in zip(batch, parts)}


def _output(d: Denoising, logp: np.ndarray | None) -> Output:
    tokens = d.response()
    rows = None
    if logp is not None:
        rows = tokens.astype(np.int32)[:, None], logp.astype(np.float32)[:, None]
    extras = d.estimate().extras()
    return Output(d.request.request_id, tokens.tolist(), rows, d.finish, extras)


def _batches(items: Sequence[T], lengths: Sequence[int], positions: int) -> Iterator[list[T]]:
    """The items in batches of at most that many positions, padding included; the longest first."""
    batch: list[T] = []
    width = 0
    for i in sorted(range(len(items)), key=lambda i: -lengths[i]):
        if batch and (len(batch) + 1) * width > positions:
            yield batch
            batch = []
        width = width if batch else lengths[i]
        batch.append(items[i])
    if batch:
        yield batch
