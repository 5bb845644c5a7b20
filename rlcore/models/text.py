"""Tokenizers of model folders, the chat format of prompts, and the text of responses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlcore.errors import UserError
from rlcore.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(path: str | Path, *, key: str = "model.path") -> PreTrainedTokenizerBase:
    """The tokenizer of a local model folder. Raises UserError, naming `key`, if there is none."""
    from transformers import AutoTokenizer

    if not Path(path).is_dir():
        raise UserError(f"{key}={path} is not a folder: give a local Hugging Face model folder.")
    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError) as e:
        raise UserError(
            f"{key}={path} holds no readable tokenizer: {str(e).splitlines()[0]}"
        ) from e


def padding(tokenizer: Any) -> int:
    """The token id that fills unused positions; its value has no effect.

    Many tokenizers have no pad token.
    """
    return next((t for t in (tokenizer.pad_token_id, tokenizer.eos_token_id) if t is not None), 0)


def uses_template(tokenizer: Any, chat_template: str) -> bool:
    """Return whether prompts go through the tokenizer's chat template: it has one, and
    `chat_template` is not "off"."""
    return chat_template == "auto" and bool(getattr(tokenizer, "chat_template", None))


def encode_prompt(
    tokenizer: Any,
    asked: str | Sequence[Message],
    *,
    chat_template: str,
    system_prompt: str | None,
) -> list[int]:
    """Token ids of a question or of the messages of a conversation: through the tokenizer's chat
    template if it has one, else as plain text.

    `chat_template="off"` ignores the template. Raises UserError for messages that the template
    refuses.
    """
    from jinja2 import TemplateError

    given = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    messages = with_system(given, system_prompt)
    if not uses_template(tokenizer, chat_template):
        return encode_opening(tokenizer, plain_text(messages))
    try:
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    except TemplateError as error:
        roles = ", ".join(str(message["role"]) for message in messages)
        raise UserError(
            f"model.chat_template=auto: the tokenizer's template does not take a conversation of "
            f"{roles} ({error}): change the data or model.system_prompt, or set "
            "model.chat_template=off."
        ) from error
    return list(ids)


def encode_opening(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text that begins a sequence, behind what the tokenizer itself puts before one:
    a BOS token or nothing. A text that begins with the BOS token gets no second one, and what the
    tokenizer puts behind a sequence is left out, since the model continues it."""
    plain = list(tokenizer.encode(text, add_special_tokens=False))
    given = list(tokenizer.encode(text, add_special_tokens=True))
    before = next(
        (at for at in range(len(given)) if given[at : at + len(plain)] == plain), len(given)
    )
    opening = given[:before]
    return plain if plain[:before] == opening else [*opening, *plain]


def fitting_prompt(ids: Sequence[int], prompt_id: str, most: int) -> np.ndarray:
    """The tokens of a prompt, [P] int32. Raises UserError for one that is empty, or longer than
    `most`, which is what the model can hold before an answer."""
    if len(ids) > most:
        raise UserError(
            f"model.max_len: prompt {prompt_id} has {len(ids)} tokens, more than the {most} that "
            "model.max_len - rollout.max_new_tokens (or task.max_prompt_tokens) leaves for prompts."
        )
    if not ids:
        raise UserError(f"task: prompt {prompt_id} is empty after tokenisation.")
    return np.asarray(ids, dtype=np.int32)


def with_system(messages: Sequence[Message], system_prompt: str | None) -> list[Message]:
    """The messages behind the system prompt, unless they begin with a system turn of their own."""
    own = bool(messages) and messages[0]["role"] == "system"
    if not system_prompt or own:
        return list(messages)
    return [{"role": "system", "content": system_prompt}, *messages]


def plain_text(messages: Sequence[Message]) -> str:
    """The texts of messages one after the other, system turns on lines of their own."""
    return "".join(m["content"] + ("\n" if m["role"] == "system" else "") for m in messages)


def decode_response(tokenizer: Any, ids: Sequence[int], *, special: bool = False) -> str:
    """Text of a response, with or without special tokens."""
    return tokenizer.decode(list(ids), skip_special_tokens=not special)
