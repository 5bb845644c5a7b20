"""Tokens of prompts, made beside the engine that samples after them: the loop sends questions and
messages, and hundreds of actors share the work of encoding them."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlcore.models.text import encode_prompt, fitting_prompt
from rlcore.types import Request


@dataclass(frozen=True, slots=True)
class PromptJob:
    """How prompts are made. Example: PromptJob({"digits": 48})"""

    most_tokens: Mapping[str, int]  # that a prompt may have, by the label of its task
    chat_template: str = "auto"
    system_prompt: str | None = None


class PromptEncoder:
    """Fills the empty `prompt_ids` of requests. May be called from any thread."""

    def __init__(self, tokenizer: Any, job: PromptJob) -> None:
        """`tokenizer`: used by nobody else, since it is not made for two threads."""
        self._tokenizer = tokenizer
        self._job = job
        self._lock = threading.Lock()

    def encoded(self, requests: Sequence[Request]) -> list[Request]:
        """The requests with the tokens of what they ask, one encoding a prompt. Raises UserError
        for a prompt that the template refuses or the model cannot hold."""
        made: dict[str, np.ndarray] = {}
        with self._lock:
            for request in requests:
                if request.asked is not None and request.prompt_id not in made:
                    made[request.prompt_id] = self._encode(request)
        return [
            r if r.asked is None else replace(r, prompt_ids=made[r.prompt_id], asked=None)
            for r in requests
        ]

    def _encode(self, request: Request) -> np.ndarray:
        assert request.asked is not None
        label, job = request.prompt_id.partition("/")[0], self._job
        ids = encode_prompt(
            self._tokenizer,
            request.asked,
            chat_template=job.chat_template,
            system_prompt=job.system_prompt,
        )
        return fitting_prompt(ids, request.prompt_id, job.most_tokens[label])
