"""The weights of a diffusion engine: loads what was published, rounded and cast for its kind of
actor, and reports checksums that prove what it holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from rlcore.interfaces import WeightStream
from rlcore.models.masked_folder import NAMES
from rlcore.rollout.specs import ActorSpec
from rlcore.weights.checksum import tensor_checksum
from rlcore.weights.manifest import check_shapes
from rlcore.weights.rounding import round_weights
from rlcore.weights.stream import whole


class HeldWeights:
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
