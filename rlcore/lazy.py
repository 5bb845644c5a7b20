"""Modules that are imported when something of them is first used.

`torch`, for modules that the configuration reads. A correction stands in one file with its
settings, and `--help` or a wrong key must be answered without the seconds that an import of torch
takes. `defer`, for what other libraries import and a run never uses.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

if TYPE_CHECKING:
    import torch as torch
else:

    class _Torch:
        def __getattr__(self, name: str) -> Any:
            # importlib takes microseconds to find what is there, thousands of times a step
            return getattr(sys.modules.get("torch") or importlib.import_module("torch"), name)

    torch = _Torch()


def no_grad(function: Callable[P, R]) -> Callable[P, R]:
    """`torch.no_grad()` as a decorator that imports torch at the first call, not at the `def`."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.no_grad():
            return function(*args, **kwargs)

    return called


def defer(name: str, *, names: tuple[str, ...] = ()) -> None:
    """Have a module imported only when something of it is first used, unless it is there already.

    `from name import X` is a use, unless X is one of `names`, of functions and classes. A stand-in
    takes its place then, and calling it, or asking it for an attribute, is the use.
    """
    sys.modules.setdefault(name, Deferred(name, names))


class Deferred(ModuleType):
    """The place of a module in `sys.modules` until it is used."""

    def __init__(self, name: str, names: tuple[str, ...]) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)  # who looks for it finds that it is there
        if folders := _folders(name):
            self.__path__ = folders  # a package: modules inside it can be imported
        for each in names:
            setattr(self, each, StandIn(each, (), {"__module__": name}))

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__") and attribute != "__all__":
            raise AttributeError(f"module {self.__name__!r} has no attribute {attribute!r} yet")
        return getattr(self.imported(), attribute)

    def imported(self) -> ModuleType:
        """The module itself."""
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        module = importlib.import_module(self.__name__)
        for inside, value in vars(self).items():  # imported before
            if isinstance(value, ModuleType) and not hasattr(module, inside):
                setattr(module, inside, value)
        return module


class StandIn(type):
    """A function or class of a deferred module. A class, since annotations join it with others."""

    def _meant(cls) -> Any:
        place = sys.modules[cls.__module__]
        module = place.imported() if isinstance(place, Deferred) else place
        return getattr(module, cls.__name__)

    def __getattr__(cls, attribute: str) -> Any:
        return getattr(cls._meant(), attribute)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._meant()(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls._meant())


def _folders(name: str) -> list[str]:
    """The folders of a package, without importing it or what it is in; none of a plain module."""
    first, *rest = name.split(".")
    spec = importlib.util.find_spec(first)
    found = list(spec.submodule_search_locations or ()) if spec else []
    folders = [str(Path(each, *rest)) for each in found]
    return [folder for folder in folders if Path(folder).is_dir()]
