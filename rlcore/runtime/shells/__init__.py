"""Thin Ray actors around the stages. No rule lives here: each method hands plain arguments on.

What can fail at start is done in `start`, not in `__init__`, so that its error reaches the caller as itself.

Data goes rollout shell -> scorer shell -> buffer shell -> learner shells by direct calls; the controller sees counts,
ids and references only.
"""

from rlcore.runtime.shells.buffer import BufferShell
from rlcore.runtime.shells.learner import LEARNER_THREADS, LearnerShell
from rlcore.runtime.shells.rollout import RolloutShell
from rlcore.runtime.shells.scorer import ScorerShell

__all__ = ["LEARNER_THREADS", "BufferShell", "LearnerShell", "RolloutShell", "ScorerShell"]
