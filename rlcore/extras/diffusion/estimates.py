"""The masked inputs of a masked-diffusion model, made of a prompt and its response, for the
estimate of log-probs, its variance, and supervised training.

The estimate is the one-pass one of d1 (arXiv 2504.12216, section 3.1), which papers/ais.txt uses.
The whole response is masked, and so is each token of the prompt with a probability of 0.15. One
forward pass then gives log p of every response token. A response is as long as the canvas on which
it was denoised; what follows its end of sequence stays masked and is not scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from rlcore.extras.diffusion.folder import mask_token_id
from rlcore.interfaces import Reduce
from rlcore.learner.protocols import LogProbEstimator
from rlcore.learner.sequences import TokenSequence
from rlcore.models.specs import DiffusionSpec
from rlcore.seeding import derive_seed
from rlcore.types import Group, Trajectory

if TYPE_CHECKING:
    from rlcore.config.schema import RunConfig

# of a record, among its extras
SEED, PROMPT_MASK, CANVAS = "mask_seed", "prompt_mask", "canvas"
MEASURED = 4  # records of a rank whose estimate is drawn twice: two short passes a step


@dataclass(frozen=True, slots=True)
class Estimate:
    """The estimate of one response's log-probs, as a record carries it, so that every pass over the
    record makes the same estimate.

    Example: Estimate(seed=7, prompt_mask=np.array([False, True]), canvas=16)
    """

    seed: int
    prompt_mask: np.ndarray  # [P] bool, True where a token of the prompt is hidden
    canvas: int  # positions of the response, all of them hidden

    @classmethod
    def drawn(cls, seed: int, prompt: int, canvas: int, share: float) -> Estimate:
        """An estimate for a prompt of `prompt` tokens, each hidden with probability `share`."""
        return cls(seed, np.random.default_rng(seed).random(prompt) < share, canvas)

    @classmethod
    def of_request(cls, seed: int, prompt: int, canvas: int, share: float) -> Estimate:
        """The estimate that a request's seed determines."""
        return cls.drawn(derive_seed(seed, "prompt-mask"), prompt, canvas, share)

    @classmethod
    def of_record(cls, t: Trajectory) -> Estimate:
        """Raises ValueError for a record of another kind of model."""
        missing = [name for name in (SEED, PROMPT_MASK, CANVAS) if name not in t.extras]
        if missing:
            raise ValueError(
                f"trajectory {t.request_id} has no {missing[0]}: its log-probs do not come from a "
                "masked-diffusion engine"
            )
        seed, canvas = int(t.extras[SEED][0]), int(t.extras[CANVAS][0])
        return cls(seed, t.extras[PROMPT_MASK], canvas)

    def again(self, share: float) -> Estimate:
        """Another draw of the same estimate, which follows from this one's seed."""
        seed = derive_seed(self.seed, "prompt-mask/again")
        return Estimate.drawn(seed, len(self.prompt_mask), self.canvas, share)

    def extras(self) -> dict[str, np.ndarray]:
        """The estimate as arrays of a record."""
        return {
            SEED: np.array([self.seed], np.int64),
            PROMPT_MASK: self.prompt_mask,
            CANVAS: np.array([self.canvas], np.int32),
        }

    def inputs(self, prompt_ids: np.ndarray, mask_id: int) -> np.ndarray:
        """[P + canvas] int64: what the model reads."""
        hidden = np.full(self.canvas, mask_id, np.int64)
        return np.concatenate([np.where(self.prompt_mask, mask_id, prompt_ids), hidden])


@dataclass(frozen=True, slots=True)
class MaskedSequence:
    """One sequence of a masked-diffusion model: some positions are hidden, and each predicts the
    token at its own place. Every position attends to every other.

    Example, a prompt of two tokens and a response of two on a canvas of three:
    MaskedSequence(inputs=[5, 9, m, m, m], predicting=[2, 3], targets=[4, 7], prompt_len=2)
    """

    inputs: np.ndarray  # [W] int64, what the model reads
    predicting: np.ndarray  # [S] int64: the positions that are scored, in order
    targets: np.ndarray  # [S]: their tokens
    prompt_len: int
    sharper: float = 1.0  # see `TokenSequence`

    bidirectional: ClassVar[bool] = True

    @classmethod
    def of_record(
        cls, t: Trajectory, sharper: float, estimate: Estimate, mask_id: int
    ) -> MaskedSequence:
        """The sequence by which a record's log-probs are estimated (`Estimate`)."""
        prompt, targets = t.prompt_ids, t.sampled_ids
        predicting = len(prompt) + np.arange(len(targets))
        return cls(estimate.inputs(prompt, mask_id), predicting, targets, len(prompt), sharper)

    @classmethod
    def of_answer(
        cls, inputs: np.ndarray, masked: np.ndarray, tokens: np.ndarray, mask_id: int
    ) -> MaskedSequence:
        """The sequence of a prompt, whose masks are set, and of an answer [n] whose `masked` tokens
        [n] bool are scored."""
        read = np.concatenate([inputs, np.where(masked, mask_id, tokens)]).astype(np.int64)
        places = np.flatnonzero(masked)
        return cls(read, len(inputs) + places, tokens[places], len(inputs))

    @property
    def scored(self) -> int:
        """Tokens that are predicted."""
        return len(self.targets)

    def __len__(self) -> int:
        """Positions to compute."""
        return len(self.inputs)


