"""A masked-diffusion model as a rollout engine whose weights change between two denoising steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch

from rlcore.extras.diffusion.estimates import Estimate
from rlcore.extras.diffusion.folder import mask_token_id
from rlcore.extras.diffusion.model import DiffusionWeights, MaskedModel
from rlcore.interfaces import WeightStream
from rlcore.models.specs import DiffusionSpec
from rlcore.models.text import load_tokenizer
from rlcore.rollout.checks import check_model
from rlcore.rollout.request_book import BookedEngine, CoreRequest, DecodeCore, Output, RequestBook
from rlcore.rollout.specs import ActorSpec, EngineJob
from rlcore.spec import refuse
from rlcore.types import FinishReason, OnPublish

# One response on its way from masks to tokens. NumPy alone.
#
# As papers/ais.txt (C.2) has it for LLaDA: blocks one after the other, from the left; a step draws
# a candidate for every masked position of the current block and keeps the most confident ones.


class Denoising:
    """A prompt and its canvas. Its draws depend on the request's seed and on how many steps it has
    taken, and on no other request."""

    def __init__(self, request: CoreRequest, spec: DiffusionSpec, *, mask_id: int) -> None:
        """`request`: with the tokens of its prompt and no others."""
        self.request = request
        self._spec = spec
        self._mask_id = mask_id
        self.ids = np.full(request.prompt_len + request.max_tokens, mask_id, np.int64)
        self.ids[: request.prompt_len] = request.token_ids
        self._hidden = np.arange(len(self.ids)) >= request.prompt_len
        self._rng = np.random.default_rng(request.seed)
        self._begin(request.prompt_len)
        self.finish: FinishReason | None = None

    def _begin(self, start: int) -> None:
        self._start = start
        self._end = min(start + self._spec.block, len(self.ids))

    def places(self) -> np.ndarray:
        """[n] the masked positions of the current block."""
        return self._start + np.flatnonzero(self._hidden[self._start : self._end])

    def uniforms(self) -> np.ndarray:
        """[n] float64 in [0, 1): what this step's candidates are drawn by, one for each of
        `places`. To be asked for once a step."""
        block = self._rng.random(self._end - self._start)
        return block[self._hidden[self._start : self._end]]

    def take(self, candidates: np.ndarray, confidence: np.ndarray) -> None:
        """Unmask the most confident candidates [n] of `places`; the left one of equals first."""
        places = self.places()
        kept = np.argsort(-confidence, kind="stable")[: self._spec.tokens_per_step]
        self.ids[places[kept]] = candidates[kept]
        self._hidden[places[kept]] = False
        if len(places) > self._spec.tokens_per_step:
            return
        # Blocks behind an end of sequence would be thrown away, and change none before them.
        if self._ends(self.ids[self._start : self._end]).any():
            self.finish = "stop"
        elif self._end == len(self.ids):
            self.finish = "length"
        else:
            self._begin(self._end)

    def _ends(self, ids: np.ndarray) -> np.ndarray:
        """[n] bool: tokens that end the response."""
        return np.isin(ids, self.request.stop_ids)

    def response(self) -> np.ndarray:
        """[S] the tokens up to the first that ends the response, with it."""
        canvas = self.ids[self.request.prompt_len : self._end]
        ends = np.flatnonzero(self._ends(canvas))
        return canvas[: ends[0] + 1] if len(ends) else canvas

    def estimate(self) -> Estimate:
        """How the response's log-probs are estimated."""
        request = self.request
        share = self._spec.prompt_masking
        return Estimate.of_request(request.seed, request.prompt_len, request.max_tokens, share)

    def estimated_inputs(self) -> np.ndarray:
        """[P + canvas] what the model reads for that."""
        prompt = self.ids[: self.request.prompt_len]
        return self.estimate().inputs(prompt, self._mask_id)


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
    ) -> None:
        self._model = model
        self._spec = spec
        self._mask_id = mask_id
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
            self._running[request_id] = Denoising(request, self._spec, mask_id=self._mask_id)
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


class DiffusionEngine(BookedEngine):
    """Denoises in this process. Not thread-safe: one thread owns it."""

    def __init__(self, job: EngineJob) -> None:
        """Raises UserError for settings or a model folder that cannot work here."""
        refuse(
            job.diffusion is None,
            f"{job.key}.engine=diffusion needs model.diffusion: choose model=diffusion.",
        )
        assert job.diffusion is not None
        mask_id = mask_token_id(job.model_path)
        check_model(job)
        if job.actor.on_cpu:
            torch.set_num_threads(max(1, int(job.actor.num_cpus)))
        tokenizer = load_tokenizer(job.model_path)
        model = MaskedModel(job.model_path, job.actor, mask_id)
        self._weights = DiffusionWeights(model.weights, job.actor)
        self.core = DiffusionCore(model, job.actor, job.diffusion, mask_id=mask_id)
        vocab = int(model.lm.config.vocab_size)
        super().__init__(RequestBook(self.core, job, tokenizer, vocab=vocab, salted=False))

    def running(self) -> int:
        """Requests in the current batch."""
        return self.core.running()

    # -- weights -----------------------------------------------------------------------------------

    def update_weights(self, version: int, weights: WeightStream, on_publish: OnPublish) -> None:
        """Load a whole set of weights as `version`, atomically between two steps.

        finish: decodes until the requests that have begun are done (their trajectories come with
        the next `step`). abort: requests begin anew, with the same seeds. Raises ValueError, the
        old weights untouched, for a set that is not the model's, a version that goes back, or
        in_flight: one version denoises a whole response, and its log-probs are estimated once.
        """
        if version < self.version and self.unfinished():
            raise ValueError(
                f"version {version} is older than {self.version} while requests are unfinished"
            )
        if on_publish == "in_flight" and self.unfinished():
            raise ValueError("a masked-diffusion response cannot change versions (in_flight)")
        self._weights.check(weights.shapes)
        if on_publish == "finish":
            self._book.begin_drain()
            self._finish_active()
            self._switch(version, weights)
            self._book.end_drain()
        else:
            draws = self._book.withdraw(started=True)
            self._switch(version, weights)
            self._book.resubmit(draws)

    def _switch(self, version: int, weights: WeightStream) -> None:
        self._weights.load(weights)
        self._book.set_version(version)

    def checksums(self, names: Iterable[str]) -> dict[str, int]:
        """Checksums of the weights as the engine holds them: see `HeldWeights.checksums`."""
        return self._weights.checksums(names)

    def close(self) -> None:
        """Nothing outlives the process."""
