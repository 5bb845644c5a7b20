"""The masked inputs of a masked-diffusion model, made of a prompt and its response, for the
estimate of log-probs and for supervised training. NumPy alone.

The estimate is the one-pass one of d1 (arXiv 2504.12216, section 3.1), which papers/ais.txt uses:
the whole response is masked, and so is each token of the prompt with a probability of 0.15. One
forward pass then gives log p of every response token. A response is as long as the canvas on which
it was denoised; what follows its end of sequence stays masked and is not scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlcore.seeding import derive_seed
from rlcore.types import Trajectory

# of a record, among its extras
SEED, PROMPT_MASK, CANVAS = "mask_seed", "prompt_mask", "canvas"


@dataclass(frozen=True, slots=True)
class Estimate:
    """How one response's log-probs are estimated: what a record carries of it, so that every pass
    over it is the same estimate.

    Example: Estimate(seed=7, prompt_mask=np.array([False, True]), canvas=16)
    """

    seed: int
    prompt_mask: np.ndarray  # [P] bool, True where a token of the prompt is hidden
    canvas: int  # positions of the response, all of them hidden

    @classmethod
    def drawn(cls, seed: int, prompt: int, canvas: int, share: float) -> Estimate:
        """Of a prompt of that many tokens, each hidden with probability `share`."""
        return cls(seed, np.random.default_rng(seed).random(prompt) < share, canvas)

    @classmethod
    def of_request(cls, seed: int, prompt: int, canvas: int, share: float) -> Estimate:
        """The one that a request's seed stands for."""
        return cls.drawn(derive_seed(seed, "prompt-mask"), prompt, canvas, share)

    @classmethod
    def of_record(cls, t: Trajectory) -> Estimate:
        """Raises ValueError for a record of another kind of model."""
        missing = [name for name in (SEED, PROMPT_MASK, CANVAS) if name not in t.extras]
        if missing:
            raise ValueError(
                f"trajectory {t.request_id} has no {missing[0]}: its log-probs are not those of a "
                "masked-diffusion engine"
            )
        seed, canvas = int(t.extras[SEED][0]), int(t.extras[CANVAS][0])
        return cls(seed, t.extras[PROMPT_MASK], canvas)

    def again(self, share: float) -> Estimate:
        """Another draw of the same estimate, which follows from this one's seed."""
        seed = derive_seed(self.seed, "prompt-mask/again")
        return Estimate.drawn(seed, len(self.prompt_mask), self.canvas, share)

    def extras(self) -> dict[str, np.ndarray]:
        """The same as arrays of a record."""
        return {
            SEED: np.array([self.seed], np.int64),
            PROMPT_MASK: self.prompt_mask,
            CANVAS: np.array([self.canvas], np.int32),
        }

    def inputs(self, prompt_ids: np.ndarray, mask_id: int) -> np.ndarray:
        """[P + canvas] int64: what the model reads."""
        hidden = np.full(self.canvas, mask_id, np.int64)
        return np.concatenate([np.where(self.prompt_mask, mask_id, prompt_ids), hidden])


def masked_answer(
    answer: Sequence[int], end: int, canvas: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """(tokens [n], masked [n] bool) of an answer as it is trained on: filled up to the canvas with
    the end of sequence, and with a number of masks that is uniform on 1..n (LLaDA's masked
    cross-entropy, arXiv 2502.09992 eq. 5, with a count in the place of a ratio)."""
    tokens = np.full(max(canvas, len(answer) + 1), end, np.int64)
    tokens[: len(answer)] = answer
    masked = np.zeros(len(tokens), bool)
    masked[rng.permutation(len(tokens))[: rng.integers(1, len(tokens) + 1)]] = True
    return tokens, masked
