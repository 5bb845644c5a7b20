"""The rollout engines by name. No torch."""

from __future__ import annotations

from rlcore.interfaces import RolloutEngine
from rlcore.registry import resolve
from rlcore.rollout.specs import EngineJob

ENGINES: dict[str, str] = {
    "vllm": "rlcore.rollout.engines.vllm.engine:VllmEngine",
    "diffusion": "rlcore.rollout.engines.diffusion.engine:DiffusionEngine",
}


def start_engine(job: EngineJob) -> RolloutEngine:
    """The engine that `job.actor.engine` names, started. Raises UserError if it cannot work."""
    cls = resolve(ENGINES, job.actor.engine, key=f"{job.key}.engine", like=RolloutEngine)
    engine: RolloutEngine = cls(job)
    return engine
