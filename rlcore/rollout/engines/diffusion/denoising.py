"""One response on its way from masks to tokens. NumPy alone.

As papers/ais.txt (C.2) has it for LLaDA: blocks one after the other, from the left; a step draws a
candidate for every masked position of the current block and keeps the most confident ones.
"""

from __future__ import annotations

import numpy as np

from rlcore.models.masking import Estimate
from rlcore.models.specs import DiffusionSpec
from rlcore.rollout.core import CoreRequest
from rlcore.types import FinishReason


class Denoising:
    """A prompt and its canvas. Its draws depend on the request's seed and on how many steps it has
    taken, and on no other request."""

    def __init__(
        self, request: CoreRequest, spec: DiffusionSpec, *, mask_id: int, end_id: int
    ) -> None:
        """`request`: with the tokens of its prompt and no others."""
        self.request = request
        self._spec = spec
        self._mask_id = mask_id
        self._end_id = end_id
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
        if self._end_id in self.ids[self._start : self._end]:
            self.finish = "stop"
        elif self._end == len(self.ids):
            self.finish = "length"
        else:
            self._begin(self._end)

    def response(self) -> np.ndarray:
        """[S] the tokens up to the first end of sequence, with it."""
        canvas = self.ids[self.request.prompt_len : self._end]
        ends = np.flatnonzero(canvas == self._end_id)
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
