"""Text before and after an engine: tokens of prompts, stop strings, and the text of a trajectory
for graders."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlcore.models.specs import TemplateSpec
from rlcore.models.text import encode_prompt, fitting_prompt
from rlcore.types import Answer, Request, Trajectory


@dataclass(frozen=True, slots=True)
class StopStrings:
    """The strings that end a response, by task: the first part of a prompt id.

    Example: StopStrings(("\n",), {"gsm8k": ("####",)})
    """

    usual: tuple[str, ...] = ()
    tasks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def of(self, prompt_id: str) -> tuple[str, ...]:
        """The strings of a prompt's task."""
        return self.tasks.get(prompt_id.partition("/")[0], self.usual)


def read_answer(
    trajectory: Trajectory,
    decode: Callable[[Sequence[int]], str],
    stop: Sequence[str],
    *,
    prompt: str = "",
    in_pieces: bool = False,
) -> Answer:
    """The answer of an episode of one record, cut before its first stop string.

    The trajectory keeps the tokens of the stop string: they were sampled, and the learner must be
    able to reinforce them. `prompt`: the prompt's text, for display. `in_pieces`: whether the text
    of every token is wanted, too."""
    versions = trajectory.token_version
    ids: list[int] = trajectory.sampled_ids.tolist()
    text = decode(ids)
    return Answer(
        group_id=trajectory.group_id,
        sample_index=trajectory.sample_index,
        draw_id=trajectory.draw_id,
        prompt_id=trajectory.prompt_id,
        text=cut(text, stop),
        tokens=len(trajectory.logp_inf),
        versions=(int(versions.min()), int(versions.max())) if len(versions) else None,
        finish_reason=trajectory.finish_reason,
        purpose=trajectory.purpose,
        prompt=prompt,
        pieces=tuple(decode([token]) for token in ids) if in_pieces else (),
    )


def cut(text: str, stop: Sequence[str]) -> str:
    """A response up to its first stop string."""
    found = [at for at in (text.find(s) for s in stop) if at >= 0]
    return text[: min(found)] if found else text


class StopWatcher:
    """Decodes a response token by token and detects when its text contains a stop string."""

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        """`tokenizer`: a fast Hugging Face tokenizer. Raises ValueError for one without a
        `tokenizers` back end."""
        from tokenizers.decoders import DecodeStream

        backend = getattr(tokenizer, "backend_tokenizer", None) or getattr(
            tokenizer, "_tokenizer", None
        )
        if backend is None:
            raise ValueError(
                "rollout.stop needs a fast tokenizer: this one has no `tokenizers` back end"
            )
        self._backend = backend
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop = tuple(stop)
        self._keep = max(len(s) for s in self._stop) - 1  # a string may span two tokens' texts
        self._tail = ""

    def push(self, token_id: int) -> bool:
        """Add one sampled token; True once the text contains a stop string."""
        piece = self._stream.step(self._backend, token_id)
        if not piece:  # part of a character, or a special token
            return False
        window = self._tail + piece
        self._tail = window[-self._keep :] if self._keep else ""
        return any(s in window for s in self._stop)


@dataclass(frozen=True, slots=True)
class TextSettings:
    """How conversations become tokens, and responses the text that graders are given.

    Example: TextSettings("/models/policy", {"digits": 48})
    """

    tokenizer_path: str
    most_tokens: Mapping[str, int]  # that a prompt may have, by the label of its task
    template: TemplateSpec = field(default_factory=TemplateSpec)
    cut: frozenset[str] = frozenset()  # labels of the tasks whose longer prompts are cut
    # that the text of a response is cut before
    stop: StopStrings = field(default_factory=StopStrings)
    in_pieces: frozenset[str] = frozenset()  # tasks whose graders ask for the text of every token
    raw: frozenset[str] = frozenset()  # tasks whose graders see special tokens


class PromptEncoder:
    """Fills the empty `prompt_ids` of requests. May be called from any thread."""

    def __init__(self, tokenizer: Any, settings: TextSettings) -> None:
        """`tokenizer`: used by this object alone, since tokenizers are not made for two threads."""
        self._tokenizer = tokenizer
        self._settings = settings
        self._lock = threading.Lock()

    def encoded(self, requests: Sequence[Request]) -> list[Request]:
        """The requests with the tokens of their prompts; a prompt is encoded once. Raises UserError
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
        label, settings = request.prompt_id.partition("/")[0], self._settings
        return fitting_prompt(
            encode_prompt(self._tokenizer, request.asked, settings.template),
            request.prompt_id,
            settings.most_tokens[label],
            cut=label in settings.cut,
            bos=getattr(self._tokenizer, "bos_token_id", None),
        )
