"""The model of a diffusion engine: passes over rows of unequal length, the draw of candidates, and
log-probs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlcore.extras.diffusion.folder import NAMES
from rlcore.interfaces import WeightStream
from rlcore.rollout.specs import ActorSpec
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
