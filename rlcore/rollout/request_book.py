"""The requests of one engine: those its core decodes, those held back, and the version that samples their tokens.

Imports nothing of vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rlcore.rollout.segments import Sample
from rlcore.rollout.stop_text import StopWatcher
from rlcore.seeding import derive_seed
from rlcore.types import ActorKind, FinishReason, Request, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlcore.rollout.vllm_core import Output, VllmCore


class RequestBook:
    """Queues requests in the core, withdraws and resubmits them, and makes trajectories of what they sampled."""

    def __init__(
        self,
        core: VllmCore,
        tokenizer: PreTrainedTokenizerBase,
        *,
        actor_id: str,
        actor_kind: ActorKind,
        max_len: int,
        max_k: int,
        vocab: int,
        salted: bool,
        version: int,
    ) -> None:
        """`max_len`: tokens of a prompt and its response. `max_k`: the most top log-probs a request may ask for.

        `salted`: requests share cached prefixes only with those queued under the same version. `version`: samples now.
        """
        self._core, self._tokenizer = core, tokenizer
        self._actor_id, self._actor_kind = actor_id, actor_kind
        self._max_len, self._max_k, self._vocab, self._salted = max_len, max_k, vocab, salted
        self.version = version
        self.active: dict[str, Sample] = {}  # request id -> sample, in order of admission
        self.step_tokens = 0  # response tokens sampled by the last step
        self._held: list[Sample] = []  # not started, waiting for a drain to end
        self._draining = False

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests, all or none. Raises ValueError for one that the engine cannot serve."""
        samples = [self._sample(r) for r in requests]
        ids = [s.request.request_id for s in samples]
        known = self.active.keys() | {s.request.request_id for s in self._held}
        if len(set(ids)) < len(ids) or (clash := known.intersection(ids)):
            raise ValueError(f"request ids must be unique among unfinished requests: {sorted(clash or ids)[0]} is not")
        if self._draining:
            self._held += samples
            return
        for sample in samples:
            self._submit(sample)

    def _sample(self, request: Request) -> Sample:
        spec, prompt = request.sampling, len(request.prompt_ids)
        if not 0 < prompt < self._max_len:
            raise ValueError(
                f"{request.request_id}: a prompt of {prompt} tokens does not fit model.max_len={self._max_len}, "
                f"which must hold it and at least one sampled token"
            )
        if spec.logprobs_k > self._max_k:
            raise ValueError(
                f"{request.request_id}: rollout.logprobs_k={spec.logprobs_k} is above the {self._max_k} "
                f"this engine was started for"
            )
        if int(max(request.prompt_ids)) >= self._vocab or int(min(request.prompt_ids)) < 0:
            raise ValueError(f"{request.request_id}: prompt token ids must lie in 0..{self._vocab - 1}")
        return Sample(
            request=request,
            budget=min(spec.max_new_tokens, self._max_len - prompt),
            version=self.version,
            watcher=StopWatcher(self._tokenizer, spec.stop) if spec.stop else None,
        )

    def _submit(self, sample: Sample) -> None:
        """Hand a sample to the engine core: the prompt, then the tokens it has so far."""
        request = sample.request
        seed = request.seed
        if sample.segments:  # never the draws of an earlier segment again
            seed = derive_seed(seed, "rollout/resubmit", sample.segments)
        self._core.add(
            request.request_id,
            [*map(int, request.prompt_ids), *sample.tokens],
            request.sampling,
            max_tokens=sample.budget - len(sample.tokens),
            seed=seed,
            prompt_len=len(request.prompt_ids),
            cache_salt=f"v{self.version}" if self._salted else None,
        )
        self.active[request.request_id] = sample

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop requests; unknown ids are ignored."""
        ids = set(request_ids)
        self._held = [s for s in self._held if s.request.request_id not in ids]
        self._core.abort([i for i in ids if self.active.pop(i, None) is not None])

    def unfinished(self) -> int:
        """Requests queued, running or held back."""
        return len(self.active) + len(self._held)

    def decode(self) -> list[Trajectory]:
        """One step of the core; the trajectories that finished in it. Raises RuntimeError if vLLM failed one."""
        done = []
        self.step_tokens = 0
        for out in list(self._core.step()):
            sample = self.active.get(out.request_id)
            if sample is None:
                continue
            self.step_tokens += len(out.tokens)
            sample.extend(out.tokens, out.rows)
            if (reason := self._finish_reason(sample, out)) is not None:
                del self.active[out.request_id]
                done.append(sample.finish(reason, self._actor_id, self._actor_kind))
        return done

    def _finish_reason(self, sample: Sample, out: Output) -> FinishReason | None:
        if out.finish is None and sample.watcher is not None and any([sample.watcher.push(t) for t in out.tokens]):
            self._core.abort([out.request_id])
            return "stop"
        return out.finish

    # -- around a change of version ----------------------------------------------------------------------------------

    def stamp(self, version: int) -> None:
        """Tokens sampled from now on carry `version`, those of running requests too."""
        self.version = version
        for sample in self.active.values():
            sample.switch(version)

    def begin_drain(self) -> None:
        """Let the requests that have sampled a token finish; hold back all others and all new ones."""
        if not self._draining:
            self._draining = True
            self._held += self.withdraw(started=False)

    def end_drain(self) -> None:
        """Queue what was held back, in order, under the version of now."""
        self._draining = False
        held, self._held = self._held, []
        self.resubmit(held)

    def drained(self) -> bool:
        """True when a drain was begun and nothing runs any more."""
        return self._draining and not self.active

    def withdraw(self, *, started: bool) -> list[Sample]:
        """Take requests out of the core, in order: those without a token and, if `started`, those with tokens too."""
        samples = [s for s in self.active.values() if started or not s.tokens]
        ids = [s.request.request_id for s in samples]
        for request_id in ids:
            del self.active[request_id]
        self._core.abort(ids)
        return samples

    def resubmit(self, samples: Iterable[Sample]) -> None:
        """Queue withdrawn requests under the version of now; what they have sampled stays theirs."""
        for sample in samples:
            sample.switch(self.version)
            sample.segments += bool(sample.tokens)
            self._submit(sample)
