"""A teacher in a vLLM engine: log-probs of given tokens, in one pass over each record."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams

from rlcore.errors import UserError
from rlcore.interfaces import GivenTokens, TeacherAnswer
from rlcore.models.folder import read_config, read_shapes
from rlcore.rollout.engines.vllm.engine import start_llm
from rlcore.rollout.engines.vllm.platform import check_platform
from rlcore.rollout.specs import EngineJob


class TeacherEngine:
    """One in-process engine. Not thread-safe: one thread at a time may call it."""

    def __init__(self, job: EngineJob) -> None:
        """`job.logprobs_k`: likeliest tokens a position, cut to the vocabulary; `job.max_len`:
        tokens of a record, at most the positions of the model."""
        check_platform(job.actor, "teacher.engine")
        self._vocab = int(read_config(job.model_path)["vocab_size"])
        self._k = min(job.logprobs_k, self._vocab)
        self._max_len = job.max_len
        # vLLM draws a token behind every prompt. It wants room for that token, which may lie behind
        # the model's last position, and never computes its pass.
        os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
        self._llm = start_llm(replace(job, max_len=job.max_len + 1), self._vocab)
        names = list(read_shapes(job.model_path))
        if unfilled := self._llm.collective_rpc("rl_unfilled", args=(names,))[0]:
            raise UserError(
                f"teacher.engine cannot serve {job.model_path}: {unfilled}; choose a model of "
                "another family (docs/models.md)."
            )
        self._tasks = self._llm.get_supported_tasks()
        self._count = 0
        # the first pass allocates, and takes many times as long: no record shall wait for it
        self.score([(np.zeros(2, np.int32), np.array([False, True]))] * 2)

    def score(self, given: Sequence[GivenTokens]) -> list[TeacherAnswer | None]:
        """One for each record, at temperature 1; None for one that is too long or has a token
        outside the vocabulary. Raises RuntimeError if vLLM failed a request."""
        torch.get_num_threads()  # as `VllmEngine.step` says: this may be another thread
        names = [self._add(ids) for ids, _ in given]
        waiting = {name for name in names if name}
        parts: dict[str, list[Any]] = {name: [] for name in waiting}
        while waiting:
            for out in self._llm.engine_core.get_output().outputs:
                if out.request_id not in waiting:
                    continue
                if out.new_prompt_logprobs_tensors is not None:
                    parts[out.request_id].append(out.new_prompt_logprobs_tensors)
                if out.finish_reason is not None:
                    waiting.discard(out.request_id)
        return [
            _answer(parts[name], sampled) if name else None
            for name, (_, sampled) in zip(names, given)
        ]

    def _add(self, ids: np.ndarray) -> str:
        """Queue a record; its name, "" if it cannot be scored."""
        if len(ids) > self._max_len or ids.min() < 0 or ids.max() >= self._vocab:
            return ""
        params = SamplingParams(max_tokens=1, prompt_logprobs=self._k, detokenize=False)
        prompt: dict[str, Any] = {"type": "token", "prompt_token_ids": ids.tolist()}
        name = f"record-{self._count}"
        request = self._llm.input_processor.process_inputs(
            name,
            prompt,  # type: ignore[arg-type]
            params,
            supported_tasks=self._tasks,
        )
        self._count += 1
        request.external_req_id = name
        self._llm.engine_core.add_request(request)
        return name


def _answer(parts: Sequence[Any], sampled: np.ndarray) -> TeacherAnswer:
    """Read from vLLM's arrays [L - 1, 1 + k], row i of token i + 1: that token's, then the
    likeliest."""
    if not parts:
        raise RuntimeError("vLLM ended a record without its log-probs")
    rows = np.flatnonzero(sampled) - 1  # the first token is never a sampled one
    ids = np.concatenate([np.asarray(part.logprob_token_ids) for part in parts])[rows, 1:]
    logp = np.concatenate([np.asarray(part.logprobs) for part in parts])[rows].astype(np.float32)
    return ids.astype(np.int32), logp[:, 1:], logp[:, 0]
