"""Tokenizers of model folders, the chat format of prompts, and the text of responses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore.errors import UserError

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
    """Whether prompts go through the tokenizer's chat template: it has one, and `chat_template` is
    not "off"."""
    return chat_template == "auto" and bool(getattr(tokenizer, "chat_template", None))


def encode_prompt(
    tokenizer: Any, question: str, *, chat_template: str, system_prompt: str | None
) -> list[int]:
    """Token ids of a prompt: through the tokenizer's chat template if it has one, else unchanged.

    `chat_template="off"` ignores the template.
    """
    if uses_template(tokenizer, chat_template):
        messages: list[dict[str, str]] = [{"role": "user", "content": question}]
        if system_prompt:
            messages.insert(0, {"role": "system", "content": system_prompt})
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return list(ids)
    text = question if not system_prompt else f"{system_prompt}\n{question}"
    return list(tokenizer.encode(text, add_special_tokens=False))


def decode_response(tokenizer: Any, ids: Sequence[int]) -> str:
    """Text of a response, without special tokens."""
    return tokenizer.decode(list(ids), skip_special_tokens=True)
