"""The process that holds a reward model: `python -m rlcore.tasks.rewards.classifier_worker <socket
fd>`.

It exchanges JSON lines with `rlcore.tasks.rewards.classifier`. First come the settings of a
`ClassifierSpec`, answered by {"ready": true} or {"fatal": sentence}. Then comes a line with a list
of [number of the sample, question, response], a batch. It is answered by {"id": number, "value":
number} or {"id": number, "error": sentence} for each. It dies with its parent."""

from __future__ import annotations

import ctypes
import json
import math
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

from rlcore.tasks.rewards.specs import ClassifierSpec

PR_SET_PDEATHSIG = 1
MAX_ERROR = 300  # characters


class Classifier:
    """The model and its tokenizer. Raises ValueError or OSError if the folder holds none that the
    settings fit."""

    def __init__(self, spec: ClassifierSpec) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        torch.set_num_threads(spec.threads)
        self._spec = spec
        self._tokenizer: Any = AutoTokenizer.from_pretrained(spec.path, local_files_only=True)
        model: Any = AutoModelForSequenceClassification.from_pretrained(
            spec.path, local_files_only=True, dtype=getattr(torch, spec.dtype)
        )
        self._model = model.eval()
        labels = int(model.config.num_labels)
        if spec.label >= labels:
            raise ValueError(f"label={spec.label} is not one of the model's {labels} labels")
        positions = getattr(model.config, "max_position_embeddings", None)
        self._longest = min(spec.max_tokens, positions or spec.max_tokens)

    def judge(self, batch: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
        """Return the answer for each (question, response)."""
        encoded = [self._encoded(question, response) for question, response in batch]
        lengths = [len(inputs["input_ids"]) for inputs in encoded]
        answers: list[dict[str, Any]] = [
            {
                "error": f"a conversation of {length} tokens is not judged: the classifier takes 1 "
                f"to {self._longest} (max_tokens)"
            }
            for length in lengths
        ]
        # Sequences of one length share a forward pass: nothing is padded, and a model of another
        # kind need not know how.
        together: dict[int, list[int]] = {}
        for i, length in enumerate(lengths):
            if 0 < length <= self._longest:
                # Without a pad token, transformers finds the last token of one sequence alone.
                alone = self._model.config.pad_token_id is None
                together.setdefault(i if alone else -length, []).append(i)
        for members in together.values():
            for i, value in zip(members, self._values([encoded[i] for i in members]), strict=True):
                answers[i] = _answer(value)
        return answers

    def _encoded(self, question: str, response: str) -> dict[str, list[int]]:
        """Token ids of a question and a response: by the tokenizer's chat template if it has one,
        else as a pair of texts."""
        if not getattr(self._tokenizer, "chat_template", None):
            return dict(self._tokenizer(question, response))
        conversation = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": response},
        ]
        return dict(
            self._tokenizer.apply_chat_template(conversation, tokenize=True, return_dict=True)
        )

    def _values(self, encoded: Sequence[dict[str, list[int]]]) -> list[float]:
        """The reward of each sequence; all of one length."""
        import torch

        inputs = {name: torch.tensor([e[name] for e in encoded]) for name in encoded[0]}
        with torch.inference_mode():
            logits = self._model(**inputs).logits.float()
        if self._spec.output == "logit":
            chosen = logits[:, self._spec.label]
        elif logits.shape[1] == 1:
            chosen = logits.sigmoid()[:, 0]
        else:
            chosen = logits.softmax(-1)[:, self._spec.label]
        return [float(value) for value in chosen]


def _answer(value: float) -> dict[str, Any]:
    if math.isfinite(value):
        return {"value": value}
    return {"error": f"the classifier's output is {value}, not a finite number"}


def main(fd: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.set_inheritable(fd, False)
    link = socket.socket(fileno=fd)
    lines = link.makefile("rb")
    first = lines.readline()
    if not first:  # the parent was gone before the death signal was set
        return
    try:
        classifier = Classifier(ClassifierSpec(**json.loads(first)))
    except Exception as error:  # whatever transformers raises: the parent ends the run with it
        _send(
            link, {"fatal": f"{type(error).__name__}: {' '.join(str(error).split())}"[:MAX_ERROR]}
        )
        return
    _send(link, {"ready": True})
    for line in lines:
        batch = json.loads(line)
        try:
            answers = classifier.judge([(question, response) for _, question, response in batch])
        except Exception as error:  # a failed score for each
            said = f"{type(error).__name__}: {' '.join(str(error).split())}"[:MAX_ERROR]
            answers = [{"error": said}] * len(batch)
        for (number, *_), answer in zip(batch, answers, strict=True):
            _send(link, {"id": number, **answer})


def _send(link: socket.socket, message: dict[str, Any]) -> None:
    link.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
