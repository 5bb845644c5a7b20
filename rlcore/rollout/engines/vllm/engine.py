"""The vLLM engine as a sampler whose weights change between two decode steps."""

from __future__ import annotations

import gc
from collections.abc import Iterable

import numpy as np
import torch

from rlcore.interfaces import Wake, WeightStream
from rlcore.models.folder import read_config
from rlcore.models.text import load_tokenizer
from rlcore.rollout.booked import BookedEngine
from rlcore.rollout.checks import check_model
from rlcore.rollout.engines.vllm.core import VllmCore
from rlcore.rollout.engines.vllm.held_weights import HeldWeights
from rlcore.rollout.engines.vllm.platform import check_platform
from rlcore.rollout.request_book import RequestBook
from rlcore.rollout.specs import EngineJob, RolloutSpec
from rlcore.rollout.transfer import EngineTransfer
from rlcore.types import OnPublish, Request, Trajectory


class VllmEngine(BookedEngine):
    """One in-process vLLM engine. Not thread-safe: one thread owns it."""

    def __init__(self, job: EngineJob) -> None:
        """Start the engine and warm it up.

        A sparse rule then holds for every engine started later in this process. Raises UserError
        for settings or a model folder that cannot work here.
        """
        check_platform(job.actor, job.key)
        check_model(job)
        vocab = int(read_config(job.model_path)["vocab_size"])
        self.core = VllmCore(job, vocab)
        self._weights = HeldWeights(job.model_path, self.core, job.actor, job.adapter)
        self._keep_kv = job.actor.kv_on_update == "keep"
        book = RequestBook(
            self.core,
            job,
            load_tokenizer(job.model_path),
            vocab=vocab,
            # Blocks of older weights stay cached then: new requests must not reuse them.
            salted=self._keep_kv,
        )
        super().__init__(book)
        self._warm_up(job.logprobs_k)
        gc.collect()
        # Loaded modules live as long as the process: no need to scan them during generation.
        gc.freeze()

    # -- requests ----------------------------------------------------------------------------------

    def running(self) -> int:
        """Requests in the current batch."""
        return self.core.running()

    def step(self) -> list[Trajectory]:
        """One decode step; the trajectories that finished in it, unscored.

        Raises RuntimeError if vLLM failed a request.
        """
        # A new thread takes torch's thread count at its first torch operation on many values, but
        # vLLM's attention plans with OpenMP's before that: read it, which sets OpenMP's.
        torch.get_num_threads()
        return super().step()

    # -- weights -----------------------------------------------------------------------------------

    def update_weights(self, version: int, weights: WeightStream, on_publish: OnPublish) -> None:
        """Load a whole set of weights as `version`, atomically between two steps.

        finish: decodes until the requests that have tokens are done (their trajectories come with
        the next `step`). abort: requests are resubmitted with the tokens they have. in_flight: they
        go on, see `kv_on_update`. Raises ValueError, the old weights untouched, for a set that is
        not the model's or a version that goes back.
        """
        if version < self.version and self._book.unfinished():
            raise ValueError(
                f"version {version} is older than {self.version} while requests are unfinished"
            )
        self._weights.check(weights.shapes)
        # Tokens that scheduled steps have yet to give are the old weights'.
        self._ready += self._book.settle()
        if on_publish == "finish":
            self._book.begin_drain()
            self._finish_active()
            self._switch(version, weights, running=False)
            self._book.end_drain()
        elif on_publish == "abort":
            draws = self._book.withdraw(started=True)
            self._switch(version, weights, running=False)
            self._book.resubmit(draws)
        else:  # in_flight
            unstarted = self._book.withdraw(started=False) if self._keep_kv else []
            self._switch(version, weights, running=True)
            self._book.resubmit(unstarted)

    def _switch(self, version: int, weights: WeightStream, *, running: bool) -> None:
        if isinstance(weights.buckets, EngineTransfer):
            self._weights.receive(weights.buckets, weights.proven)
        else:
            self._weights.load(weights)
        self._book.set_version(version)
        if running and self._keep_kv:
            return  # old keys and values stay on purpose; new requests carry another cache salt
        if not self.core.forget_prefixes(running=running):
            raise RuntimeError(
                "vLLM did not drop its prefix cache: keys and values of older weights would be "
                "reused"
            )

    def checksums(self, names: Iterable[str]) -> dict[str, int]:
        """Checksums of the weights as the engine holds them: see `HeldWeights.checksums`."""
        return self._weights.checksums(names)

    def names(self) -> list[str]:
        """Hugging Face names of all weights, tied ones once."""
        return self._weights.names()

    # -- memory ------------------------------------------------------------------------------------

    def _free(self) -> float:
        return self.core.sleep()

    def _take_back(self, what: Wake) -> None:
        self.core.wake(what)

    # -- start and end -----------------------------------------------------------------------------

    def _warm_up(self, logprobs_k: int) -> None:
        """The first step compiles and allocates: do it before the first request waits for it."""
        sampling = RolloutSpec(max_new_tokens=2, logprobs_k=logprobs_k).sampling()
        prompt = np.zeros(1, np.int32)
        self.add(
            [Request(-1, i, "warm-up", prompt, sampling, i, purpose="warm-up") for i in range(2)]
        )
        while self._book.active:
            self._book.decode()
        self.core.forget_prefixes()

    def close(self) -> None:
        """Stop the engine and free its memory."""
        self.core.close()
