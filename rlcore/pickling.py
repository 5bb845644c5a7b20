"""Fast pickling of small records, which cross processes by the hundred thousand: by their fields
alone."""

from __future__ import annotations

from operator import attrgetter
from typing import Any


class ByFields:
    """A base of dataclasses that are made by their constructor when they are unpickled. A
    dataclass's own pickling looks the list of its fields up each time and takes four times as
    long."""

    __slots__ = ()
    __match_args__: tuple[str, ...]

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), _fields(type(self))(self)


def _fields(cls: type[ByFields]) -> Any:
    found = _GETTERS.get(cls)
    if found is None:
        found = _GETTERS[cls] = attrgetter(*cls.__match_args__)
    return found


_GETTERS: dict[type, attrgetter[Any]] = {}
