"""Tokenizers of model folders, the chat format of prompts, and the text of responses."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlcore.errors import UserError
from rlcore.files import not_here
from rlcore.models.specs import TemplateSpec
from rlcore.reasons import message_of
from rlcore.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_VOCABULARY = re.compile(
    r"tokenizer\.(json|model.*)|(vocab|merges|spiece|sentencepiece|tekken).*|.*\.(tiktoken|spm|bpe)"
)


def load_tokenizer(path: str | Path, *, key: str = "model.path") -> PreTrainedTokenizerBase:
    """The tokenizer of a local model folder. Raises UserError, naming `key`, if there is none."""
    if not Path(path).is_dir():
        raise UserError(
            f"{key}={path} is not a folder: give a local Hugging Face model folder; "
            f"{not_here(str(path), 'model')}."
        )
    try:
        if _is_of_fresh_model(Path(path)):
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(str(path), local_files_only=True)
        from transformers import AutoTokenizer

        if not any(_VOCABULARY.fullmatch(name) for name in os.listdir(path)):
            raise OSError("none of its files has a vocabulary")  # transformers makes an empty one
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError) as e:
        raise UserError(
            f"{key}={path} holds no readable tokenizer ({message_of(str(e)).rstrip('.')}): copy "
            "the tokenizer's files (tokenizer.json, tokenizer_config.json) of its model into it."
        ) from e


def _is_of_fresh_model(folder: Path) -> bool:
    """True for a tokenizer of characters (`fresh.py`). AutoTokenizer would find this class, too,
    after importing torch and all models' configurations: four seconds of each process's start."""
    try:
        named = json.loads((folder / "tokenizer_config.json").read_text())["tokenizer_class"]
        if named != "TokenizersBackend":
            return False
        kind = json.loads((folder / "tokenizer.json").read_text())["model"]["type"]
    except (OSError, ValueError, LookupError, TypeError):
        return False  # AutoTokenizer says what is wrong
    return bool(kind == "WordLevel")


def padding(tokenizer: Any) -> int:
    """The token id that fills unused positions; its value has no effect.

    Many tokenizers have no pad token.
    """
    return next((t for t in (tokenizer.pad_token_id, tokenizer.eos_token_id) if t is not None), 0)


@lru_cache(maxsize=16)
def control_ids(tokenizer: Any) -> dict[str, int]:
    """Texts of a tokenizer's special tokens -> their ids."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {token.content: i for i, token in added.items() if token.special and token.content}


@lru_cache(maxsize=16)
def markup(tokenizer: Any) -> tuple[str, ...]:
    """Texts of a tokenizer's added tokens in brackets that it does not call special, such as
    <tool_response> or <think>: they frame what the model reads all the same."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    texts = [token.content for token in added.values() if not token.special]
    return tuple(text for text in texts if re.fullmatch(r"<.+>|\[.+\]", text))


def end_ids(tokenizer: Any, folder: str | Path | None) -> list[int]:
    """Token ids that end an answer without a stop string: the tokenizer's end of sequence and those
    that `generation_config.json` of a model folder lists."""
    given: Any = None
    file = None if folder is None else Path(folder) / "generation_config.json"
    if file is not None and file.is_file():
        try:
            given = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError) as error:
            raise UserError(
                f"model.path={folder}: {file.name} cannot be read ({error}): copy it again."
            ) from error
    listed = given if isinstance(given, list) else [given]
    own = getattr(tokenizer, "eos_token_id", None)
    return list(dict.fromkeys(i for i in (own, *listed) if isinstance(i, int)))


def split_stops(tokenizer: Any, stop: Sequence[str]) -> tuple[list[int], tuple[str, ...]]:
    """Stop strings as (ids of the special tokens among them, the others): special tokens are not
    text, so that only their ids can end an answer. Raises UserError for a special token together
    with other text, which would never be found."""
    known = control_ids(tokenizer)
    for text in stop:
        inside = next((token for token in known if token in text and token != text), None)
        if inside is not None and text not in known:
            raise UserError(
                f"rollout.stop={text!r} holds the special token {inside} and other text, which is "
                f"never found in an answer: name {inside} by itself."
            )
    return [known[t] for t in stop if t in known], tuple(t for t in stop if t not in known)


def uses_template(tokenizer: Any, template: TemplateSpec) -> bool:
    """Return whether prompts go through a chat template: a file's, or, with "auto", the
    tokenizer's, if it has one."""
    own = bool(getattr(tokenizer, "chat_template", None))
    return template.chat_template != "off" and (template.chat_template != "auto" or own)


def template_text(tokenizer: Any, settings: TemplateSpec, *, tools: bool = False) -> str:
    """The Jinja text of the chat template; a tokenizer may have another one for tools.

    Raises UserError for a file that cannot be read.
    """
    if settings.chat_template != "auto":
        return _template_of(settings.chat_template)
    shown: list[Any] | None = [{}] if tools else None
    return str(tokenizer.get_chat_template(tools=shown))


