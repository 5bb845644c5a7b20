"""The processes of a run as the loop calls them: `rlcore.loop.role_protocols` over Ray."""

from rlcore.cluster.clients.buffer import RayBuffer
from rlcore.cluster.clients.learner import RayLearner
from rlcore.cluster.clients.rollout import RayRolloutActor
from rlcore.cluster.clients.scorer import RayScorer

__all__ = ["RayBuffer", "RayLearner", "RayRolloutActor", "RayScorer"]
