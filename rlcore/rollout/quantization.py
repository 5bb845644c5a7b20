"""What vLLM is asked for when it quantises weights itself, as it loads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from rlcore.weights.rounding import Granularity


def quantization_options(
    kind: Literal["fp8"] | None, scales: Granularity, keep_high_precision: Sequence[str]
) -> dict[str, Any]:
    """Engine arguments for W8A8: a weight scale a tensor, output channel or 128 x 128 block, activations as they come.

    Layers whose name holds one of `keep_high_precision` are left alone, as in the emulation; vLLM refuses a pattern
    that holds for a part only of a layer that it fuses (q, k, v; gate, up).
    """
    if kind is None:
        return {}
    ignored = [f"*{pattern}*" for pattern in keep_high_precision]
    return {"quantization": f"{kind}_per_{scales}", "quantization_config": {"ignore": ignored}}