@lru_cache(maxsize=16)
def _template_of(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(
            f"model.chat_template={file} cannot be read ({error}): name a file with a Jinja "
            "template, auto or off."
        ) from error


def rendered(
    tokenizer: Any,
    messages: Sequence[Message],
    settings: TemplateSpec,
    *,
    tools: Sequence[Any] | None = None,
    opens: bool = True,
) -> str:
    """The text of a conversation by the chat template. `opens`: it ends where the model's next turn
    begins. Raises what the template raises."""
    auto = settings.chat_template == "auto"
    own = {} if auto else {"chat_template": template_text(tokenizer, settings)}
    text = tokenizer.apply_chat_template(
        list(messages),
        tools=tools,
        add_generation_prompt=opens,
        tokenize=False,
        **own,
        **settings.chat_template_args,
    )
    return str(text)


def encode_prompt(
    tokenizer: Any, asked: str | Sequence[Message], settings: TemplateSpec
) -> list[int]:
    """Token ids of a question or of the messages of a conversation: through the tokenizer's chat
    template if it has one, else as plain text.

    `chat_template="off"` ignores the template. Special tokens that the messages spell are text, or,
    with `control_tokens="tokens"`, these tokens. Raises UserError for messages that the template
    refuses.
    """
    from jinja2 import TemplateError

    given = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    messages = with_system(given, settings.system_prompt)
    if not uses_template(tokenizer, settings):
        return encode_opening(tokenizer, plain_text(messages), settings.control_tokens)
    spelled = Spelled(tokenizer, settings.control_tokens)
    try:
        text = rendered(tokenizer, spelled.hidden_in(messages), settings)
    except TemplateError as error:
        roles = ", ".join(str(message["role"]) for message in messages)
        raise UserError(
            f"model.chat_template={settings.chat_template}: the template does not take a "
            f"conversation of {roles} ({error}): change the data or model.system_prompt, or set "
            "model.chat_template=off."
        ) from error
    return spelled.encode(text)


def encode_text(tokenizer: Any, text: str, control_tokens: str) -> list[int]:
    """Token ids of a text alone; special tokens that it spells are text, or, with
    `control_tokens="tokens"`, these tokens."""
    return _encoded(tokenizer, text, split=_splits(tokenizer, text, control_tokens))


def spelled_tokens(tokenizer: Any, text: str) -> list[str]:
    """The special tokens that a text spells."""
    return [token for token in control_ids(tokenizer) if token in text]


def _splits(tokenizer: Any, text: str, control_tokens: str) -> bool:
    return control_tokens == "text" and bool(spelled_tokens(tokenizer, text))


def _encoded(tokenizer: Any, text: str, *, split: bool, begins: bool = False) -> list[int]:
    further = {"split_special_tokens": True} if split else {}
    return list(tokenizer.encode(text, add_special_tokens=begins, **further))


# Private-use characters: between them stands the number of a special token that a text spells.
_OPEN, _CLOSE = "\U000f0000", "\U000f0001"


class Spelled:
    """Special tokens that messages spell, kept as text through a chat template.

    Messages are rendered with each of them replaced by its number between two characters, so that
    every special token of the rendered text is the template's own. The text between two special
    tokens, with its numbers replaced back, is then encoded without special tokens.
    """

    def __init__(self, tokenizer: Any, control_tokens: str) -> None:
        self._tokenizer = tokenizer
        self._keeps = control_tokens == "text"
        self._ids = control_ids(tokenizer)
        control = [_OPEN, _CLOSE, *self._ids]
        self._names = [*control, *markup(tokenizer)]
        longest = sorted(self._names, key=len, reverse=True)
        self._foreign = re.compile("|".join(map(re.escape, longest)))
        longest = sorted(control, key=len, reverse=True)
        self._spelled = re.compile("|".join(map(re.escape, longest)))
        own = "|".join(re.escape(name) for name in longest if name in self._ids)
        self._own = re.compile(f"({own})" if own else "(?!)()")

    def hidden(self, value: Any, *, foreign: bool = False) -> Any:
        """The value with the special tokens of its texts replaced, as they are rendered. `foreign`:
        the text is of neither model nor user, and markup such as <tool_response> is, too."""
        if not self._keeps:
            return value
        if isinstance(value, str):
            spelled = self._foreign if foreign else self._spelled
            return spelled.sub(lambda m: f"{_OPEN}{self._names.index(m[0])}{_CLOSE}", value)
        if isinstance(value, Mapping):
            return {key: self.hidden(inner, foreign=foreign) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.hidden(inner, foreign=foreign) for inner in value]
        return value

    def hidden_in(self, messages: Sequence[Message]) -> list[Message]:
        """The messages of a conversation, as `hidden` leaves them; answers of tools are foreign."""
        return [self.hidden(m, foreign=m.get("role") == "tool") for m in messages]

    def names_in(self, text: str) -> list[str]:
        """The special tokens that a text spells, one after the other."""
        return [name for name in self._spelled.findall(text) if name in self._ids]

    def _shown(self, text: str) -> list[str]:
        """The text with its numbers replaced back, cut inside the markup that was replaced: a
        tokenizer takes markup for a token wherever it stands whole."""
        parts, at = [""], 0
        for found in re.finditer(f"{_OPEN}([0-9]+){_CLOSE}", text):
            name = self._names[int(found[1])]
            whole = name in self._ids or name in (_OPEN, _CLOSE)
            parts[-1] += text[at : found.start()] + (name if whole else name[0])
            parts += [] if whole else [name[1:]]
            at = found.end()
        return [*parts[:-1], parts[-1] + text[at:]]

    def encode(self, rendered: str) -> list[int]:
        """Token ids of a rendered text."""
        if _OPEN not in rendered:
            return _encoded(self._tokenizer, rendered, split=False)
        pieces = self._own.split(rendered)  # texts, and between them special tokens
        ids: list[int] = []
        usual = ""  # what the tokenizer reads as it is
        for at, piece in enumerate(pieces):
            if at % 2 or _OPEN not in piece:
                usual += piece
                continue
            ids += _encoded(self._tokenizer, usual, split=False) if usual else []
            usual = ""
            before = pieces[at - 1] if at else ""
            after = pieces[at + 1] if at + 1 < len(pieces) else ""
            ids += self._inside(self._shown(piece), before, after)
        return ids + (_encoded(self._tokenizer, usual, split=False) if usual else [])

    def _inside(self, texts: Sequence[str], before: str, after: str) -> list[int]:
        """Pieces of a text between two special tokens, "" at the ends, as the tokenizer reads it
        there."""
        texts, added = list(texts), self._tokenizer.added_tokens_decoder
        if before and added[self._ids[before]].rstrip:
            texts[0] = texts[0].lstrip()
        if after and added[self._ids[after]].lstrip:
            texts[-1] = texts[-1].rstrip()
        first, *others = texts
        probe = _encoded(self._tokenizer, f"{before}a", split=False)
        if not before or probe[1:] == _encoded(self._tokenizer, "a", split=False):
            ids = _encoded(self._tokenizer, first, split=True)
        else:
            ids = self._later(first)
        return ids + [i for text in others for i in self._later(text)]

    def _later(self, text: str) -> list[int]:
        """A text inside a sequence: some tokenizers put a space before one that begins it."""
        line = _encoded(self._tokenizer, "\n", split=False)
        return _encoded(self._tokenizer, f"\n{text}", split=True)[len(line) :]


def encode_opening(tokenizer: Any, text: str, control_tokens: str = "text") -> list[int]:
    """Token ids of a text that begins a sequence, after the BOS token if the tokenizer adds one. A
    text that begins with the BOS token gets no second one. Tokens that the tokenizer adds at the
    end of a sequence are left out, since the model continues it."""
    split = _splits(tokenizer, text, control_tokens)
    plain = _encoded(tokenizer, text, split=split)
    given = _encoded(tokenizer, text, split=split, begins=True)
    before = next(
        (at for at in range(len(given)) if given[at : at + len(plain)] == plain), len(given)
    )
    opening = given[:before]
    return plain if plain[:before] == opening else [*opening, *plain]


def fitting_prompt(
    ids: Sequence[int], prompt_id: str, most: int, *, cut: bool = False, bos: int | None = None
) -> np.ndarray:
    """The tokens of a prompt, [P] int32. Raises UserError for one that is empty, or longer than
    `most`, which is what the model can hold before an answer.

    `cut`: a longer one keeps its last tokens, behind the BOS token `bos` if it begins with it."""
    if len(ids) > most and cut:
        first = 1 if ids[0] == bos and most > 1 else 0
        ids = [*ids[:first], *ids[len(ids) - most + first :]]
    if len(ids) > most:
        raise UserError(
            f"model.max_len: prompt {prompt_id} has {len(ids)} tokens, more than the {most} that "
            "model.max_len - rollout.max_new_tokens (or task.max_prompt_tokens) leaves for "
            "prompts: raise it, or set task.overlong_rows to skip or truncate_left."
        )
    if not ids:
        raise UserError(
            f"task: prompt {prompt_id} is empty after tokenisation: leave its row out of the data."
        )
    return np.asarray(ids, dtype=np.int32)


def with_system(messages: Sequence[Message], system_prompt: str | None) -> list[Message]:
    """The messages behind the system prompt, unless they begin with their own system turn."""
    own = bool(messages) and messages[0]["role"] == "system"
    if not system_prompt or own:
        return list(messages)
    return [{"role": "system", "content": system_prompt}, *messages]


def plain_text(messages: Sequence[Message]) -> str:
    """The texts of messages one after the other, system turns on their own lines."""
    return "".join(m["content"] + ("\n" if m["role"] == "system" else "") for m in messages)


def decode_response(tokenizer: Any, ids: Sequence[int], *, special: bool = False) -> str:
    """Text of a response, with or without special tokens."""
    return tokenizer.decode(list(ids), skip_special_tokens=not special)
