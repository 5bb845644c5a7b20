"""Draws of seeded requests on the CPU, without an operation of torch for each request and token.

vLLM takes one number from the generator of every request in every step. Here a request's next
numbers are drawn together: the same ones in the same order, so that tokens stay what they were.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p

_AHEAD = 16  # numbers drawn together
_SPARE = 64  # requests that may have left before their numbers are dropped
_LARGEST = 2**31


class SeededDraws:
    """In place of vLLM's CPU sampler of one model runner."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        # request -> its next numbers, the next one last; kept while it is preempted, too
        self._ahead: dict[str, list[int]] = {}

    def install(self) -> None:
        """Replace what the runner samples with, where that is vLLM's own for seeds."""
        sampler = self._runner.sampler.topk_topp_sampler
        own = getattr(sampler.forward, "__func__", None) is TopKTopPSampler.forward_cpu
        if own and not sampler.use_fp64_gumbel and sampler.logprobs_mode == "processed_logprobs":
            sampler.forward = self.sample

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
