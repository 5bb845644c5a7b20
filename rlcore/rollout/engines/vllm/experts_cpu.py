"""Mixtures of experts on the CPU: experts computed from weights that stay live, and the record of
the experts that were chosen."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.layer import MoERunner

from rlcore.rollout.engines.vllm.patches import EXPERTS_APPLY, EXPERTS_LOADED, MODEL_FORWARD

if TYPE_CHECKING:
    from rlcore.rollout.engines.vllm.cpu.shared_prompts import SharedPrompts

# Experts of a mixture on the CPU, computed from weights that can be replaced in place.
#
# vLLM's own kernel wants them packed, at the same shapes: a weight loaded into the packed parameter
# would be read wrongly, and a checksum of that parameter would not show it.


def keep_experts_live() -> None:
    """Have vLLM's unquantised CPU experts keep and read their weights as they were loaded."""
    EXPERTS_LOADED.replace(_as_loaded)
    EXPERTS_APPLY.replace(_apply)


def _as_loaded(self: Any, layer: torch.nn.Module) -> None:
    del self, layer


def _apply(self: Any, **given: Any) -> None:
    """vLLM's arguments, by name: see `FusedMoEExpertsModular.apply`."""
    activation = given["activation"]
    if activation != MoEActivation.SILU or self.w1_bias is not None or self.w2_bias is not None:
        raise RuntimeError(f"experts on the CPU have no bias and SiLU, not {activation.value}")
    chosen = (given["topk_weights"], given["topk_ids"])
    given["output"].copy_(mixed(given["hidden_states"], given["w1"], given["w2"], *chosen))


def mixed(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """The sum over a token's experts of weight times `w2[e] (silu(gate) * up)`.

    x [n, H], w13 [E, 2I, H] (gate above up), w2 [E, H, I], weights [n, k], experts [n, k] int ->
    [n, H] in x's dtype, summed in float32.
    """
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for e in experts.unique().tolist():
        tokens, place = torch.nonzero(experts == e, as_tuple=True)
        gate, up = F.linear(x[tokens], w13[e]).chunk(2, dim=-1)
        y = F.linear(F.silu(gate) * up, w2[e])
        total.index_add_(0, tokens, y.float() * weights[tokens, place, None].float())
    return total.to(x.dtype)


# The experts that a mixture chooses on the CPU, recorded for every token.
#
# vLLM returns them from its second model runner alone (vllm/config/vllm.py:
# _verify_aux_output_compatibility), whose kernels are written for GPUs. Here this class replaces
# that runner's connector in the scheduler, which shares a process with the model. Like vLLM 0.26 it
# keeps experts by the slot of a token's keys and values: a prefix cache hit that reads another
# request's keys and values reads their experts, too.


class RoutesOnCpu:
    """Records the experts of every step; has the methods of `AuxOutputSchedulerConnector` that
    vLLM's scheduler calls."""

    def __init__(
        self, runner: Any, shared: SharedPrompts | None, blocks: Callable[[str], Any]
    ) -> None:
        """`runner`: the first model runner, with its cache. `shared`: of the positions that it
        computes once; None: it computes all. `blocks`: of a request's keys and values, by its
        name."""
        model, cache = runner.model_config, runner.kv_cache_config
        layers, chosen = model.get_total_num_hidden_layers(), model.get_num_experts_per_tok()
        dtype = np.uint8 if model.get_num_experts() <= 256 else np.uint16
        self._shared, self._blocks = shared, blocks
        self._block_size: int = cache.kv_cache_groups[0].kv_cache_spec.block_size
        slots = cache.num_blocks * self._block_size
        self._by_slot = np.zeros((slots, layers, chosen), dtype)
        self._step: dict[int, np.ndarray] = {}  # of the pass that runs, by layer: [N, k]
        self._tables = runner.input_batch.block_table
        self._forward = MODEL_FORWARD.replace(self._run, of=runner)
        for module in runner.model.modules():
            if isinstance(module, MoERunner):
                module.router.set_capture_fn(partial(self._note, module.layer_id))

    def _note(self, layer: int, experts: Tensor) -> None:
        """Note the experts [U, k] of the positions that are computed."""
        found = None if self._shared is None else self._shared.positions
        if found is not None:
            experts = experts.index_select(0, found.of_each)
        self._step[layer] = experts.numpy().astype(self._by_slot.dtype)

    def _run(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The runner's forward pass over N positions."""
        self._step.clear()
        states = self._forward(input_ids, *args, **kwargs)
        slots = self._tables[0].slot_mapping.gpu[: len(input_ids)].numpy()
        for layer, experts in self._step.items():
            self._by_slot[slots, layer] = experts
        return states

    # -- as vLLM's connector -----------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: Any, requests: Any) -> None:
        """A step is scheduled."""

    def take_output(self, request: Any, output: Any) -> np.ndarray:
        """[n, layers, k]: experts of the tokens that a step has read; in a request's first step
        also of its prompt, which other requests may have computed."""
        del output
        end = request.num_tokens - 1
        start = 0 if request.num_output_tokens <= 1 else end - 1
        (blocks,) = self._blocks(request.request_id)
        places = np.arange(start, end)
        slots = np.asarray(blocks)[places // self._block_size] * self._block_size
        return self._by_slot[slots + places % self._block_size]

    def request_finished(self, request: Any) -> None:
        """A request is over, or was preempted."""

    def reset(self) -> None:
        """The prefix cache was dropped."""
