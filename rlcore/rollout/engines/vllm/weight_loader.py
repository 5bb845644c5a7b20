"""The weights of one engine: loads published weights, rounded and cast for its kind of actor, and
reports checksums that prove which weights it holds."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch

from rlcore.interfaces import WeightStream
from rlcore.models.folder import read_shapes, read_weights
from rlcore.rollout.engines.vllm.arguments import adapter_folder
from rlcore.rollout.specs import ActorSpec
from rlcore.weights.adapters import AdapterShape, adapter_shapes
from rlcore.weights.arrival import PATCHES, EngineTransfer
from rlcore.weights.blob import write_blob
from rlcore.weights.manifest import check_shapes, tensor_checksum
from rlcore.weights.specs import RoundingSpec
from rlcore.weights.stream import whole


class ModelRanks(Protocol):
    """The processes that hold the model (`VllmCore`); the methods are `WeightExtension`'s."""

    def rpc(self, method: str, *args: Any) -> Any: ...

    def send(self, method: str, tensors: Mapping[str, torch.Tensor], *args: Any) -> Any: ...

    def load_adapter(self, folder: str) -> None: ...


class WeightLoader:
    """Loads sets of weights into an engine's ranks and reports what they hold of them."""

    def __init__(
        self,
        model_path: str,
        ranks: ModelRanks,
        actor: ActorSpec,
        adapter: AdapterShape | None = None,
    ) -> None:
        """`ranks` have just loaded `model_path`. `adapter`: published over it; nothing at first."""
        self._ranks = ranks
        self._actor = actor
        self._dtype: torch.dtype = getattr(torch, actor.compute_dtype)
        self._quantised = actor.quantised_by_engine
        self._shapes = read_shapes(model_path)
        self._rounding = self._with_precise(actor.precise_layers)
        self._arrived: dict[str, tuple[int, int]] = {}  # name -> checksums (as published, as held)
        self._proven: dict[str, int] = {}  # name of a quantised weight -> checksum as published
        # If vLLM quantises: gives the set it loaded last, until that was proven once.
        self._to_prove: Callable[[], Mapping[str, torch.Tensor]] | None = partial(
            read_weights, model_path
        )
        self._adapter = adapter
        self._factors = {} if adapter is None else adapter_shapes(self._shapes, adapter)
        self._ranks.rpc("rl_check_live")
        if actor.rounding != "none":
            self.load(whole(read_weights(model_path)))
        if adapter is not None:
            # requests have an adapter from the first one on, and keep it through every update
            self.load(whole({n: torch.zeros(s) for n, s in self._factors.items()}))

    def names(self) -> list[str]:
        """Hugging Face names of all weights, tied ones once."""
        return list(self._shapes)

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ValueError, naming the weight, unless these are exactly the names and shapes of the
        model, or of its adapter, or of both where the actor has one."""
        expected = self._factors or self._shapes
        if self._factors and not shapes.keys().isdisjoint(self._shapes):
            expected = self._shapes | self._factors
        check_shapes(shapes, expected)

    def load(self, weights: WeightStream) -> None:
        """Replace all weights, a bucket at a time.

        Where vLLM quantises a set, the weights whose checksums will be asked for are kept until
        then. Raises RuntimeError if vLLM did not take every weight: the engine must not serve then.
        """
        self._arrived = {}
        self._proven = {}
        if weights.precise_layers is not None:
            self._rounding = self._with_precise(weights.precise_layers)
        keep = self._kept_for_proof(weights.proven)
        kept: dict[str, torch.Tensor] = {}
        factors: dict[str, torch.Tensor] = {}
        base = [n for n in weights.shapes if n not in self._factors]
        if base:
            self._ranks.rpc("rl_begin_load", self._quantised)
        for bucket in weights.buckets:
            served = self._served(bucket)
            factors |= {n: t.clone() for n, t in served.items() if n in self._factors}
            if rest := {n: t for n, t in served.items() if n not in self._factors}:
                self._ranks.send("rl_load", rest)
            kept |= {n: t for n, t in bucket.items() if n in keep}
            del bucket, served, rest  # freed before the next one is asked for
        if base:
            self._ranks.rpc("rl_end_load", base)
        if factors:
            self._load_adapter(factors)
        if self._quantised:
            self._to_prove = lambda: kept

    def _with_precise(self, layers: int) -> RoundingSpec:
        """The actor's rounding, without its last decoder layers."""
        if self._actor.rounding == "none":
            return self._actor
        from rlcore.weights.rounding import precise_patterns

        kept = (*self._actor.keep_high_precision, *precise_patterns(self._shapes, layers))
        return self._actor.model_copy(update={"keep_high_precision": kept})

    def _load_adapter(self, factors: Mapping[str, torch.Tensor]) -> None:
        assert self._adapter is not None
        with adapter_folder(factors, self._adapter.rank) as folder:
            self._ranks.load_adapter(folder)

    def receive(self, transfer: EngineTransfer, proven: Collection[str] | None) -> None:
        """Have vLLM's workers receive a set by themselves; `proven`: names whose checksums will be
        asked for. Raises RuntimeError if vLLM did not take every weight that was sent: of patches
        the changed ones, otherwise all.
        """
        self._arrived = {}
        self._proven = {}
        self._to_prove = None
        keep = list(self._kept_for_proof(proven))
        sent: list[str] = []

        def carry_out(verb: str, payload: Any) -> None:
            if verb == "join":
                self._ranks.rpc("init_weight_transfer_engine", payload)
            elif verb == "begin":
                patched = payload == PATCHES
                sent.extend(() if patched else self._shapes)
                self._ranks.rpc("rl_expect", keep, patched)
                self._ranks.rpc("start_weight_update")
            elif verb == "receive":
                self._ranks.rpc("update_weights", payload)
                sent.extend(_patched_names(payload))
            else:
                self._ranks.rpc("finish_weight_update")
                self._ranks.rpc("rl_all_received", sent)

        transfer.serve(carry_out)
        if keep:
            self._proven = self._ranks.rpc("rl_proven_received")

    def _served(self, bucket: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A bucket as this kind of actor serves it."""
        rounded = bucket
        if self._rounding.rounding != "none":
            from rlcore.weights.rounding import round_weights

            rounded = round_weights(bucket, self._rounding)
        served = {n: t.to(self._dtype) for n, t in rounded.items()}
        for name, published in bucket.items():
            if served[name] is not published:
                self._arrived[name] = (tensor_checksum(published), tensor_checksum(served[name]))
        return served

    def _kept_for_proof(self, names: Collection[str] | None) -> Collection[str]:
        """Weights to keep so that the quantised ones among `names` can be proven (None: all)."""
        if not self._quantised:
            return ()
        wanted = [n for n in names or self._shapes if n in self._shapes]
        fused: dict[str, list[str]] = self._ranks.rpc("rl_quantised", wanted)
        return {part for parts in fused.values() for part in parts}

    def checksums(self, names: Iterable[str]) -> dict[str, int]:
        """Checksums of the weights as the engine holds them, under their Hugging Face names.

        With emulated rounding or another dtype than the published one, a weight that is exactly the
        rounding of what was published reports the published checksum, anything else its own. A
        weight that vLLM quantised is proven the same way: the published weight is quantised once
        more and compared with the bits held. A loaded set is kept for this until the first call
        only; a quantised weight that differs, or was not asked for then, is missing from the
        answer. Raises KeyError for a name that the model lacks.
        """
        wanted = list(names)
        if unknown := [n for n in wanted if n not in self._shapes and n not in self._factors]:
            raise KeyError(f"the engine's model has no weight {unknown[0]}")
        factors = [n for n in wanted if n in self._factors]
        wanted = [n for n in wanted if n in self._shapes]
        quantised: dict[str, list[str]] = (
            self._ranks.rpc("rl_quantised", wanted) if self._quantised else {}
        )
        self._prove(quantised)
        plain = [n for n in wanted if n not in quantised]
        held: dict[str, int] = self._ranks.rpc("rl_checksums", self._shapes, plain)
        if factors:
            held |= self._ranks.rpc("rl_adapter_checksums", self._factors, factors)
        held = {
            n: self._arrived[n][0] if self._arrived.get(n, (0, 0))[1] == c else c
            for n, c in held.items()
        }
        return held | {n: self._proven[n] for n in quantised if n in self._proven}

    def _prove(self, quantised: Mapping[str, list[str]]) -> None:
        """Note which quantised weights (name -> all of its fused parameter) belong to the set
        loaded last."""
        if self._to_prove is None or not quantised:
            return
        # Released here: a second whole model stays in memory only until this first question.
        tensors, self._to_prove = self._to_prove(), None
        parts = {
            part: tensors[part].to(self._dtype) for fused in quantised.values() for part in fused
        }
        proven = self._ranks.send("rl_proven", parts)
        self._proven = {n: tensor_checksum(tensors[n]) for n in proven}


def _patched_names(update: Any) -> list[str]:
    """Return the names of the weights that a request to receive patches; empty if it brings no
    patches. Requests by IPC have other forms."""
    patches = isinstance(update, Mapping) and "num_updates_list" in update
    return list(update["names"]) if patches else []


@contextmanager
def shared_file(tensors: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """The path of a safetensors file in memory, for processes on this machine to map.

    An anonymous file has no name in /dev/shm, so a process that is killed leaves nothing behind.
    The size of /dev/shm (64 MiB in many containers) does not limit it.
    """
    with os.fdopen(os.memfd_create("rlcore-weights"), "wb") as file:
        write_blob(file, tensors)
        file.flush()
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}"
