"""The sparse rule of this process's engines and a step's plan under it, which both attention
backends share. Imports no vLLM."""

from __future__ import annotations

import numpy as np
import torch

from rlcore.attention.specs import SparseSpec
from rlcore.attention.step_plan import StepPlan, plan_step
from rlcore.errors import UserError
from rlcore.rollout.engines.vllm.prompt_lengths import PromptLengths

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
