"""`torch` for modules that the configuration reads: imported when something of it is first used.

A correction stands in one file with its settings, and `--help` or a wrong key must be answered
without the seconds that an import of torch takes.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
else:

    class _Torch:
        def __getattr__(self, name: str) -> Any:
            # importlib takes microseconds to find what is there, thousands of times a step
            return getattr(sys.modules.get("torch") or importlib.import_module("torch"), name)

    torch = _Torch()
