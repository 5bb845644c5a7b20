"""The requests of one engine: the ones that its core decodes, the ones held back, and the version
that samples their tokens. Independent of the engine."""

from __future__ import annotations

import itertools
import math
import os
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from rlcore.interfaces import RolloutEngine, StepLoad, Wake
from rlcore.models.text import end_ids, split_stops
from rlcore.rollout.segments import Draw, Rows, leading
from rlcore.rollout.specs import EngineJob
from rlcore.rollout.text import StopWatcher
from rlcore.seeding import derive_seed
from rlcore.types import PRECISE_LAYERS, FinishReason, PageRule, Request, SamplingSpec, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class CoreRequest:
    """A request as the core receives it, new or resubmitted with the tokens it already has.

    Example: CoreRequest("train:17:0", [3, 4, 5, 9], 3, sampling, max_tokens=63, seed=1)
    """

    request_id: str
    token_ids: Sequence[int]  # the prompt, then the response tokens sampled before
    prompt_len: int  # tokens of the prompt alone
    sampling: SamplingSpec
    max_tokens: int  # still to be sampled
    seed: int
    cache_salt: str | None = None  # requests share cached prefixes only within the same salt
    stop_ids: tuple[int, ...] = ()  # tokens that end the response
    page_rule: PageRule | None = None  # of sparse attention; None: the engine's


class Output(NamedTuple):
    """The tokens that one step sampled for one request. Without tokens it reports that the core has
    begun with the request."""

    request_id: str
    tokens: list[int]
    rows: Rows | None  # of log-probs, one a token; None if none were asked for
    finish: FinishReason | None  # None: unfinished
    extras: Mapping[str, np.ndarray] | None = None  # of a finished one: further arrays by name
    # [n, layers, k]: the experts of the next n tokens that the core has read of it since it was
    # queued (`models/routes.py`); None where it records none
    routes: np.ndarray | None = None


class DecodeCore(ABC):
    """Requests in, tokens and log-prob rows out, one step at a time."""

    @abstractmethod
    def add(self, request: CoreRequest) -> None:
        """Queue a request."""

    @abstractmethod
    def abort(self, request_ids: list[str]) -> None:
        """Drop requests that are queued or running."""

    @abstractmethod
    def step(self) -> Iterable[Output]:
        """One step. Raises RuntimeError if a request failed or the model is lost."""

    @abstractmethod
    def settle(self) -> Iterable[Output]:
        """Return the remaining outputs of steps that were begun, without beginning another; no step
        is in flight afterwards. Raises as `step` does."""


