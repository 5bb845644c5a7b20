"""The sparse rule of this process's engines and a step's plan under it, which both attention
backends share. Imports no vLLM."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from rlcore.attention.block_topk import StepPlan, page_budgets, plan_step
from rlcore.attention.specs import SparseSpec
from rlcore.errors import UserError
from rlcore.rollout.engines.vllm import PROMPT_LEN, RULE
from rlcore.rollout.engines.vllm.patches import (
    SECOND_RUNNER_REQUESTS,
    SECOND_RUNNER_STEPS,
    is_second,
)
from rlcore.types import PageRule


def bind_requests(model_runner: Any, builder_type: type[Any]) -> None:
    """Set `asked` on a started engine's metadata builders of that type.

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
    asked = SlotRequests(model_runner) if second else BatchRequests(model_runner)
    if isinstance(asked, SlotRequests) and builders[0].rule.needs_prompts:
        asked.keep_prompts_apart(model_runner)
    for builder in builders:
        builder.asked = asked


class AskedOfRows(NamedTuple):
    """The settings that the requests of a step's rows were sent with."""

    prompt_lens: torch.Tensor  # [rows] int64 on the CPU; 0 for the padding rows of a captured graph
    rules: list[PageRule | None]  # [rows]; None: the engine's own


class RowRequests(Protocol):
    """Prompt lengths and page rules by row of a step.

    vLLM's own count stays the prompt's through preemption and recomputation. A request that was
    resubmitted with part of its response as the prompt carries its true length:
    `SamplingParams(extra_args={"prompt_len": P})`. A request with its own pages carries its rule
    there, so that recomputed positions follow the same rule.
    """

    def __call__(self, rows: int, slots: np.ndarray | None) -> AskedOfRows:
        """`slots`: the place of each row's request in the second runner's state, None from the
        first."""


class BatchRequests(RowRequests):
    """Requests of the first runner, whose batch is in the order of the rows."""

    def __init__(self, model_runner: Any) -> None:
        self._runner = model_runner

    def __call__(self, rows: int, slots: np.ndarray | None) -> AskedOfRows:
        states = [self._runner.requests[r] for r in self._runner.input_batch.req_ids[:rows]]
        lengths: list[int] = []
        rules: list[PageRule | None] = []
        for state in states:
            given = _given(state.sampling_params)
            lengths.append(int(given.get(PROMPT_LEN, state.num_prompt_tokens)))
            rules.append(given.get(RULE))
        padding = rows - len(states)
        return AskedOfRows(
            torch.tensor(lengths + [0] * padding, dtype=torch.int64), rules + [None] * padding
        )


class SlotRequests(RowRequests):
    """Requests of the second runner, which keeps no sampling parameters: they are recorded when its
    sampler receives them, as a request enters the batch or returns to it."""

    def __init__(self, model_runner: Any) -> None:
        self._states = model_runner.req_states
        self._lengths = np.zeros(model_runner.max_num_reqs, np.int64)
        self._rules: list[PageRule | None] = [None] * model_runner.max_num_reqs

        def noted(slot: int, *args: Any) -> Any:
            given = _given(args[-1])
            self._lengths[slot] = given.get(PROMPT_LEN, self._states.prompt_len.np[slot])
            self._rules[slot] = given.get(RULE)
            return add_request(slot, *args)

        add_request = SECOND_RUNNER_REQUESTS.replace(noted, of=model_runner.sampler)

    def keep_prompts_apart(self, model_runner: Any) -> None:
        """Have a step with a token of a prompt leave the graphs of decode steps, in which every
        token attends as a response's. vLLM runs a prompt's last token as a decode where the prefix
        cache or an earlier chunk holds the tokens before it."""

        def gathered(scheduled: Any, dummy_run: bool) -> Any:
            state, tokens_each = gather(scheduled, dummy_run)
            if state is not None:
                computed = state.num_computed_prefill_tokens_np
                if (computed < self._lengths[state.idx_mapping_np]).any():
                    tokens_each = None  # as of a step in which requests have different numbers
            return state, tokens_each

        gather = SECOND_RUNNER_STEPS.replace(gathered, of=model_runner)

    def __call__(self, rows: int, slots: np.ndarray | None) -> AskedOfRows:
        if slots is None:
            raise RuntimeError(
                "this vLLM does not say which requests a step has: sparse.prompt other than sparse "
                "and blocks_by_length need the actor's second_runner=false"
            )
        lengths = np.zeros(rows, np.int64)
        lengths[: len(slots)] = self._lengths[slots[:rows]]
        rules = [self._rules[slot] for slot in slots[:rows].tolist()]
        return AskedOfRows(torch.from_numpy(lengths), rules + [None] * (rows - len(rules)))


