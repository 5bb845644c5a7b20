"""Advantages and policy losses by name. No torch: facts that the configuration needs are attributes
of the classes (`rlcore.objectives.protocols`)."""

from __future__ import annotations

from rlcore.objectives.protocols import Advantage, PolicyLoss
from rlcore.objectives.specs import ObjectiveSpec
from rlcore.registry import resolve

ADVANTAGES: dict[str, str] = {
    "grpo": "rlcore.objectives.advantages:Grpo",
    "dr_grpo": "rlcore.objectives.advantages:GroupMean",
    "rloo": "rlcore.objectives.advantages:Rloo",
    "reinforce_pp": "rlcore.objectives.advantages:ReinforcePp",
    "reinforce_pp_baseline": "rlcore.objectives.advantages:ReinforcePpBaseline",
    "reinforce": "rlcore.objectives.advantages:Reinforce",
    "group_mean": "rlcore.objectives.advantages:GroupMean",
}
LOSSES: dict[str, str] = {
    "ppo": "rlcore.objectives.losses:Ppo",
    "gspo": "rlcore.objectives.losses:Gspo",
    "cispo": "rlcore.objectives.losses:Cispo",
    "reinforce": "rlcore.objectives.losses:Reinforce",
}


def advantage_class(name: str, key: str = "algorithm.advantage") -> type[Advantage]:
    """The advantage of a name or "file.py:Class". Raises UserError naming `key`."""
    cls: type[Advantage] = resolve(ADVANTAGES, name, key=key, like=Advantage)
    return cls


def loss_class(name: str) -> type[PolicyLoss]:
    """The policy loss of a name or "file.py:Class". Raises UserError naming algorithm.loss."""
    cls: type[PolicyLoss] = resolve(LOSSES, name, key="algorithm.loss", like=PolicyLoss)
    return cls


def make_advantage(spec: ObjectiveSpec, key: str = "algorithm.advantage") -> Advantage:
    """The advantage that `spec.advantage` names; `key`: where a run names it."""
    return advantage_class(spec.advantage, key)(spec)


def make_loss(spec: ObjectiveSpec) -> PolicyLoss:
    """The policy loss that `spec.loss` names."""
    return loss_class(spec.loss)(spec)
