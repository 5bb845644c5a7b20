"""What surrounds the kernels of the CUDA backend, on the CPU with a plain reference in place of
FlashAttention."""

from __future__ import annotations

import math
import types

import numpy as np
import pytest
import torch

import rlcore.rollout.engines.vllm  # noqa: F401  sets vLLM's environment
from rlcore.attention import implementation
from rlcore.attention.block_topk import page_budgets, plan_step
from rlcore.attention.specs import SparseSpec
from rlcore.rollout.engines.vllm import PROMPT_LEN
from rlcore.rollout.engines.vllm.sparse_rows_gpu import (
    DecodeBuffers,
    attend_dense,
    attend_rows,
    attend_together,
    decode_rows,
    kept_blocks,
    mixed_rows,
    summarise_pages,
)
from rlcore.rollout.engines.vllm.sparse_rule import AskedOfRows, SlotRequests, StepPlanner
from rlcore.types import PageRule

BS, HEADS, KV, DIM, PAGES = 4, 4, 2, 8, 16


def plain_flash(
    query, key_cache, value_cache, out, query_start, seq_lens, block_table, max_query, max_seq
):
    """Causal attention over a paged cache, one token at a time."""
    group = query.shape[1] // key_cache.shape[2]
    for r in range(len(seq_lens)):
        first, end, seq = int(query_start[r]), int(query_start[r + 1]), int(seq_lens[r])
        assert end - first <= max_query and seq <= max_seq
        if not seq:
            continue
        blocks = block_table[r, : -(-seq // BS)].long()
        k, v = (c[blocks].flatten(0, 1)[:seq] for c in (key_cache, value_cache))  # [seq, Hk, D]
        for i in range(first, end):
            seen = seq - (end - 1 - i)
            for h in range(query.shape[1]):
                p = torch.softmax(k[:seen, h // group] @ query[i, h] / math.sqrt(DIM), 0)
                out[i, h] = p @ v[:seen, h // group]


class Cache:
    """A head-major paged cache with shuffled blocks and its summaries, filled as steps go by."""

    def __init__(self, requests: int, length: int) -> None:
        gen = torch.Generator().manual_seed(11)
        self.q, self.k, self.v = (
            torch.randn(requests, h, length, DIM, generator=gen) for h in (HEADS, KV, KV)
        )
        blocks = 1 + requests * PAGES  # block 0 pads
        self.table = (1 + torch.randperm(blocks - 1, generator=gen)).view(requests, PAGES).int()
        self.kv = torch.zeros(blocks, KV, BS, 2 * DIM)
        self.summaries = torch.full((blocks, KV, DIM), float("nan"))
        self.choosing = torch.full((blocks, KV, DIM), float("nan"))

    def write(self, r: int, first: int, end: int) -> torch.Tensor:
        """Store keys and values of positions first..end-1; returns the queries [end - first, H,
        D]."""
        for t in range(first, end):
            block = int(self.table[r, t // BS])
            self.kv[block, :, t % BS] = torch.cat([self.k[r, :, t], self.v[r, :, t]], -1)
        return self.q[r, :, first:end].transpose(0, 1)

    def want(self, rule: SparseSpec, prompts: list[int], rules=None) -> torch.Tensor:
        """The learner's answer for whole sequences: [requests, length, H, D]."""
        rows = implementation.SparseRows(rule, prompts, rules=rules)
        return implementation.attend_rows(self.q, self.k, self.v, rows).transpose(1, 2)


@pytest.mark.parametrize(
    "rule",
    [
        SparseSpec(block_size=BS, blocks=3),
        SparseSpec(block_size=BS, share=0.5),
        SparseSpec(block_size=BS, blocks=2, prompt="dense"),
        SparseSpec(block_size=BS, blocks=2, prompt="block", prompt_block=3 * BS),
        SparseSpec(block_size=BS, share=0.4, prompt="block", prompt_block=2 * BS),
        SparseSpec(block_size=BS, blocks=14),
        SparseSpec(block_size=BS, blocks_by_length=(2, 3, 5), length_step=4 * BS),
        SparseSpec(
            block_size=BS,
            blocks_by_length=(2, 3, 5),
            length_step=4 * BS,
            prompt="block",
            prompt_block=4 * BS,
        ),
    ],
)
def test_steps_of_all_kinds_equal_the_learner(rule):
    cache, prompts = Cache(3, 56), [9, 30, 22]
    rules, own = None, (None, None, None)
    if rule.blocks_by_length is not None:  # requests bring their own
        own = (None, PageRule(1, 2 * BS, (2, 2, 4)), PageRule(2, 4 * BS, (3,)))
        rules = [rule.under(o) for o in own]
    want = cache.want(rule, prompts, rules)
    at, decoded, live = [0, 0, 0], 0, []
    planner = StepPlanner()
    planner.rule, planner.moves = rule, rules is not None
    planner.asked = lambda rows, slots: AskedOfRows(
        torch.tensor([prompts[r] for r in live]), [own[r] for r in live]
    )
    # chunked prompts beside decoding, idle requests, single tokens for all: once the last of
    # prompts
    for counts in [
        (20, 0, 7),
        (1, 29, 1),
        (1, 1, 1),
        (1, 4, 29),
        *[(1, 1, 1)] * 6,
        (13, 2, 1),
        *[(1, 1, 1)] * 3,
    ]:
        live = [r for r in range(3) if counts[r]]
        query = torch.cat([cache.write(r, at[r], at[r] + counts[r]) for r in live])
        start = torch.tensor([0, *[counts[r] for r in live]]).cumsum(0)
        seq = torch.tensor([at[r] + counts[r] for r in live], dtype=torch.int32)
        table = cache.table[live]
        dense, budget, decode = None, None, max(counts) == 1
        if decode:
            decode, budget = planner.decode_step(seq, len(live))
        if decode:
            rows, summarise = decode_rows(rule, seq, table, PAGES, budget)
            decoded += 1
        else:
            theirs = None if rules is None else [rules[r] for r in live]
            plan = plan_step(rule, start, seq, torch.tensor([prompts[r] for r in live]), theirs)
            rows, dense, summarise = mixed_rows(plan, table)
        summarise_pages(cache.kv, cache.summaries, summarise)
        out = torch.full_like(query, float("nan"))
        if rows is None:
            plain_flash(
                query, *_halves(cache.kv), out, start, seq, table, int(start.diff().max()), 1000
            )
        else:
            if dense is not None:
                attend_dense(query, cache.kv, table, dense, out, plain_flash)
            if rows.together is not None:
                kept = (cache.summaries, cache.choosing)
                attend_together(query, cache.kv, kept, table, rows, out, plain_flash)
            else:
                attend_rows(
                    query,
                    cache.kv,
                    cache.summaries,
                    table,
                    rows,
                    out,
                    plain_flash,
                    kept_blocks,
                )
        for i, r in enumerate(live):
            got = out[start[i] : start[i + 1]]
            torch.testing.assert_close(
                got, want[r, at[r] : at[r] + counts[r]], atol=1e-5, rtol=1e-5
            )
            at[r] += counts[r]
    assert at[1] >= 44 and decoded == (9 if rule.needs_prompts else 10)


@pytest.mark.parametrize("second", [True, False])
@pytest.mark.parametrize(
    "own", [{"blocks": 2}, {"blocks_by_length": (2, 3)}, {"blocks": 2, "prompt": "dense"}]
)
def test_the_first_runner_captures_no_rule_that_needs_prompts(monkeypatch, own, second):
    from vllm.v1.attention.backend import AttentionCGSupport

    from rlcore.rollout.engines.vllm import sparse_backend_gpu

    rule = SparseSpec(**own)
    monkeypatch.setattr(sparse_backend_gpu, "installed_rule", lambda: rule)
    config = types.SimpleNamespace(use_v2_model_runner=second)
    found = sparse_backend_gpu.SparseGPUBuilder.get_cudagraph_support(config, None)
    captured = second or not rule.needs_prompts
    single = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    assert found == (single if captured else AttentionCGSupport.NEVER)


def test_vllm_s_own_requests_are_captured_as_responses():
    planner = StepPlanner()
    planner.rule = SparseSpec(block_size=BS, blocks=2, prompt="dense")
    planner.moves = False
    assert planner.decode_step(torch.ones(4, dtype=torch.int32), 4) == (True, None)


@pytest.mark.parametrize(
    "slots, computed, each",
    [
        ([2, 0], [7, 30], 1),  # responses
        ([2, 0], [6, 30], None),  # the last token of slot 2's prompt
        ([1, 0], [12, 30], 1),  # resubmitted: seven tokens of its prompt are response
        ([1, 0], [4, 30], None),
    ],
)
def test_a_step_with_a_token_of_a_prompt_is_none_of_single_responses(slots, computed, each):
    gathered = types.SimpleNamespace(
        idx_mapping_np=np.array(slots), num_computed_prefill_tokens_np=np.array(computed)
    )
    runner = types.SimpleNamespace(
        max_num_reqs=3,
        sampler=types.SimpleNamespace(add_request=lambda *_: None),
        req_states=types.SimpleNamespace(
            prompt_len=types.SimpleNamespace(np=np.array([30, 12, 7]))
        ),
        gather_batch_req_state=lambda scheduled, dummy: (None if dummy else gathered, 1),
    )
    asked = SlotRequests(runner)
    for slot, given in enumerate(({}, {PROMPT_LEN: 5}, {})):
        runner.sampler.add_request(slot, 0, types.SimpleNamespace(extra_args=given))
    asked.keep_prompts_apart(runner)
    assert runner.gather_batch_req_state(None, False) == (gathered, each)
    assert runner.gather_batch_req_state(None, True) == (None, 1)  # a step of vLLM's own


def test_padding_rows_of_a_captured_step_keep_nothing():
    rule = SparseSpec(block_size=BS, blocks=3)
    table = torch.zeros(3, PAGES, dtype=torch.int32)
    rows, summarise = decode_rows(rule, torch.tensor([30, 0, 0], dtype=torch.int32), table, PAGES)
    assert rows.kept_len.tolist() == [10, 0, 0] and rows.width == 3
    assert summarise.tolist() == [0, 0, 0]


def test_a_step_summarises_the_pages_that_it_completes():
    rule = SparseSpec(block_size=BS, blocks=3)
    table = torch.arange(1, 1 + 4 * PAGES, dtype=torch.int32).view(4, PAGES)
    lens = torch.tensor([BS, BS + 1, 3 * BS - 1, 5 * BS], dtype=torch.int32)
    _, summarise = decode_rows(rule, lens, table, PAGES)
    assert summarise.tolist() == [int(table[0, 0]), 0, 0, int(table[3, 4])]


def _halves(kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return kv.transpose(1, 2).split(DIM, dim=-1)


BY_LENGTH = SparseSpec(block_size=BS, blocks_by_length=(2, 3, 5), length_step=4 * BS)


@pytest.mark.parametrize(
    "rule", [SparseSpec(block_size=BS, blocks=3), SparseSpec(block_size=BS, share=0.4), BY_LENGTH]
)
def test_a_captured_step_replays_with_other_lengths_and_fewer_requests(rule):
    """A CUDA graph runs again on the memory of its capture: here what the capture was given is kept
    and used again, after later steps have only filled the buffers."""
    cache, buffers, rules = Cache(4, 60), DecodeBuffers(rule, 8, PAGES, "cpu"), [rule] * 4
    if rule is BY_LENGTH:  # one keeps more than the engine's own ever does
        own = (None, PageRule(1, 2 * BS, (2, 2, 4)), PageRule(2, 4 * BS, (9,)), None)
        rules = [rule.under(o) for o in own]
    for r in range(4):
        cache.write(r, 0, 60)
    summarise_pages(cache.kv, cache.summaries, torch.arange(len(cache.kv)))
    seq_lens, table = torch.zeros(4, dtype=torch.int32), cache.table.clone()  # vLLM's, persistent
    query, output = torch.zeros(4, HEADS, DIM), torch.zeros(4, HEADS, DIM)

    def run(rows, writing):
        summarise_pages(cache.kv, cache.summaries, writing)
        attend_rows(
            query,
            cache.kv,
            cache.summaries,
            table,
            rows,
            output,
            plain_flash,
            kept_blocks,
        )

    seq_lens.copy_(torch.tensor([60, 60, 60, 60]))
    captured = buffers.fill(seq_lens, table)
    want = cache.want(rule, [0] * 4, rules)
    for lengths in ([60, 60, 60, 60], [17, 41, 58, 33], [29, 12, 0, 0], [9, 60, 22, 1]):
        seq_lens.copy_(torch.tensor(lengths))
        query.copy_(torch.stack([cache.q[r, :, max(n, 1) - 1] for r, n in enumerate(lengths)]))
        output.zero_()
        requests = sum(n > 0 for n in lengths)
        last = torch.arange(requests), (seq_lens[:requests].long() - 1) // BS + 1
        budget = page_budgets(rules, *last) if rule is BY_LENGTH else None
        # the step's own, perhaps fewer rows
        buffers.fill(seq_lens[:requests], table[:requests], budget)
        run(*captured)
        for r, n in enumerate(lengths):
            if n:
                torch.testing.assert_close(output[r], want[r, n - 1], rtol=1e-5, atol=1e-5)
            else:
                assert int(captured[0].kept_len[r]) == 0 and not output[r].any()
