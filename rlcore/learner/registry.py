"""Training engines by name, chosen by `learner.engine`. No torch."""

from __future__ import annotations

ENGINES: dict[str, str] = {"deepspeed": "rlcore.learner.engines.deepspeed:ZeroEngine"}
