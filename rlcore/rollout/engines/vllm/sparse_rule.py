"""The sparse rule of this process's engines and a step's plan under it, which both attention
backends share. Imports no vLLM."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch

from rlcore.attention.block_topk import StepPlan, plan_step
from rlcore.attention.specs import SparseSpec
from rlcore.errors import UserError
from rlcore.rollout.engines.vllm.patches import SECOND_RUNNER_REQUESTS, is_second

PROMPT_LEN = "prompt_len"  # key of SamplingParams.extra_args


def bind_prompt_lengths(model_runner: Any, builder_type: type[Any]) -> None:
    """Set `prompt_lengths` on a started engine's metadata builders of that type.

    Raises RuntimeError if it has none: then another attention backend is in use.
    """
    groups = [group for groups in model_runner.attn_groups for group in groups]
    builders = [
        b for group in groups for b in group.metadata_builders if isinstance(b, builder_type)
    ]
    if not builders:
        raise RuntimeError(
            "the engine does not use sparse attention: install() must be called before any engine "
            "starts"
        )
    second = is_second(model_runner)
    lengths = SlotPromptLengths(model_runner) if second else BatchPromptLengths(model_runner)
    for builder in builders:
        builder.prompt_lengths = lengths


class PromptLengths(Protocol):
    """Prompt lengths by row of a step.

    vLLM's own count stays the prompt's through preemption and recomputation. A request that was
    resubmitted with part of its response as the prompt carries its true length:
    `SamplingParams(extra_args={"prompt_len": P})`.
    """

    def __call__(self, rows: int, slots: np.ndarray | None) -> torch.Tensor:
        """[rows] int64 on the CPU; 0 for the padding rows of a captured graph. `slots`: the place
        of each row's request in the second runner's state, None from the first."""


class BatchPromptLengths(PromptLengths):
    """Of the first runner, whose batch is in the order of the rows."""

    def __init__(self, model_runner: Any) -> None:
        self._runner = model_runner

    def __call__(self, rows: int, slots: np.ndarray | None) -> torch.Tensor:
        lengths = [self._length(r) for r in self._runner.input_batch.req_ids[:rows]]
        return torch.tensor(lengths + [0] * (rows - len(lengths)), dtype=torch.int64)

    def _length(self, request_id: str) -> int:
        state = self._runner.requests[request_id]
        given = _given(state.sampling_params)
        return int(state.num_prompt_tokens if given is None else given)


class SlotPromptLengths(PromptLengths):
    """Of the second runner, which keeps no sampling parameters: they are noted as its sampler gets
    them, when a request enters the batch or comes back into it."""

    def __init__(self, model_runner: Any) -> None:
        self._states = model_runner.req_states
        self._lengths = np.zeros(model_runner.max_num_reqs, np.int64)

        def noted(slot: int, *args: Any) -> Any:
            given = _given(args[-1])
            counted = self._states.prompt_len.np[slot]
            self._lengths[slot] = counted if given is None else given
            return add_request(slot, *args)

        add_request = SECOND_RUNNER_REQUESTS.replace(noted, of=model_runner.sampler)

    def __call__(self, rows: int, slots: np.ndarray | None) -> torch.Tensor:
        if slots is None:
            raise RuntimeError(
                "this vLLM does not say which requests a step has: sparse_prompt=false needs the "
                "actor's second_runner=false"
            )
        lengths = np.zeros(rows, np.int64)
        lengths[: len(slots)] = self._lengths[slots[:rows]]
        return torch.from_numpy(lengths)


def _given(params: Any) -> int | None:
    """The length that came with a request's sampling parameters."""
    return (params.extra_args or {}).get(PROMPT_LEN) if params is not None else None


_installed: SparseSpec | None = None


def set_rule(rule: SparseSpec, *, kernel: str) -> None:
    """Engines that start later in this process attend by `rule`.

    Raises UserError for a page size that `kernel` lacks.
    """
    # vLLM builds backends from classes alone, so the rule can only reach them as a global.
    global _installed
    if rule.block_size % 16:
        raise UserError(
            f"actor.sparse.block_size={rule.block_size} must be a multiple of 16 for {kernel}."
        )
    _installed = rule


def installed_rule() -> SparseSpec:
    """The rule. Raises RuntimeError without one: vLLM then built the model in another process."""
    if _installed is None:
        raise RuntimeError("install() was not called in the process that hosts the model")
    return _installed


class StepPlanner:
    """Mixed into vLLM's metadata builders: which rows of a step attend densely and which by the
    rule."""

    rule: SparseSpec
    prompt_lengths: PromptLengths | None = None  # `bind_prompt_lengths` sets it

    def take_rule(self, block_size: int) -> None:
        """Attend by the installed rule.

        Raises UserError unless the engine's page size is the rule's.
        """
        self.rule = installed_rule()
        if block_size != self.rule.block_size:
            wanted = f"actor.sparse.block_size={self.rule.block_size}"
            raise UserError(f"{wanted} does not match the engine's pages of {block_size} tokens.")

    def plan(
        self,
        query_start: torch.Tensor,
        seq_lens: torch.Tensor,
        requests: int,
        slots: np.ndarray | None = None,
    ) -> StepPlan:
        """`plan_step` of the first `requests` rows.

        query_start [> requests] and seq_lens [>= requests] are on the host; `slots` as for
        `PromptLengths`. Before `bind` has run all tokens count as prompts: vLLM warms up with
        requests of its own.
        """
        prompts = None
        if not self.rule.sparse_prompt:
            if self.prompt_lengths is None:
                prompts = seq_lens[:requests]
            else:
                prompts = self.prompt_lengths(requests, slots)
        return plan_step(self.rule, query_start[: requests + 1], seq_lens[:requests], prompts)
