"""Extensions of vLLM's workers that need vLLM. With tensor parallelism each worker is a separate
process, which imports this file before it loads its part of the model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from vllm import __version_tuple__
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.distributed.weight_transfer.sparse_nccl_engine import (
    SparseNCCLWeightTransferEngine,
    SparseNCCLWeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.v1.outputs import LogprobsTensors

from rlcore.models.folder import INDEX_FILE, weight_files
from rlcore.models.largest import largest

# Imported here too, so that every rank's process registers the loader and the receivers.
from rlcore.rollout.engines.vllm.patches import (
    DECAY_LOADER,
    LOGPROBS,
    ONEDNN,
    SAMPLING_BY_TOKEN,
    SGL_KERNEL,
    is_second,
)
from rlcore.rollout.engines.vllm.platform import on_cpu
from rlcore.rollout.engines.vllm.worker_extension import (
    WeightExtension,
    keep_published,
    second_names,
)
from rlcore.weights.experts import as_held
from rlcore.weights.manifest import tensor_checksum
from rlcore.weights.specs import ActivationRounding

SEVERAL = "the engine has several ranks"
BACKENDS = {"nccl": "rlcore_nccl", "ipc": "rlcore_ipc"}  # cluster.transport -> vLLM's name


# vLLM's receivers of weights, with a record of what the model took. Registered under names of
# their own, in every process that imports this file.
#
# `ipc` has run on one H100 with the locked vLLM, unquantised; `nccl` and its patches are UNPROVEN
# on GPUs. vLLM drives the reload of quantised layers itself; see
# vllm/distributed/weight_transfer/base.py. While it loads patches it replaces `torch.Tensor.copy_`
# by a function of its own, for the whole process.


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
        left out; `patched`: only changes come. Raises RuntimeError without a set that they could
        change."""
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
        """The update of either kind; only patches are counted."""
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


LOAD_FORMAT = "rlcore_folder"


