"""A configuration asks specifications and names: that must not load torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rlcore.corrections.specs import CORRECTIONS
from rlcore.objectives.specs import ADVANTAGES, LOSSES

pytestmark = pytest.mark.processes

ASK = """
import sys
from rlcore.corrections.specs import CORRECTIONS
from rlcore.registry import load_object
from rlcore.objectives.specs import ADVANTAGES, LOSSES, advantage_class, loss_class
traits = [advantage_class(a).compares_group for a in ADVANTAGES]
traits += [loss_class(name).carries_ratio for name in LOSSES]
traits += [load_object(spec).weighs for spec in CORRECTIONS.values()]
print(len(traits), *(m for m in ("torch", "ray", "vllm", "transformers") if m in sys.modules))
"""


def test_specifications_names_and_traits_load_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(len(ADVANTAGES) + len(LOSSES) + len(CORRECTIONS))]
