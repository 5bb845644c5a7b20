"""The remedies that the sentences of refusals name, as words of the command line."""

import re

from rlcore.config.compose import load
from rlcore.config.groups import groups
from rlcore.config.sentences import keys
from rlcore.errors import UserError

_SET = re.compile(r"(?<![\w.])([a-z_]+(?:\.[\w*]+)*)=([\w.:/+-]*[\w/+-]|\[[^\]]*\]|\{[^}]*\})")
_LEAVES = {}
for _key in keys():
    _LEAVES.setdefault(_key.rpartition(".")[2], []).append(_key)


def remedies(sentence):
    """The settings that the last part of a sentence names, by their full keys, each a word."""
    head, _, advice = sentence.rpartition(": ")
    found = []
    for key, value in _SET.findall(advice):
        word = _full(key, head + advice)
        if word is not None and value not in ("NAME", "FOLDER", "VALUE", "DIR", "PATH", "N"):
            found.append(f"{word}={value}")
    return found


def _full(key, sentence):
    """A key that a sentence shortens to its last part, in the section that it speaks of."""
    if "." in key or key in groups():
        return key if "*" not in key else None
    near = [k for k in re.findall(r"[a-z_]+(?:\.\w+)+", sentence) if k.rpartition(".")[2] == key]
    own = near or [k for k in _LEAVES.get(key, []) if "LABEL" not in k]
    return own[0] if len(set(own)) == 1 else None


def refusal(words):
    """The sentence that refuses a run of these words; "" where it is accepted."""
    try:
        load(["run_dir=x", *words])
    except UserError as error:
        return str(error)
    return ""


def without(words, remedy):
    """The words without those that set the remedy's key, or keys of the group that it chooses."""
    key = remedy.partition("=")[0]
    below = f"{key}." if key in groups() else f"{key}="
    return [
        w for w in words if not f"{w.lstrip('+').partition('=')[0]}=".startswith((f"{key}=", below))
    ]
