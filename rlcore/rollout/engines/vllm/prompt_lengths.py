"""True prompt lengths of the requests in a step, read from vLLM's model runner. Imports no vLLM."""

from __future__ import annotations

from typing import Any

import torch

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
    for builder in builders:
        builder.prompt_lengths = PromptLengths(model_runner)


class PromptLengths:
    """Prompt lengths by row of the runner's batch.

    vLLM's own count stays the prompt's through preemption and recomputation. A request that was
    resubmitted with part of its response as the prompt carries its true length:
    `SamplingParams(extra_args={"prompt_len": P})`.
    """

    def __init__(self, model_runner: Any) -> None:
        self._runner = model_runner

    def __call__(self, rows: int) -> torch.Tensor:
        """[rows] int64 on the CPU; 0 for the padding rows of a captured graph."""
        lengths = [self._length(r) for r in self._runner.input_batch.req_ids[:rows]]
        return torch.tensor(lengths + [0] * (rows - len(lengths)), dtype=torch.int64)

    def _length(self, request_id: str) -> int:
        state = self._runner.requests[request_id]
        params = state.sampling_params
        given = (params.extra_args or {}).get(PROMPT_LEN) if params is not None else None
        return int(state.num_prompt_tokens if given is None else given)
