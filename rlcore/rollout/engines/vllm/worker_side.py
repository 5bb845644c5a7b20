"""What vLLM's workers gain that needs vLLM. With tensor parallelism each worker is a process of its
own, which imports this file before it loads its part of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.v1.outputs import LogprobsTensors

from rlcore.models.largest import largest

# Imported here too, so that every rank's process registers the loader and the receivers.
from rlcore.rollout.engines.vllm import folder_loader, weight_receivers  # noqa: F401
from rlcore.rollout.engines.vllm.platform import on_cpu
from rlcore.rollout.engines.vllm.worker_extension import WeightExtension, second_names
from rlcore.weights.checksum import tensor_checksum


class WorkerSide(WeightExtension):
    """Mixed into vLLM's worker class (`worker_extension_cls`)."""

    weight_transfer_engine: Any

    def rl_plain_gather(self) -> None:
        """Sample without the ranks of the sampled tokens, and on the CPU without a draw of torch
        for each. The second runner's sampler has no such step: it counts ranks in a kernel of its
        own."""
        if not hasattr(self.model_runner.sampler, "gather_logprobs"):
            return
        self.model_runner.sampler.gather_logprobs = _gather_logprobs
        if on_cpu():
            from rlcore.rollout.engines.vllm.seeds_cpu import SeededDraws

            SeededDraws(self.model_runner).install()

    def rl_run_plainly(self) -> str | None:
        """Run the model's layers without vLLM's modules, on the CPU. Why not, if so."""
        if not on_cpu():
            return "its graphs do so on GPUs"
        from rlcore.rollout.engines.vllm.decoder_cpu import PlainDecoder

        self.model_runner.rl_decoder = PlainDecoder(self.model_runner)
        return self.model_runner.rl_decoder.reason

    def rl_share_prompts(self) -> str | None:
        """Compute what requests of a step have in common once, on the CPU. Why not, if so."""
        if not on_cpu():
            return "vLLM's prefix cache shares the blocks of prompts on GPUs"
        from rlcore.rollout.engines.vllm.shared_prompts_cpu import SharedPrompts

        self.rl_shared = SharedPrompts(self.model_runner)
        return self.rl_shared.reason

    def rl_record_routes(self, blocks: Callable[[str], Any]) -> Any:
        """A recorder of the experts that are chosen, on the CPU, for vLLM's scheduler to ask.
        `blocks`: that scheduler's, of a request."""
        from rlcore.rollout.engines.vllm.routes_cpu import RoutesOnCpu

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
        """Bytes of this rank's GPU that no process has."""
        free, _ = torch.cuda.mem_get_info()
        return int(free)

    def rl_begin_relayout(self) -> None:
        """The first of the three steps of vLLM's own reload: a layer is quantised as soon as all of
        its weights have come, so buckets need no order."""
        initialize_layerwise_reload(self.model_runner.model)

    def rl_end_relayout(self) -> None:
        """The last of its steps."""
        runner = self.model_runner
        finalize_layerwise_reload(runner.model, runner.model_config)


def _gather_logprobs(
    logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor
) -> LogprobsTensors:
    """vLLM's Sampler.gather_logprobs without the sampled token's rank, which is the most expensive
    part and which nothing here reads.

    `logprobs` [n, V], `token_ids` [n] -> rows [n, 1 + num_logprobs], the sampled token first.
    """
    # torch's own takes several times as long on CPU; the other way is unproven on GPUs
    find = largest if on_cpu() else torch.topk
    top, top_ids = find(logprobs, num_logprobs)
    sampled = token_ids.unsqueeze(-1)
    ids = torch.cat((sampled, top_ids), dim=1).to(torch.int32)
    rows = torch.cat((logprobs.gather(-1, sampled), top), dim=1)
    return LogprobsTensors(ids, rows, torch.zeros_like(token_ids))


def _keep_weights_live() -> None:
    """Keep vLLM's CPU layers from packing their weights at load.

    Packed weights cannot be updated in place, and a reload silently leaves the tied LM head on its
    old copy.
    """
    import vllm._custom_ops as ops
    import vllm.model_executor.layers.utils as layers

    from rlcore.rollout.engines.vllm.live_experts_cpu import keep_experts_live

    ops._supports_onednn = False
    layers.check_cpu_sgl_kernel = lambda *_: False
    keep_experts_live()


if on_cpu():
    from rlcore.rollout.engines.vllm.norms_cpu import use_norm_kernels

    _keep_weights_live()
    use_norm_kernels()
