"""Models divided among the ranks as ZeRO-3 divides them: the policy as it is loaded, and a frozen
policy without an optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rlcore.learner.head_spec import HeadSpec
from rlcore.learner.packing import MicroBatch
from rlcore.learner.policy import FrozenPolicy, Policy
from rlcore.learner.split_loading import Split
from rlcore.types import TokenScores


def splitter(config: dict[str, Any]) -> Split:
    """Divides one parameter after another by DeepSpeed's zero.Init. `config`: DeepSpeed's."""
    import deepspeed

    def split(p: nn.Parameter) -> None:
        holder = nn.Module()
        holder.register_parameter("weight", p)
        deepspeed.zero.Init(module=holder, config_dict_or_path=config)

    return split


class SplitFrozenPolicy(FrozenPolicy):
    """The frozen policy, divided as the trained one is: a layer is whole while it is computed.
    Every method is collective."""

    def __init__(self, policy: Policy, config: dict[str, Any]) -> None:
        """`config`: DeepSpeed's of the trained policy."""
        import deepspeed

        super().__init__(policy)
        # without an optimizer, DeepSpeed gathers and frees layers and keeps no other state
        own = {k: v for k, v in config.items() if k != "optimizer"}
        zero = own["zero_optimization"]
        own["zero_optimization"] = {k: v for k, v in zero.items() if k != "offload_optimizer"}
        self._engine = deepspeed.initialize(model=policy, config=own)[0]
        self._engine.eval()

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        import deepspeed

        held = dict(self.policy.lm.named_parameters())
        for name, tensor in tensors.items():
            p = held[name]
            with deepspeed.zero.GatheredParameters([p], modifier_rank=0), torch.no_grad():
                p.copy_(tensor)

    @torch.no_grad()
    def forward(self, mb: MicroBatch, ids: Tensor | None, spec: HeadSpec) -> TokenScores:
        return TokenScores(*self._engine(mb, ids, spec)[1:])

    @torch.no_grad()
    def base(self, mb: MicroBatch) -> tuple[Tensor, Tensor]:
        """The head's weight is a whole copy, which lives until the micro-batch's KL is computed."""
        import deepspeed

        hidden = self._engine(mb, None, None)
        weight = self.policy.head.weight
        with deepspeed.zero.GatheredParameters([weight]):
            return hidden, weight.detach().clone()
