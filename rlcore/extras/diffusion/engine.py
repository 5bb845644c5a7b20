"""A masked-diffusion model as a rollout engine whose weights change between two denoising steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from rlcore.extras.diffusion.checks import DiffusionFacts
from rlcore.extras.diffusion.estimates import Estimate
from rlcore.extras.diffusion.folder import NAMES, mask_token_id
from rlcore.interfaces import WeightStream
from rlcore.models.specs import DiffusionSpec
from rlcore.models.text import load_tokenizer
from rlcore.rollout.checks import check_model
from rlcore.rollout.request_book import BookedEngine, CoreRequest, DecodeCore, Output, RequestBook
from rlcore.rollout.specs import ActorSpec, EngineJob
from rlcore.spec import refuse
from rlcore.types import FinishReason, OnPublish
from rlcore.weights.manifest import check_shapes, tensor_checksum
from rlcore.weights.rounding import round_weights
from rlcore.weights.stream import whole

_LOGITS = 1 << 24  # most logits at once: 64 MiB of float32


class MaskedModel:
    """A masked-diffusion model that samples; without gradients."""

    def __init__(self, folder: str, actor: ActorSpec, mask_id: int) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        import rlcore.extras.diffusion.llada  # noqa: F401  # registers its architecture

        disable_progress_bar()
        self.device = torch.device("cpu" if actor.on_cpu else "cuda")
        self._mask_id = mask_id
        self._fp32_head = actor.fp32_head
        lm: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=getattr(torch, actor.compute_dtype),
            local_files_only=True,
            use_safetensors=True,  # another format would be unpickled
        )
        self.lm = lm.to(self.device).eval().requires_grad_(False)
        #: Hugging Face name -> weight, tied ones once
        self.weights: dict[str, Tensor] = dict(self.lm.named_parameters())

    @torch.no_grad()
    def states(self, rows: Sequence[np.ndarray], places: Sequence[np.ndarray]) -> Tensor:
        """[N, D] hidden states at the `places` of each of the `rows` of tokens, in order."""
        width = max(map(len, rows))
        ids = np.full((len(rows), width), self._mask_id, np.int64)
        padding = np.ones((len(rows), width), np.int64)
        for line, pad, row in zip(ids, padding, rows):
            line[: len(row)] = row
            pad[: len(row)] = 0
        segments = torch.from_numpy(padding).to(self.device) if padding.any() else None
        out = self.lm.base_model(
            input_ids=torch.from_numpy(ids).to(self.device), segments=segments
        ).last_hidden_state
        flat = np.concatenate([r * width + p for r, p in enumerate(places)])
        return out.flatten(0, 1)[torch.from_numpy(flat).to(self.device)]

    def _logits(self, states: Tensor) -> Tensor:
        head = self.lm.get_output_embeddings().weight
        if self._fp32_head:
            states, head = states.float(), head.float()
        return (states @ head.t()).float()

    def _chunks(self, states: Tensor) -> list[slice]:
        rows = max(1, _LOGITS // self.lm.config.vocab_size)
        return [slice(i, i + rows) for i in range(0, len(states), rows)]

    @torch.no_grad()
    def candidates(
        self, states: Tensor, temperatures: np.ndarray, uniforms: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """(tokens [N], confidence [N]): draws at `temperatures` [N] by inversion of `uniforms` [N],
        the most probable where 0; and the probability of each at temperature 1. Never a mask."""
        heat = torch.from_numpy(temperatures).to(self.device)
        u = torch.from_numpy(uniforms).to(self.device)
        tokens, sure = [], []
        for part in self._chunks(states):
            logits = self._logits(states[part])
            logits[:, self._mask_id] = -torch.inf
            token = _drawn(logits, heat[part], u[part])
            tokens.append(token)
            sure.append(logits.softmax(dim=-1).gather(1, token[:, None]).squeeze(1))
        return torch.cat(tokens).cpu().numpy(), torch.cat(sure).cpu().numpy()

    @torch.no_grad()
    def log_probs(self, states: Tensor, targets: np.ndarray, temperatures: np.ndarray) -> Tensor:
        """[N] float32 log-probs of `targets` [N], over the whole vocabulary."""
        ids = torch.from_numpy(targets.astype(np.int64)).to(self.device)
        heat = torch.from_numpy(temperatures.astype(np.float32)).to(self.device)
        found = []
        for part in self._chunks(states):
            logits = self._logits(states[part]) / heat[part, None]
            found.append(logits.log_softmax(dim=-1).gather(1, ids[part, None]).squeeze(1))
        return torch.cat(found).cpu()


def _drawn(logits: Tensor, heat: Tensor, u: Tensor) -> Tensor:
    """[n] tokens of logits [n, V]."""
    best = logits.argmax(dim=-1)
    if not (heat > 0).any():
        return best
    warm = torch.where(heat > 0, heat, 1.0)[:, None]
    # float64: the sum over a large vocabulary must not lose the improbable tokens
    mass = (logits.double() / warm).softmax(dim=-1).cumsum(dim=-1)
    drawn = torch.searchsorted(mass, (u * mass[:, -1])[:, None], right=True).squeeze(1)
    return torch.where(heat > 0, drawn.clamp_max(logits.shape[1] - 1), best)


class DiffusionWeights:
    """Loads sets of weights into a model in this process, in place."""

    def __init__(self, weights: Mapping[str, torch.Tensor], actor: ActorSpec) -> None:
        """`weights`: the model's own tensors by Hugging Face name, just loaded."""
        self._weights = weights
        kept = actor.keep_high_precision
        # LLaDA calls its head and its embedding otherwise
        own = tuple(NAMES[name] for name in kept if name in NAMES)
        self._rounding = actor.model_copy(update={"keep_high_precision": (*kept, *own)})
        self._arrived: dict[str, tuple[int, int]] = {}  # name -> checksums (as published, as held)
        if actor.rounding != "none":
            self.load(whole({n: w.clone() for n, w in weights.items()}))

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ValueError, naming the weight, unless these are the model's names and shapes."""
        check_shapes(shapes, {n: tuple(w.shape) for n, w in self._weights.items()})

    @torch.no_grad()
    def load(self, weights: WeightStream) -> None:
        """Replace all weights, a bucket at a time.

        Raises RuntimeError if one did not come: the engine must not serve then.
        """
        self._arrived = {}
        missing = set(self._weights)
        for bucket in weights.buckets:
            for name, tensor in round_weights(bucket, self._rounding).items():
                held, published = self._weights[name], bucket[name]
                served = tensor.to(held.dtype)
                held.copy_(served)
                if served is not published:
                    self._arrived[name] = (tensor_checksum(published), tensor_checksum(served))
                missing.discard(name)
            del bucket
        if missing:
            raise RuntimeError(f"a publication left out {sorted(missing)[0]}")

    def checksums(self, names: Iterable[str]) -> dict[str, int]:
        """Checksums of the weights as the engine holds them.

        A weight that is exactly the rounding of what was published reports the published checksum,
        anything else its own. Raises KeyError for a name that the model lacks.
        """
        found = {}
        for name in names:
            if name not in self._weights:
                raise KeyError(f"the engine's model has no weight {name}")
            held = tensor_checksum(self._weights[name])
            published, served = self._arrived.get(name, (held, held))
            found[name] = published if held == served else held
        return found


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
        """[n] float64 in [0, 1): the uniforms of this step's draws, one for each of `places`. To be
        called once a step."""
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
        """The estimate of the response's log-probs."""
        request = self.request
        share = self._spec.prompt_masking
        return Estimate.of_request(request.seed, request.prompt_len, request.max_tokens, share)

    def estimated_inputs(self) -> np.ndarray:
        """[P + canvas]: the model's inputs for the estimate."""
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
        """Queue a request. Raises ValueError for one that a masked-diffusion model cannot serve."""
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
        """One denoising step of every running request; returns the requests that it finishes."""
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

    facts = DiffusionFacts

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
        in_flight. One version denoises a whole response, and its log-probs are estimated once.
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
        """Nothing to free: the model ends with the process."""
