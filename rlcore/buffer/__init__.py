"""The replay buffer: admission, ledger, storage and sampling of groups, as plain Python without Ray
or torch."""

from rlcore.buffer.store import ReplayBuffer, TakenBatch

__all__ = ["ReplayBuffer", "TakenBatch"]