class MaskedEstimator(LogProbEstimator):
    """Reads records by the estimate that their actor made, and measures how much another draw of
    the hidden tokens would change it."""

    def __init__(self, model_path: str, spec: DiffusionSpec) -> None:
        """Raises UserError for a folder without a mask token."""
        self._mask_id = mask_token_id(model_path)
        self._share = spec.prompt_masking

    def read(self, t: Trajectory, sharper: float = 1.0) -> MaskedSequence:
        """The inputs under which the actor estimated. Raises ValueError for a record of a causal
        model."""
        return MaskedSequence.of_record(t, sharper, Estimate.of_record(t), self._mask_id)

    def twice(self, groups: Sequence[Group]) -> tuple[list[MaskedSequence], list[MaskedSequence]]:
        """The first responses of some groups as their records have them, and with the tokens of
        their prompts hidden anew, each with probability `prompt_masking`."""
        records = [t for group in groups for episode in group.episodes[:1] for t in episode.parts]
        chosen = [t for t in records if len(t.logp_inf)][:MEASURED]
        anew = [
            replace(t, extras=Estimate.of_record(t).again(self._share).extras()) for t in chosen
        ]
        return [self.read(t) for t in chosen], [self.read(t) for t in anew]

    def metrics(
        self, pairs: Sequence[tuple[np.ndarray, np.ndarray]], reduce: Reduce
    ) -> dict[str, float]:
        """Half the squared difference of two draws, which estimates their variance without bias."""
        sums = torch.zeros(4, dtype=torch.float64)
        for one, two in pairs:
            gap = torch.from_numpy(one - two).double()
            counts = torch.tensor([len(gap), 1.0], dtype=torch.float64)
            sums += torch.stack([gap.square().sum() / 2, gap.sum().square() / 2, *counts])
        of_tokens, of_sequences, n, sequences = reduce(sums).tolist()
        return {
            "estimate/token_variance": of_tokens / max(n, 1.0),
            "estimate/sequence_variance": of_sequences / max(sequences, 1.0),
        }


def masked_answer(
    answer: Sequence[int], end: int, canvas: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """(tokens [n], masked [n] bool) of an answer as it is trained on. It is filled up to the canvas
    with the end of sequence, and has a number of masks that is uniform on 1..n (LLaDA's masked
    cross-entropy, arXiv 2502.09992 eq. 5, with a count instead of a ratio)."""
    tokens = np.full(max(canvas, len(answer) + 1), end, np.int64)
    tokens[: len(answer)] = answer
    masked = np.zeros(len(tokens), bool)
    masked[rng.permutation(len(tokens))[: rng.integers(1, len(tokens) + 1)]] = True
    return tokens, masked


class MaskedAnswers:
    """Makes worked answers into examples of a masked-diffusion model's warm-up: on a whole canvas,
    partly hidden."""

    def __init__(self, config: RunConfig, model_path: str, end: int) -> None:
        """`end`: the end of sequence."""
        assert config.model.diffusion is not None
        self._config = config
        self._share = config.model.diffusion.prompt_masking
        self._mask_id = mask_token_id(model_path)
        self._end = end
        self._rng = np.random.default_rng(derive_seed(config.seed, "warm-up/masks"))

    def __call__(self, one: TokenSequence, label: str) -> MaskedSequence:
        """A worked answer of a task, under the next draw of masks.

        Every second prompt is hidden as in the estimate of log-probs: a response is denoised behind
        a whole prompt and scored behind a hidden one.
        """
        prompt = one.token_ids[: one.prompt_len]
        share = self._share if self._rng.random() < 0.5 else 0.0
        read = np.where(self._rng.random(len(prompt)) < share, self._mask_id, prompt)
        canvas = self._config.rollout_of(label).max_new_tokens
        tokens, masked = masked_answer(one.targets[:-1].tolist(), self._end, canvas, self._rng)
        return MaskedSequence.of_answer(read, masked, tokens, self._mask_id)