@register_model_loader(LOAD_FORMAT)
class FolderLoader(DefaultModelLoader):
    """Reads the files of `weight_files` and no others.

    vLLM's own loader reads every safetensors file of a folder without an index, and with "auto" it
    would unpickle other formats.
    """

    def _prepare_weights(self, model_name_or_path: str, *_: Any, **__: Any) -> Any:
        files = [str(f) for f in weight_files(model_name_or_path)]
        if __version_tuple__ < (0, 27):  # of the GPU kit: it finds the index by itself
            return model_name_or_path, files, True
        return model_name_or_path, files, True, INDEX_FILE

    def load_model(self, vllm_config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        """vLLM's own loading, with norms as `cluster.cpu_fast_paths` asks: each norm chooses its
        function when it is built, each recurrent layer its loaders."""
        with ExitStack() as replaced:
            if vllm_config.additional_config.get("cpu_fast_paths"):
                from rlcore.rollout.engines.vllm.cpu.decoder import norm_kernels

                replaced.enter_context(norm_kernels())
            if vllm_config.model_config.has_inner_state:
                replaced.enter_context(DECAY_LOADER.replaced(keep_published))
            return super().load_model(vllm_config, *args, **kwargs)


class WorkerSide(WeightExtension):
    """Mixed into vLLM's worker class (`worker_extension_cls`)."""

    weight_transfer_engine: Any
    rl_shared: Any = None  # the `SharedPrompts` of this worker's runner

    def rl_plain_gather(self) -> None:
        """Sample without the ranks of the sampled tokens. The second runner's sampler has no such
        step: it counts ranks in its own kernel."""
        if not is_second(self.model_runner):
            LOGPROBS.replace(_gather_logprobs, of=self.model_runner.sampler)

    def rl_keep_rows(self, untried: bool = False) -> str | None:
        """Leave log-prob rows on the device until a record needs them, with `untried` on a GPU,
        too. Returns why not, None if they are left there."""
        from rlcore.rollout.engines.vllm.kept_rows import keep_rows

        return keep_rows(self.model_runner, untried)

    def rl_copy_rows(self) -> None:
        """Copy the rows that are on the device still."""
        self.model_runner.rl_rows.close_group()

    def rl_fast_paths(self, alone: bool) -> tuple[str | None, str | None]:
        """Sample without a draw of torch for each token, run the model's layers without vLLM's
        modules, and compute the common prefixes of a step's requests once. Returns why not the
        latter two, None where it does. `alone`: the engine has no other rank."""
        if not on_cpu():
            return "its graphs do so on GPUs", "vLLM's cache shares the blocks of prompts on GPUs"
        from rlcore.rollout.engines.vllm.cpu.decoder import PlainDecoder
        from rlcore.rollout.engines.vllm.cpu.quick_steps import SeededDraws
        from rlcore.rollout.engines.vllm.cpu.shared_prompts import SharedPrompts

        runner = self.model_runner
        if not is_second(runner):
            SeededDraws(runner).install()
        if not alone:
            return SEVERAL, SEVERAL
        runner.rl_decoder, self.rl_shared = PlainDecoder(runner), SharedPrompts(runner)
        return runner.rl_decoder.reason, self.rl_shared.reason

    def rl_quick_steps(self, scheduler: Any) -> Any:
        """Steps without vLLM's scheduler and runner, of a model that runs without its modules."""
        from rlcore.rollout.engines.vllm.cpu.quick_steps import QuickSteps

        return QuickSteps.of(scheduler, self.model_runner, self.model_runner.rl_decoder)

    def rl_round_inputs(
        self, kind: ActivationRounding, kept: Sequence[str], last: int, key: str
    ) -> None:
        """Round what the model's linear maps read, on the CPU: see `rounded_inputs_cpu`."""
        from rlcore.rollout.engines.vllm.rounded_inputs_cpu import round_inputs

        round_inputs(self.model_runner.model, kind, kept, last, key)

    def rl_run_bitwise(self) -> None:
        """Compute to the bit as a learner does, on the CPU. Raises UserError where that cannot
        be."""
        from rlcore.rollout.engines.vllm.cpu.bitwise_decoder import install

        install(self.model_runner)

    def rl_speculate(self) -> None:
        """Verify proposed tokens at the settings of their requests, on the CPU."""
        if on_cpu():
            SAMPLING_BY_TOKEN.replace(_by_token)

    def rl_record_routes(self, blocks: Callable[[str], Any]) -> Any:
        """A recorder of the experts that are chosen, on the CPU, for vLLM's scheduler to ask.
        `blocks`: that scheduler's, of a request."""
        from rlcore.rollout.engines.vllm.experts_cpu import RoutesOnCpu

        return RoutesOnCpu(self.model_runner, self.rl_shared, blocks)

    def rl_expect(self, keep: list[str], patched: bool) -> None:
        """vLLM's receiver gets a set next, or what changed since the last. `keep`: weights to prove
        afterwards."""
        second = second_names(self.model_runner.model)
        self.weight_transfer_engine.expect(frozenset(keep), second, patched=patched)

    def rl_all_received(self, names: list[str]) -> None:
        """Raise RuntimeError unless the model took every weight of these names."""
        receiver = self.weight_transfer_engine
        self.rl_check_loaded(names, receiver.loaded)
        if receiver.patched:
            self.rl_check_patched(receiver.loaded)

    def rl_proven_received(self) -> dict[str, int]:
        """Checksums, as published, of the kept weights that are proven (`rl_proven`). Frees
        them."""
        kept, self.weight_transfer_engine.kept = self.weight_transfer_engine.kept, {}
        return {n: tensor_checksum(kept[n]) for n in self.rl_proven(kept)}

    def rl_free_bytes(self) -> int:
        """Free bytes of this rank's GPU."""
        free, _ = torch.cuda.mem_get_info()
        return int(free)

    def rl_begin_relayout(self) -> None:
        """The first of the three steps of vLLM's own reload: a layer is quantised as soon as all of
        its weights have come, so buckets need no order."""
        initialize_layerwise_reload(self.model_runner.model)

    def rl_end_relayout(self) -> None:
        """The last step of vLLM's reload."""
        runner = self.model_runner
        finalize_layerwise_reload(runner.model, runner.model_config)


def _gather_logprobs(
    logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor
) -> LogprobsTensors:
    """vLLM's Sampler.gather_logprobs without the sampled token's rank, which is the most expensive
    part and which nothing here reads.

    `logprobs` [n, V], `token_ids` [n] -> rows [n, 1 + num_logprobs], the sampled token first.
    """
    # torch's own top k takes several times as long on CPU
    find = largest if on_cpu() else torch.topk
    top, top_ids = find(logprobs, num_logprobs)
    sampled = token_ids.unsqueeze(-1)
    ids = torch.cat((sampled, top_ids), dim=1).to(torch.int32)
    rows = torch.cat((logprobs.gather(-1, sampled), top), dim=1)
    return LogprobsTensors(ids, rows, torch.zeros_like(token_ids))


def _by_token(
    values: torch.Tensor,
    ends: torch.Tensor,
    tokens: int,
    replace_from: float = 0,
    replace_to: float = 0,
) -> torch.Tensor:
    """vLLM's expand_batch_to_tokens: `values` [requests] of each of their `tokens` proposed tokens
    [tokens], which end at `ends` [requests]; `replace_from` becomes `replace_to`."""
    counts = torch.diff(ends, prepend=ends.new_zeros(1)).long()
    kept = torch.where(values == replace_from, replace_to, values).to(values.dtype)
    return kept.repeat_interleave(counts, output_size=tokens)


def _keep_weights_live() -> None:
    """Keep vLLM's CPU layers from packing their weights at load.

    Packed weights cannot be updated in place, and a reload silently leaves the tied LM head on its
    old copy.
    """
    from rlcore.rollout.engines.vllm.experts_cpu import keep_experts_live

    ONEDNN.replace(False)
    SGL_KERNEL.replace(lambda *_: False)
    keep_experts_live()


if on_cpu():
    _keep_weights_live()
