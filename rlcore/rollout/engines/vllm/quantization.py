"""What vLLM is asked for if it quantises weights itself, as it loads them. Imports no vLLM."""

from __future__ import annotations

from typing import Any

from rlcore.rollout.specs import ActorSpec


def quantization_options(actor: ActorSpec) -> dict[str, Any]:
    """Engine arguments for FP8 W8A8 with dynamic activation scales; none for other actors.

    Layers whose name contains one of `keep_high_precision` stay as they are, as in the emulation.
    vLLM refuses a pattern that matches only part of a layer that it fuses (q, k, v; gate, up).
    """
    if not actor.quantised_by_engine:
        return {}
    ignored = [f"*{pattern}*" for pattern in actor.keep_high_precision]
    return {
        "quantization": f"fp8_per_{actor.scales}",
        "quantization_config": {"ignore": ignored},
    }
