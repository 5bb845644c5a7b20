"""JSON of large documents, made in pieces: while one call of the encoder runs, all other threads of
its process wait."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

PIECE = 100  # entries of a list
CHARACTERS = 1 << 20  # of a text

_encode = json.JSONEncoder(separators=(",", ":")).encode


def dump_large(document: Mapping[str, Any]) -> str:
    """The JSON text of a document, of which large members are lists or texts, in the least of
    characters."""
    members = (f"{_encode(name)}:{_member(value)}" for name, value in document.items())
    return "{" + ",".join(members) + "}"


def _member(value: Any) -> str:
    if isinstance(value, list):
        pieces = (value[i : i + PIECE] for i in range(0, len(value), PIECE))
        return "[" + ",".join(_encode(piece)[1:-1] for piece in pieces) + "]"
    if isinstance(value, str):
        texts = (value[i : i + CHARACTERS] for i in range(0, len(value), CHARACTERS))
        return '"' + "".join(_encode(text)[1:-1] for text in texts) + '"'
    return _encode(value)
