"""A masked-diffusion model as a sampler whose weights change between two denoising steps."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from rlcore.interfaces import WeightStream
from rlcore.models.masked_folder import mask_token_id
from rlcore.models.text import load_tokenizer
from rlcore.rollout.booked import BookedEngine
from rlcore.rollout.checks import check_model
from rlcore.rollout.engines.diffusion.core import DiffusionCore
from rlcore.rollout.engines.diffusion.held_weights import HeldWeights
from rlcore.rollout.engines.diffusion.model import MaskedModel
from rlcore.rollout.request_book import RequestBook
from rlcore.rollout.specs import EngineJob
from rlcore.spec import refuse
from rlcore.types import OnPublish


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
        self._weights = HeldWeights(model.weights, job.actor)
        self.core = DiffusionCore(
            model, job.actor, job.diffusion, mask_id=mask_id, end_id=int(tokenizer.eos_token_id)
        )
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
