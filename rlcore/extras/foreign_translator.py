"""The state of one translation: another trainer's settings, ours, and what is left. No torch."""

from __future__ import annotations

from typing import Any, NamedTuple

from rlcore.extras.foreign_files import Given
from rlcore.extras.foreign_keys import ENTRIES, ForeignKey, Source
from rlcore.extras.foreign_meanings import DEFAULTS


class Left(NamedTuple):
    """A setting that was not translated. Example: Left("remote_rm_url", "http://a", "see ...")"""

    key: str
    value: Any
    reason: str


class Translation(NamedTuple):
    """Our keys with their values, the options of groups, and the rest: settings that do not change
    what is learned, and settings that the user must act on."""

    values: dict[str, Any]
    options: dict[str, Any]  # group -> option
    harmless: list[Left]
    left: list[Left]
    covered: list[Left]  # so here, too, or in what another key says


class Translator:
    def __init__(self, source: Source, given: Given) -> None:
        self.source = source
        self.given: Given = {**DEFAULTS[source], **given}
        self.values: dict[str, Any] = {}
        self.options: dict[str, Any] = {
            "model": "path",
            "task": "file",
            "actor": ["bf16"],
            "correction": ["none"],
            "schedule": "on_policy",
            "learner": "gpu",
        }
        self.left: list[Left] = []

    def leave(self, key: str, reason: str) -> None:
        """List a setting as not translated; one that the file lacks, if the reason asks for it."""
        self.left.append(Left(key, self.given.get(key), reason))

    def name(self, ours: str) -> str:
        """Return the other trainer's name of one of our keys."""
        return next(entry.of(self.source) for entry in ENTRIES if entry.ours == ours)

    def theirs(self, ours: str, default: Any = None) -> Any:
        """The value that the file gives for one of our keys."""
        return self.given.get(self.name(ours), default)

    def on(self, key: str) -> bool:
        return str(self.given.get(key, False)).lower() == "true"

    def switched(self, by_source: dict[Source, str]) -> bool:
        """True if the source has such a switch, and it is on."""
        return self.on(by_source.get(self.source, ""))

    def number(self, key: str, default: float) -> float:
        """A number of the file; the default also where only running the file would give it."""
        value = self.given.get(key, default)
        if isinstance(value, str) and "$" in value and all(key != left.key for left in self.left):
            self.leave(key, f"holds a variable: taken as {default:g}")
        return float(value) if isinstance(value, int | float) else default


def plain(t: Translator, entry: ForeignKey) -> None:
    key = entry.of(t.source)
    value = t.given[key]
    if isinstance(value, str) and "$" in value:
        t.leave(key, f"holds a variable: give {entry.ours}")
    elif entry.values:
        ours = entry.values.get(str(value).lower())
        if ours is None:
            t.leave(key, f"no counterpart among the values of {entry.ours}")
        else:
            t.values[entry.ours] = ours
    elif entry.least is not None and isinstance(value, int | float) and value < entry.least:
        return  # off, or its default, there
    else:
        t.values[entry.ours] = value
