"""What a method declares of its expected gradient: the ways in which it departs from its reference.

The reference of a token-level method: prefix and continuation of a token as the actor draws them,
the token itself from the policy that is differentiated. Of a sequence-level method: all of the
sequence from the policy that its weights lead to. Advantages are fixed, and denominators count the
batch before any rejection. A method without a declared bias is exact; the tests enumerate every
combination of methods and hold each to its declarations (docs/corrections-grid.md). No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

WIDE = 1e9  # a threshold that never binds


@dataclass(frozen=True, slots=True)
class Bias:
    """One named departure, and when it is gone; the method's docstring uses the name.

    Example: Bias("truncation", {"cap": WIDE})
    """

    name: str
    #: settings of the method under which it is gone; empty: none
    opened: Mapping[str, Any] = field(default_factory=dict)
    #: what else it needs to be gone: nothing; the actor's policy equal to the one that weights lead
    #: to; or sequences of a single token
    where: Literal["", "matched", "one token"] = ""


#: of a run whose list of corrections weighs nothing (`corrections/pipeline.py: Pipeline`)
UNCORRECTED = Bias("no correction", where="matched")
