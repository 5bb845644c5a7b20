"""Stop strings, checked on the decoded text of one growing response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """`text` up to the earliest occurrence of any stop string; unchanged if there is none.

    A trajectory keeps the tokens that spelled the stop string (they were sampled, and the learner must be able to
    reinforce stopping there), so whoever grades or shows its text cuts it with this.
    """
    found = [at for at in (text.find(s) for s in stop) if at >= 0]
    return text[: min(found)] if found else text


class StopWatcher:
    """Decodes a response token by token and says when it has spelled a stop string."""

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        """`tokenizer`: a fast Hugging Face tokenizer. Raises ValueError for one without a `tokenizers` back end."""
        from tokenizers.decoders import DecodeStream

        backend = getattr(tokenizer, "backend_tokenizer", None) or getattr(tokenizer, "_tokenizer", None)
        if backend is None:
            raise ValueError("stop strings need a fast tokenizer: this one has no `tokenizers` back end")
        self._backend = backend
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop = tuple(stop)
        self._keep = max(len(s) for s in self._stop) - 1
        self._tail = ""

    def push(self, token_id: int) -> bool:
        """Add one sampled token; True once the text holds a stop string."""
        piece = self._stream.step(self._backend, token_id)
        if not piece:  # part of a character, or a special token
            return False
        window = self._tail + piece
        self._tail = window[-self._keep :] if self._keep else ""
        return any(s in window for s in self._stop)
