"""Stop strings, checked on the decoded text of a growing response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


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
