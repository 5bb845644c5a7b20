"""The hardware that vLLM runs on here."""

from __future__ import annotations

from vllm.platforms import current_platform

from rlcore.rollout.specs import ActorSpec
from rlcore.spec import refuse


def on_cpu() -> bool:
    """Return whether vLLM runs on the CPU here."""
    return bool(current_platform.is_cpu())


def check_platform(actor: ActorSpec, key: str) -> None:
    """Raise UserError if the actor asks for other hardware than vLLM has here."""
    refuse(
        actor.on_cpu != on_cpu(),
        f"{key}.num_gpus={actor.num_gpus:g} does not fit this machine, where vLLM runs on "
        f"{'the CPU: use 0' if on_cpu() else 'GPUs: use 1'}.",
    )
