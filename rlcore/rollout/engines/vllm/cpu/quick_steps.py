"""Decode steps on the CPU without vLLM's scheduler and runner.

Most steps continue the requests of the step before, one token each. vLLM plans, prepares and
unpacks such a step like any other, request by request, which takes longer than a small model's
pass. Here a step is arrays over all requests, with vLLM's own functions where a request needs
another block of the cache, or ends. vLLM's state is kept up to date, so that any step may be vLLM's
again: steps with prompts, after a change of weights, or short of memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.utils import check_stop, remove_all
from vllm.v1.engine import FinishReason
from vllm.v1.outputs import LogprobsLists
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p

from rlcore.rollout.engines.vllm.cpu.decoder import PlainDecoder
from rlcore.rollout.engines.vllm.patches import DRAWS
from rlcore.rollout.segments import KeptRows

_AHEAD = 16  # numbers drawn together
_SPARE = 64  # requests that may have left before their numbers are dropped
_LARGEST = 2**31


# Draws of seeded requests on the CPU, without an operation of torch for each request and token.
#
# vLLM takes one number from the generator of every request in every step. Here a request's next
# numbers are drawn together: the same numbers in the same order, so that tokens do not change.


class SeededDraws:
    """Replaces vLLM's CPU sampler of one model runner."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        # request -> its next numbers, the next one last; kept while it is preempted, too
        self._ahead: dict[str, list[int]] = {}

    def install(self) -> None:
        """Replace the runner's sampler, where it is vLLM's own for seeds."""
        sampler = self._runner.sampler.topk_topp_sampler
        own = getattr(sampler.forward, "__func__", None) is TopKTopPSampler.forward_cpu
        if own and not sampler.use_fp64_gumbel and sampler.logprobs_mode == "processed_logprobs":
            DRAWS.replace(self.sample, of=sampler)

    def sample(
        self,
        logits: Tensor,
        generators: Mapping[int, torch.Generator],
        k: Tensor | None,
        p: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Sampled ids [n], and the log-probs [n, V] that they were sampled by, from logits.

        These are overwritten, as vLLM's own temperature does: new memory for large vocabularies
        would take as long as the softmax.
        """
        logits = apply_top_k_top_p(logits, k, p).float()
        tokens = torch.ops._C.fused_gumbel_argmax(logits, self.seeds(generators, len(logits)))
        return tokens, torch.log_softmax(logits, dim=-1, out=logits)

    def seeds(self, generators: Mapping[int, torch.Generator], rows: int) -> Tensor:
        """[rows] int64: the next number of each row's generator, of torch's where it has none."""
        names, ahead = self._runner.input_batch.req_ids, self._ahead
        if len(ahead) > len(self._runner.requests) + _SPARE:
            kept = {name: ahead[name] for name in ahead.keys() & self._runner.requests.keys()}
            self._ahead = ahead = kept
        if len(generators) == rows:
            drawn = [0] * rows
        else:
            drawn = torch.randint(0, _LARGEST, (rows,), dtype=torch.long).tolist()
        for row, generator in generators.items():
            its = ahead.get(names[row])
            if not its:
                more = torch.randint(0, _LARGEST, (_AHEAD,), generator=generator, dtype=torch.long)
                its = ahead[names[row]] = more.tolist()[::-1]
            drawn[row] = its.pop()
        return torch.tensor(drawn, dtype=torch.long)


class Sampled(NamedTuple):
    """The output of a step for one request, under the names of vLLM's own output."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: KeptRows | LogprobsLists | None  # of one token
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    routed_experts: None = None


class QuickSteps:
    """Steps of one engine whose scheduler and model are in this process."""

    def __init__(self, scheduler: Any, runner: Any, decoder: PlainDecoder) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._decoder = decoder
        ((self._group,),) = runner.attn_groups
        self._table = runner.input_batch.block_table[0]
        self._size: int = self._table.block_size
        # (scheduler's, runner's) state of each request, by row; none: the last step was vLLM's
        self._rows: list[tuple[Any, Any]] = []

    @classmethod
    def of(cls, scheduler: Any, runner: Any, decoder: PlainDecoder | None) -> QuickSteps | None:
        """The quick steps of an engine; None where its steps need more than is done here."""
        plain = (
            decoder is not None
            and decoder.reason is None
            and [len(groups) for groups in runner.attn_groups] == [1]
            and runner.input_batch.block_table[0].block_size == scheduler.block_size
            and scheduler.connector is None
            and scheduler.aux_output_connector is None
            and not scheduler.needs_kv_cache_zeroing
            and not scheduler.defer_block_free
            # steps scheduled ahead have placeholders in the place of tokens
            and not scheduler.scheduler_config.async_scheduling
        )
        return cls(scheduler, runner, decoder) if plain and decoder else None

    @torch.inference_mode()
    def step(self) -> list[Sampled] | None:
        """Sample one token of every running request; None: the next step has to be vLLM's."""
        if not self._ready() or not self._allocated():
            self._rows = []
            return None
        runner = self._runner
        runner.input_batch.refresh_metadata()
        logits = runner.model.compute_logits(self._states())
        return self._taken(runner._sample(logits, None))

    def _ready(self) -> bool:
        """Return whether this step only continues running requests. If so, `_rows` holds them."""
        scheduler = self._scheduler
        others = scheduler.waiting or scheduler.kv_holding_waiting or scheduler.deferred_waiting
        if others or not scheduler.running or scheduler.pause_state != PauseState.UNPAUSED:
            return False
        if self._rows and not scheduler.finished_req_ids:
            return True
        return self._found()

    def _found(self) -> bool:
        """Read the running requests; False: some have more than their next token to compute."""
        scheduler, runner = self._scheduler, self._runner
        running = {request.request_id: request for request in scheduler.running}
        batch = runner.input_batch
        if not running.keys() <= batch.req_id_to_index.keys():
            return False
        if any(r.num_computed_tokens + 1 != r.num_tokens for r in running.values()):
            return False
        if len(running) < batch.num_reqs or scheduler.finished_req_ids:
            change = SchedulerOutput.make_empty()
            change.num_scheduled_tokens = dict.fromkeys(running, 1)
            change.total_num_scheduled_tokens = len(running)
            change.finished_req_ids = scheduler.finished_req_ids
            runner._update_states(change)
            scheduler.finished_req_ids = set()
        rows = [running[name] for name in batch.req_ids]
        self._rows = [(request, runner.requests[request.request_id]) for request in rows]
        batch.num_computed_tokens_cpu[: len(rows)] = [r.num_computed_tokens for r in rows]
        return True

    def _allocated(self) -> bool:
        """Return whether there is a place for the next token of each request."""
        computed = self._runner.input_batch.num_computed_tokens_cpu[: len(self._rows)]
        # the first token of a block needs the block, the last one makes it one to share
        for row in np.flatnonzero((computed + 1) % self._size <= 1):
            request, state = self._rows[row]
            blocks = self._scheduler.kv_cache_manager.allocate_slots(request, 1)
            if blocks is None:
                return False
            for held, new in zip(state.block_ids, blocks.get_block_ids()):
                held.extend(new)
                self._table.append_row(new, row)
        return True

    def _states(self) -> torch.Tensor:
        """[n, D]: the hidden state of each request's last token."""
        batch, n = self._runner.input_batch, len(self._rows)
        rows, computed = np.arange(n), batch.num_computed_tokens_cpu[:n]
        blocks = self._table.get_numpy_array()[rows, computed // self._size].astype(np.int64)
        positions = torch.from_numpy(computed.astype(np.int64))
        step = SimpleNamespace(
            num_reqs=n,
            num_actual_tokens=n,
            max_query_len=1,
            max_seq_len=int(computed.max()) + 1,
            query_start_loc=torch.arange(n + 1, dtype=torch.int32),
            seq_lens=torch.from_numpy(computed + 1),
            block_table_tensor=self._table.get_device_tensor(n),
            slot_mapping=torch.from_numpy(blocks * self._size + computed % self._size),
            positions=positions,
            causal=True,
        )
        builder = self._group.get_metadata_builder()
        token_ids = torch.from_numpy(batch.token_ids_cpu[rows, computed])
        return self._decoder.states(token_ids, positions, builder.build(0, step))

    def _taken(self, output: Any) -> list[Sampled]:
        """Record the sampled tokens, as vLLM's runner and scheduler do."""
        batch, n = self._runner.input_batch, len(self._rows)
        rows, ends = np.arange(n), batch.num_tokens_no_spec[:n]
        sampled = output.sampled_token_ids[:, 0].numpy()
        batch.token_ids_cpu[rows, ends] = sampled
        batch.is_token_ids[rows, ends] = True
        ends += 1
        batch.num_computed_tokens_cpu[:n] += 1
        logprobs = output.logprobs_tensors and output.logprobs_tensors.tolists()
        longest, found, ended = self._scheduler.max_model_len, [], set()
        for row, (token, (request, state)) in enumerate(zip(sampled.tolist(), self._rows)):
            state.num_computed_tokens += 1
            state.output_token_ids.append(token)
            request.num_computed_tokens += 1
            request.append_output_token_ids(token)
            finish = None
            if check_stop(request, longest):
                finish = request.get_finished_reason()
                self._scheduler._free_request(request)
                ended.add(request)
            its = logprobs and logprobs.slice_request(row, 1)
            found.append(Sampled(request.request_id, [token], its, finish, request.stop_reason))
        self._scheduler.running = remove_all(self._scheduler.running, ended)
        return found
