"""All faults of a command line: where some words are refused, the faults of the others, too."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches

from rlcore.errors import Faults, UserError

# Words that stand for others, and what follows from leaving one of them out.
PAIRS = {
    "model": ("model", "task.name"),  # held-out rows are chosen for a model of a folder
    "data": ("data", "reward", "task"),
    "reward": ("data", "reward", "task"),
}
# Nothing is known of a run without it.
WHOLE = "experiment"
GROUPS = (WHOLE, *PAIRS, "task", "environment", "actor", "correction", "algorithm", "learner")


def all_faults(
    error: UserError, words: Sequence[str], compose: Callable[[list[str]], Callable[[], object]]
) -> UserError:
    """`error`, which refuses some of the words, and what is refused without them.

    `compose`: the checks before a start, of words that are accepted. A fault that names a key that
    was left out may follow from that, and is not kept.
    """
    faults, left, gone = Faults(), list(words), set[str]()
    checks: Callable[[], object] | None = None
    while checks is None:
        _keep(faults, error, gone)
        named = {key for fault in error.faults if (key := _named(fault, left)) is not None}
        # a wrong word may have meant a group, which chooses what others are
        named |= {key for name in named for key in get_close_matches(name, GROUPS, 1, 0.7)}
        if not named or WHOLE in named:
            break
        gone |= {key for name in named for key in PAIRS.get(name, (name,))}
        left = [word for word in left if not _below(_key(word), gone)]
        try:
            checks = compose(left)
        except UserError as further:
            error = further
    if checks is not None:
        try:
            checks()
        except UserError as further:
            _keep(faults, further, gone)
    return faults.error() or error


def _keep(faults: Faults, error: UserError, gone: set[str]) -> None:
    for fault in error.faults:
        if all(_place(key, str(fault)) is None for key in gone):
            faults.add(fault)


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+~")


def _below(key: str, gone: set[str]) -> bool:
    """True for a key that was left out, and for one below it."""
    return any(key == one or key.startswith(f"{one}.") for one in gone)


def _named(fault: UserError, words: Sequence[str]) -> str | None:
    """The key of the word that a fault names first, the longest of several there."""
    text = str(fault)
    found = []
    for word in words:
        at = text.find(word)
        place = at if at >= 0 else _place(_key(word), text)
        if place is not None:
            found.append((place, -len(_key(word)), _key(word)))
    return min(found)[2] if found else None


def _place(key: str, text: str) -> int | None:
    """Where a text names a key, or one below it."""
    end = r"(?!\w)" if "." in key else "(?=[=.])"
    found = re.search(rf"(?<![\w.]){re.escape(key)}{end}", text)
    return None if found is None else found.start()