class RequestBook:
    """Queues requests in the core, withdraws and resubmits them, and builds their trajectories."""

    def __init__(
        self,
        core: DecodeCore,
        job: EngineJob,
        tokenizer: PreTrainedTokenizerBase,
        *,
        vocab: int,
        salted: bool,
    ) -> None:
        """`salted`: requests share cached prefixes only with others of the same version."""
        self._core = core
        self._job = job
        self._tokenizer = tokenizer
        # of the policy, whose vocabulary a draft shares
        self._end_ids = end_ids(tokenizer, job.policy_path or job.model_path)
        self._vocab = vocab
        self._salted = salted
        self.version = job.version  # samples now
        self.active: dict[str, Draw] = {}  # request id -> draw, in order of admission
        self.step_load = StepLoad()  # of the last step
        self._settled = StepLoad()  # of what `settle` gave, counted with the next step
        self._decode_s = 0.0  # a clock that runs during steps only
        #: so many requests in the core make newer ones wait while one of an older version is
        #: unfinished
        self.full_for_newer = math.inf
        self._held: list[Draw] = []  # not in the core: they wait for a drain to end, or for others
        self._draining = False
        # A restarted process may have the pid of the one before it, so the pid alone is not unique.
        self._draws_of = f"{job.actor_id}:{os.getpid()}-{secrets.token_hex(4)}"
        self._count = itertools.count()
        self._precise: dict[int, int] = {}  # decoder layers that were precise, by version

    def add(self, requests: Sequence[Request], begun: Sequence[Trajectory] = ()) -> None:
        """Queue requests, all or none. Raises ValueError for one that the engine cannot serve.

        `begun`: records that `cut` of other engines returned; their requests keep these tokens.
        """
        for request in requests:
            self._check(request)
        taken = {*self.active, *(d.request.request_id for d in self._held)}
        for request in requests:
            if request.request_id in taken:
                raise ValueError(
                    f"request ids must be unique among unfinished requests: {request.request_id} "
                    "is not"
                )
            taken.add(request.request_id)
        draws = [self._draw(r) for r in requests]
        earlier = {t.request_id: t for t in begun}
        for draw in draws:
            t = earlier.get(draw.request.request_id)
            if t is not None and self._continues(draw, t):
                draw.go_on(t)
        self._held += draws
        self._let_in()

    def _let_in(self) -> None:
        """Queue in the core what is held back and need not wait, in order."""
        if self._draining or not self._held:
            return
        held, self._held = sorted(self._held, key=lambda d: d.version), []
        oldest = min((d.version for d in self.active.values()), default=held[0].version)
        for draw in held:
            if draw.version <= oldest or len(self.active) < self.full_for_newer:
                self.resubmit([draw])
            else:
                self._held.append(draw)

    def _continues(self, draw: Draw, t: Trajectory) -> bool:
        """Return whether the response can go on from tokens of another actor: versions within a
        response never decrease, and its limit must allow further tokens."""
        sampled = len(t.token_version)
        return 0 < sampled < draw.budget and t.token_version[-1] <= self.version

    def _check(self, request: Request) -> None:
        prompt, k = len(request.prompt_ids), request.sampling.logprobs_k
        if not 0 < prompt < self._job.max_len:
            raise ValueError(
                f"{request.request_id}: a prompt of {prompt} tokens does not fit "
                f"model.max_len={self._job.max_len}, which must hold it and at least one sampled "
                "token"
            )
        if k > self._job.logprobs_k:
            raise ValueError(
                f"{request.request_id}: rollout.logprobs_k={k} is above the "
                f"{self._job.logprobs_k} this engine was started for"
            )
        ids = np.asarray(request.prompt_ids)
        if ids.max() >= self._vocab or ids.min() < 0:
            raise ValueError(
                f"{request.request_id}: prompt token ids must lie in 0..{self._vocab - 1}"
            )

    def _draw(self, request: Request) -> Draw:
        spec = request.sampling
        _, strings = split_stops(self._tokenizer, spec.stop)
        return Draw(
            request=request,
            draw_id=f"{self._draws_of}:{next(self._count)}",
            budget=min(spec.max_new_tokens, self._job.max_len - len(request.prompt_ids)),
            version=self.version,
            watcher=StopWatcher(self._tokenizer, strings) if strings else None,
        )

    def _submit(self, draw: Draw) -> None:
        """Queue a draw in the core: the prompt, then the tokens it has so far."""
        request = draw.request
        draw.routes.restart()
        seed = request.seed
        if draw.resubmissions:  # a resubmitted request must not repeat the draws of its first seed
            seed = derive_seed(seed, "rollout/resubmit", draw.resubmissions)
        stop_ids, _ = split_stops(self._tokenizer, request.sampling.stop)
        self._core.add(
            CoreRequest(
                request.request_id,
                [*map(int, request.prompt_ids), *draw.tokens],
                len(request.prompt_ids),
                request.sampling,
                max_tokens=draw.budget - len(draw.tokens),
                seed=seed,
                cache_salt=self._salt(request.page_rule),
                stop_ids=tuple(sorted({*self._end_ids, *stop_ids})),
                page_rule=request.page_rule,
            )
        )
        self.active[request.request_id] = draw

    def _salt(self, rule: PageRule | None) -> str | None:
        """Keys and values below the top layer depend on the weights and on the pages that the
        positions before attended to."""
        parts = [f"v{self.version}"] if self._salted else []
        parts += [] if rule is None else [f"pages {rule.length_step} {rule.blocks}"]
        return "; ".join(parts) or None

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop requests; unknown ids are ignored."""
        ids = set(request_ids)
        self._held = [d for d in self._held if d.request.request_id not in ids]
        self._core.abort([i for i in ids if self.active.pop(i, None) is not None])

    def cut(self, request_ids: Iterable[str]) -> list[Trajectory]:
        """Drop requests and return their records so far, also of requests without a token; unknown
        ids are ignored."""
        ids = set(request_ids)
        draws = [d for i, d in self.active.items() if i in ids]
        draws += [d for d in self._held if d.request.request_id in ids]
        self.abort(ids)
        actor = self._job.actor_id, self._job.actor.reported_kind
        return [draw.finish("abort", *actor) for draw in draws]

    def unfinished(self) -> int:
        """Requests queued, running or held back."""
        return len(self.active) + len(self._held)

    def decode(self) -> list[Trajectory]:
        """One step of the core; the trajectories that finished in it.

        Raises RuntimeError if the core failed a request.
        """
        self._let_in()
        if not self.active:
            return []
        done = self._take(self._core.step)
        self.step_load += self._settled
        self._settled = StepLoad()
        return done

    def settle(self) -> list[Trajectory]:
        """Take the remaining outputs of the core's steps; returns the trajectories that finished.
        Before this call tokens of the current version may still be under way.
        """
        done = self._take(self._core.settle)
        self._settled += self.step_load
        return done

    def _take(self, run: Callable[[], Iterable[Output]]) -> list[Trajectory]:
        done = []
        tokens = contexts = prompts = 0
        begun, since = time.monotonic(), self._decode_s
        outputs = list(run())
        self._decode_s += time.monotonic() - begun
        for out in outputs:
            draw = self.active.get(out.request_id)
            if draw is None:  # aborted while the step ran
                continue
            out = self._until_stop(draw, out)
            context = len(draw.request.prompt_ids) + len(draw.tokens)
            if draw.decoding_since is None:
                draw.decoding_since = since
                prompts += context
            contexts += context
            tokens += len(out.tokens)
            draw.extend(out.tokens, out.rows)
            draw.extras |= out.extras or {}
            if out.routes is not None:
                draw.routes.add(out.routes)
            if (reason := out.finish) is not None:
                del self.active[out.request_id]
                self._name_precise(draw)
                done.append(draw.finish(reason, self._job.actor_id, self._job.actor.reported_kind))
        self.step_load = StepLoad(tokens, contexts, prompts)
        return done

    def _name_precise(self, draw: Draw) -> None:
        """Put (version, precise layers) of the versions that sampled a draw into its record."""
        if not self._precise:
            return
        versions = dict.fromkeys(version for _, version in draw.switches)
        pairs = [(v, self._precise[v]) for v in versions if v in self._precise]
        draw.extras[PRECISE_LAYERS] = np.array(pairs, np.int32).reshape(-1, 2)

    def decoding_s(self) -> dict[str, float]:
        """Seconds of steps since the first token of each request that has one."""
        now = self._decode_s
        return {
            i: d.decoded_s + (0.0 if d.decoding_since is None else now - d.decoding_since)
            for i, d in self.active.items()
            if d.started
        }

    def _until_stop(self, draw: Draw, out: Output) -> Output:
        """The output up to the token that completes a stop string, where one does. A step may give
        several tokens, and the core may have ended the request at the last of them."""
        if draw.watcher is None:
            return out
        seen = out.tokens if out.finish is None else out.tokens[:-1]
        for count, token in enumerate(seen, 1):
            if draw.watcher.push(token):
                if out.finish is None:
                    self._core.abort([out.request_id])
                rows = leading(out.rows, count)
                return out._replace(tokens=out.tokens[:count], rows=rows, finish="stop")
        return out

    # -- around a change of version ----------------------------------------------------------------

    def set_version(self, version: int, precise_layers: int | None = None) -> None:
        """Tokens sampled from now on carry `version`, also in running requests; records name
        the `precise_layers` of each version that sampled them, where a set-point moves them."""
        self.version = version
        if precise_layers is not None:
            self._precise[version] = precise_layers
        for draw in self.active.values():
            draw.switch(version)

    def begin_drain(self) -> None:
        """Let the requests that have sampled a token finish; hold back all others and all new."""
        if not self._draining:
            self._draining = True
            self._held = self.withdraw(started=False) + self._held

    def hold_all(self) -> None:
        """Take every request out of the core, with its tokens, and hold it and all new requests
        until `end_drain`."""
        self._draining = True
        self._held = self.withdraw(started=True) + self._held

    def end_drain(self) -> None:
        """Queue what was held back, in order, under the current version."""
        self._draining = False
        self._let_in()

    def drained(self) -> bool:
        """True if a drain was begun and nothing runs any more."""
        return self._draining and not self.active

    def withdraw(self, *, started: bool) -> list[Draw]:
        """Take requests out of the core, in order: the requests that it has not begun and, if
        `started`, the others, too."""
        draws = [d for d in self.active.values() if started or not d.started]
        ids = [d.request.request_id for d in draws]
        spent = self.decoding_s()
        for request_id, draw in zip(ids, draws, strict=True):
            # Time in the queue after a resubmission does not count.
            draw.decoded_s = spent.get(request_id, 0.0)
            draw.withdrawn()
            del self.active[request_id]
        self._core.abort(ids)
        return draws

    def resubmit(self, draws: Iterable[Draw]) -> None:
        """Queue withdrawn requests under the current version; they keep the tokens they have."""
        for draw in draws:
            draw.switch(self.version)
            draw.resubmissions += bool(draw.tokens)
            self._submit(draw)


class BookedEngine(RolloutEngine):
    """A rollout engine whose requests are a `RequestBook`'s. Not thread-safe: one thread owns
    it."""

    def __init__(self, book: RequestBook) -> None:
        self._book = book
        self._ready: list[Trajectory] = []  # finished by an update

    @property
    def version(self) -> int:
        """Policy version that the tokens sampled now carry."""
        return self._book.version

    def add(self, requests: Sequence[Request], begun: Sequence[Trajectory] = ()) -> None:
        """Queue requests, all or none, some of them with the tokens that another engine sampled.
        Raises ValueError for one that the engine cannot serve."""
        self._book.add(requests, begun)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop requests; unknown ids are ignored."""
        self._book.abort(request_ids)

    def cut(self, request_ids: Iterable[str]) -> list[Trajectory]:
        """Drop requests and return their records so far."""
        return self._book.cut(request_ids)

    def unfinished(self) -> int:
        """Requests queued, running, held back by a drain, or finished by an update and not yet
        given by `step`."""
        return self._book.unfinished() + len(self._ready)

    def step(self) -> list[Trajectory]:
        """One decode step; the trajectories that finished in it, unscored.

        Raises RuntimeError if the core failed a request.
        """
        done, self._ready = self._ready, []
        return done + self._book.decode()

    def hold_newer(self, full: float) -> None:
        """From now on requests of newer versions wait while one of an older version is unfinished
        and at least `full` are in the batch."""
        self._book.full_for_newer = full

    def load_of_step(self) -> StepLoad:
        """Return the work of the last step."""
        return self._book.step_load

    def decoding_s(self) -> dict[str, float]:
        """Seconds of decode steps since the first output of each request that has one; waiting and
        loading weights do not count."""
        return self._book.decoding_s()

    def begin_drain(self) -> None:
        """Let the requests that have begun finish; hold back all others and all new."""
        self._book.begin_drain()

    def end_drain(self) -> None:
        """Queue what was held back, in order, under the current version."""
        self._book.end_drain()

    def drained(self) -> bool:
        """True if a drain was begun and nothing runs any more."""
        return self._book.drained()

    def sleep(self) -> float:
        """Free the memory that another process is to use; returns the bytes freed. Requests that
        run, and new ones, are held until `wake`."""
        self._ready += self._book.settle()
        self._book.hold_all()
        return self._free()

    def wake(self, what: Wake) -> None:
        """Take memory back: first for the "weights", which may then be loaded, then for "all"."""
        self._take_back(what)
        if what == "all":
            self._book.end_drain()

    def _free(self) -> float:
        """Free the memory that an engine gives up in `sleep` and return its bytes; nothing by
        default."""
        return 0.0

    def _take_back(self, what: Wake) -> None:
        """Take back the memory that `_free` gave up."""

    def set_version(self, version: int) -> None:
        """Have tokens carry `version` from the next step on; the weights stay (a frozen draft)."""
        self._ready += self._book.settle()
        self._book.set_version(version)

    def _finish_active(self) -> None:
        """Decode the core's requests to their ends."""
        while self._book.active:
            self._ready += self._book.decode()
        self._ready += self._book.settle()