def _given(params: Any) -> dict[str, Any]:
    """The extras of a request's sampling parameters."""
    return (params.extra_args or {}) if params is not None else {}


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
    """The installed rule. Raises RuntimeError without one: vLLM then built the model in another
    process."""
    if _installed is None:
        raise RuntimeError("install() was not called in the process that hosts the model")
    return _installed


class StepPlanner:
    """A mixin of vLLM's metadata builders that plans which rows of a step attend densely and which
    by the rule."""

    rule: SparseSpec
    asked: RowRequests | None = None  # `bind_requests` sets it

    def take_rule(self, block_size: int) -> None:
        """Attend by the installed rule.

        Raises UserError unless the engine's page size is the rule's.
        """
        self.rule = installed_rule()
        #: requests may bring pages of their own
        self.moves = self.rule.blocks_by_length is not None
        if block_size != self.rule.block_size:
            wanted = f"actor.sparse.block_size={self.rule.block_size}"
            raise UserError(f"{wanted} does not match the engine's pages of {block_size} tokens.")

    @property
    def plain(self) -> bool:
        """True if positions alone, on the device, decide how tokens attend."""
        return not self.rule.needs_prompts and not self.moves

    def decode_step(
        self, seq_lens: torch.Tensor, requests: int, slots: np.ndarray | None = None
    ) -> tuple[bool, torch.Tensor | None]:
        """The pair of a step with one token a request. First, False if one is of a prompt that
        attends otherwise. Then budgets in pages [requests] int64 where requests bring their own
        rules, else None.

        seq_lens [>= requests] on the host, 0 for padding rows; `slots` as for `RowRequests`. Before
        `bind` has run all tokens count as responses': vLLM captures graphs with its own requests.
        """
        if self.plain or self.asked is None:
            return True, None
        prompts, given = self.asked(requests, slots)
        seq = seq_lens[:requests].long()
        if self.rule.needs_prompts and bool(((seq > 0) & (seq <= prompts)).any()):
            return False, None
        if not self.moves:
            return True, None
        pages = (seq - 1).clamp(min=0) // self.rule.block_size + 1
        rules = [self.rule.under(rule) for rule in given]
        return True, page_budgets(rules, torch.arange(requests), pages)

    def plan(
        self,
        query_start: torch.Tensor,
        seq_lens: torch.Tensor,
        requests: int,
        slots: np.ndarray | None = None,
    ) -> StepPlan:
        """`plan_step` of the first `requests` rows.

        query_start [> requests] and seq_lens [>= requests] are on the host; `slots` as for
        `RowRequests`. Before `bind` has run all tokens count as prompts: vLLM warms up with its own
        requests.
        """
        prompts: torch.Tensor | None = None
        rules: list[SparseSpec] | None = None
        if self.rule.needs_prompts or self.moves:
            if self.asked is None:
                prompts = seq_lens[:requests]
            else:
                prompts, given = self.asked(requests, slots)
                rules = [self.rule.under(rule) for rule in given] if self.moves else None
        return plan_step(
            self.rule, query_start[: requests + 1], seq_lens[:requests], prompts, rules
        )
