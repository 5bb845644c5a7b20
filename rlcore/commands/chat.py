"""`rlcore chat`: talk to a run's policy, or to a model folder, in this process: no Ray, no engine.

Prompts are encoded and answers decoded as a run's are, and sampled by `rollout.temperature`,
`rollout.max_new_tokens` and `rollout.stop`; truncation (top-p, top-k, min-p) is not applied.
Standard output has the answers alone, and standard error what is said about them.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TextIO

from rlcore.commands.evaluate import to_evaluate
from rlcore.commands.preflight import prepare
from rlcore.commands.processes import policy_job
from rlcore.config.schema import RunConfig
from rlcore.environments.protocol import Message
from rlcore.errors import UserError
from rlcore.learner.exporting import export_stored
from rlcore.models.fresh import quiet_libraries
from rlcore.models.text import (
    decode_response,
    encode_prompt,
    end_ids,
    load_tokenizer,
    uses_template,
)
from rlcore.reasons import message_of
from rlcore.seeding import derive_seed
from rlcore.spec import refuse

HELP = "an empty line is left out, /new begins another conversation, /quit or Ctrl-D ends"
UNTRAINED = 1024  # tokens of an answer where neither a run nor a word says how many


def note(text: str) -> None:
    """Print one line to standard error at once."""
    print(f"rlcore: {text}", file=sys.stderr, flush=True)


def chat(config: RunConfig, named: str | None, *, model_named: bool, length_named: bool) -> int:
    """Answer lines of standard input until it ends. Raises UserError as `to_evaluate` does.

    `length_named`: the command's own words set rollout.max_new_tokens.
    """
    refuse(
        config.model.diffusion is not None,
        "model.diffusion is set, and rlcore chat talks to causal models only: look at the samples "
        "in report.html, or use rlcore eval.",
    )
    path, checkpoint = to_evaluate(config, named, model_named)
    note(f"loading {checkpoint or path}")
    most = config.rollout.max_new_tokens if length_named or checkpoint else UNTRAINED
    with _weights(config, path, checkpoint) as folder:
        model = ChatModel(config, path, folder, most)
    note(f"chat with {checkpoint or path}: {HELP}")
    if config.rollout.top_p < 1 or config.rollout.top_k > 0 or config.rollout.min_p > 0:
        note("answers here are of the whole distribution: top_p, top_k and min_p are not applied")
    shown = sys.stdin.isatty()
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # a byte that is no text costs itself alone
    return converse(model.answer, sys.stdin, sys.stdout, prompt="> " if shown else "")


@contextlib.contextmanager
def _weights(config: RunConfig, path: str, checkpoint: Path | None) -> Iterator[Path]:
    """A folder with the weights, for the time of loading them."""
    if checkpoint is None:
        yield Path(path)
        return
    prepared = prepare(config, trains=False, evaluates=False)
    with tempfile.TemporaryDirectory() as made:
        out = Path(made) / "policy"
        export_stored(policy_job(config, path, prepared.pad_id), checkpoint / "learner", out)
        yield out


# of a conversation, and of what shows each piece: the answer, and a remark on it or ""
Answer = Callable[[Sequence[Message], Callable[[str], None]], tuple[str, str]]


def converse(answer: Answer, lines: TextIO, out: TextIO, prompt: str = "") -> int:
    """Answer each line, with what was said before, and write answers as they are sampled.

    Ctrl-C ends an answer; at the prompt it ends the conversation. A question whose answer ended so,
    or that the chat template refuses, is not part of what follows.
    """
    said: list[Message] = []
    while True:
        out.write(prompt)
        out.flush()
        try:
            line = lines.readline()
        except KeyboardInterrupt:
            line = ""
        asked = line.strip()
        if not line or asked == "/quit":
            out.write("\n" if prompt else "")
            return 0
        if asked == "/new":
            said = []
        elif asked:
            further, remark = [*said, {"role": "user", "content": asked}], ""
            try:
                with _shown(out) as show:
                    found, remark = answer(further, show)
                said = [*further, {"role": "assistant", "content": found}]
            except KeyboardInterrupt:
                pass
            except UserError as error:
                remark = str(error)
            out.write("\n")
            out.flush()
            if remark:
                note(remark)


@contextlib.contextmanager
def _shown(out: TextIO) -> Iterator[Callable[[str], None]]:
    """A function that writes a piece of an answer; it raises KeyboardInterrupt after a Ctrl-C.

    Raised by the signal itself, an interrupt is lost where libraries' finalizers run.
    """
    noted: list[int] = []

    def show(piece: str) -> None:
        if noted:
            raise KeyboardInterrupt
        print(piece, end="", file=out, flush=True)

    before = signal.signal(signal.SIGINT, lambda number, _: noted.append(number))
    try:
        yield show
    finally:
        signal.signal(signal.SIGINT, before)


class ChatModel:
    """A causal model on the first GPU, if there is one, else on the CPU."""

    def __init__(self, config: RunConfig, path: str, folder: Path, most: int) -> None:
        """`path`: of the tokenizer and of what ends an answer; `folder`: of the weights; `most`:
        tokens of an answer."""
        import torch
        from transformers import AutoModelForCausalLM

        quiet_libraries()
        self._config = config
        self._tokenizer = load_tokenizer(path)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype = torch.bfloat16 if self._device.type == "cuda" else torch.float32
        try:
            # eager: every family's own attention, such as capped logits
            lm: Any = AutoModelForCausalLM.from_pretrained(
                str(folder),
                dtype=dtype,
                attn_implementation="eager",
                local_files_only=True,
                trust_remote_code=False,  # else it asks, and reads the answer from our questions
                use_safetensors=True,  # another format would be unpickled
            )
        except (OSError, ValueError, ImportError) as error:
            raise UserError(
                f"model.path={path} cannot be loaded as a causal model ({message_of(str(error))}): "
                "name another folder."
            ) from error
        self._lm = lm.to(self._device).eval()
        self._ends = end_ids(self._tokenizer, path)
        text = self._lm.config.get_text_config()
        self._holds = getattr(text, "max_position_embeddings", None) or config.model.max_len
        self._path, self._most = path, most
        self._asked = 0

    def answer(self, said: Sequence[Message], show: Callable[[str], None]) -> tuple[str, str]:
        """A sampled answer, shown token by token, and why it was cut off, or "".

        Without a chat template the model reads the last question alone, as in training. Raises
        UserError for a conversation that fills the model.
        """
        import torch

        template = self._config.model
        asked = said if uses_template(self._tokenizer, template) else said[-1:]
        ids = encode_prompt(self._tokenizer, asked, template)
        room = self._holds - len(ids)
        refuse(
            room < 1,
            f"model.path={self._path} holds {self._holds} tokens and this conversation has "
            f"{len(ids)}: begin another one with /new.",
        )
        refuse(
            not ids,
            f"model.path={self._path} has no token for any character of this question: ask in "
            "words that its tokenizer knows.",
        )
        chance = torch.Generator().manual_seed(derive_seed(self._config.seed, "chat", self._asked))
        self._asked += 1
        found: list[int] = []
        text = ""
        for token in self._sampled(ids, chance):
            if token in self._ends:
                return text, ""
            found.append(token)
            whole = decode_response(self._tokenizer, found)
            if whole.endswith("\ufffd"):  # a character of several tokens is not whole yet
                whole = text
            show(whole[len(text) :])
            text = whole
            if any(stop in text for stop in self._config.rollout.stop):
                return text, ""
            if len(found) == min(self._most, room):
                break
        full = f"the conversation fills the {self._holds} tokens that the model holds: /new"
        why = f"rollout.max_new_tokens={self._most}" if self._most <= room else full
        return text, f"cut off: {why}"

    def _sampled(self, ids: Sequence[int], chance: Any) -> Iterator[int]:
        import torch

        temperature = self._config.rollout.temperature
        given = torch.tensor([list(ids)], device=self._device)
        past = None
        while True:
            with torch.no_grad():
                out = self._lm(input_ids=given, past_key_values=past, use_cache=True)
            past = out.past_key_values
            probabilities = (out.logits[0, -1].float() / temperature).softmax(-1).cpu()
            token = int(torch.multinomial(probabilities, 1, generator=chance))
            yield token
            given = torch.tensor([[token]], device=self._device)
