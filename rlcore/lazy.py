"""`torch` for modules that the configuration reads: imported when something of it is first used.

A correction stands in one file with its settings, and `--help` or a wrong key must be answered
without the seconds that an import of torch takes.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
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
