"""vLLM's receivers of weights, with a record of what the model took. Registered under names of
their own, in every process that imports this file.

`ipc` has run on one H100, unquantised; `nccl` and its patches are UNPROVEN on GPUs. vLLM drives the
reload of quantised layers itself; see vllm/distributed/weight_transfer/base.py. While it loads
patches it puts a function of its own in the place of `torch.Tensor.copy_`, for the whole process.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.distributed.weight_transfer.sparse_nccl_engine import (
    SparseNCCLWeightTransferEngine,
    SparseNCCLWeightTransferUpdateInfo,
)

from rlcore.weights.experts import as_held

BACKENDS = {"nccl": "rlcore_nccl", "ipc": "rlcore_ipc"}  # cluster.transport -> vLLM's name


class Recording:
    """Mixed in before one of vLLM's receivers."""

    model: Any
    loaded: set[str]  # parameters that the model took
    kept: dict[str, torch.Tensor]  # copies, on the host, of the weights that will be proven
    _keep: Collection[str] = ()
    _second_names: Collection[str] = ()
    patched = False  # what arrives, or arrived last, are patches
    _complete = False  # a set of this group has arrived, and no other has begun

    def expect(
        self, keep: Collection[str], second_names: Collection[str], *, patched: bool = False
    ) -> None:
        """A set follows. `keep`: of which weights to keep a copy; `second_names`: of tied weights,
        left out; `patched`: only changes come. Raises RuntimeError if there is no set that they
        could change."""
        if patched and not self._complete:
            raise RuntimeError("patches came before a whole set of weights")
        self.loaded = set()
        self.kept = {}
        self._keep = keep
        self._second_names = second_names
        self.patched = patched
        self._complete = False

    def init_transfer_engine(self, init_info: Any) -> None:
        """Join a group; leave the one before, whose members may be gone."""
        self._complete = False
        self.shutdown()  # type: ignore[attr-defined]
        super().init_transfer_engine(init_info)  # type: ignore[misc]

    def finish_weight_update(self) -> None:
        """vLLM's own."""
        super().finish_weight_update()  # type: ignore[misc]
        self._complete = True

    def receive_weights(self, update_info: Any) -> None:
        """vLLM's own, which loads into `self.model`."""
        model = self.model
        self.model = _Tap(model, self)
        try:
            super().receive_weights(update_info)  # type: ignore[misc]
        finally:
            self.model = model

    def take(self, model: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load some weights into the model, and record them."""
        given = [(n, t) for n, t in weights if n not in self._second_names]
        self.kept |= {n: t.to("cpu", copy=True) for n, t in given if n in self._keep}
        taken = set(model.load_weights(given))
        self.loaded |= {as_held(n) for n in taken}
        return taken


class _Tap:
    """The model, as vLLM's receivers call it while they load."""

    def __init__(self, model: Any, recording: Recording) -> None:
        self._model = model
        self._recording = recording

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return self._recording.take(self._model, weights)


class _Lifecycle(NCCLWeightTransferEngine):
    """Whole sets and patches over one communicator."""

    patched: bool

    def start_weight_update(self) -> None:
        """Patches are written into the parameters as they are: vLLM's reload would begin with
        empty ones."""
        if not self.patched:
            super().start_weight_update()

    def finish_weight_update(self) -> None:
        """The end of that reload."""
        if not self.patched:
            super().finish_weight_update()

    def parse_update_info(self, update_dict: dict[str, Any]) -> Any:
        """Of either kind: only patches are counted."""
        if "num_updates_list" in update_dict:
            return SparseNCCLWeightTransferUpdateInfo(**update_dict)
        return super().parse_update_info(update_dict)

    def receive_weights(self, update_info: Any) -> None:
        """Load what is broadcast."""
        if not isinstance(update_info, SparseNCCLWeightTransferUpdateInfo):
            super().receive_weights(update_info)
            return
        patching = SparseNCCLWeightTransferEngine(
            self.config, self.vllm_config, self.device, self.model
        )
        patching.model_update_group = self.model_update_group
        patching.receive_weights(update_info)


class NcclReceiver(Recording, _Lifecycle):
    """Packed broadcast, and patches of what changed."""


class IpcReceiver(Recording, IPCWeightTransferEngine):
    """Memory of a learner on the same GPU."""


WeightTransferEngineFactory.register_engine(BACKENDS["nccl"], __name__, NcclReceiver.__name__)
WeightTransferEngineFactory.register_engine(BACKENDS["ipc"], __name__, IpcReceiver.__name__)
