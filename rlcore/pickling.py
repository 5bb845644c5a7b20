"""Small records cross processes by the hundred thousand: they are pickled by their fields alone."""

from __future__ import annotations

from operator import attrgetter
from typing import Any


class ByFields:
    """A base of dataclasses that are made by their constructor when they are unpickled. Their own
    way, by a list of the fields that is looked up each time, takes four times as long."""

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
