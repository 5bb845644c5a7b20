"""Back-pressure by bytes: `cluster.buffer_mib`."""

from __future__ import annotations

from rlcore.buffer.specs import BatchingSpec
from rlcore.errors import UserError
from rlcore.serialization import record_bytes

KEY = "cluster.buffer_mib"
MIB = 2**20


def check_capacity(
    max_bytes: int,
    batching: BatchingSpec,
    *,
    samples_per_group: int,
    max_len: int,
    max_new_tokens: int,
    logprobs_k: int,
    expert_bytes: int = 0,
) -> None:
    """Refuse a limit below the size of one update phase's groups at full length: p_ref is computed
    for all of them before the first step.

    max_len: tokens of an episode; max_new_tokens: how many of them are sampled; expert_bytes: of
    each token's experts (`models/routes.py`). A smaller limit would work only as long as responses
    are short, and then end the run."""
    longest = record_bytes(max_len, max_new_tokens, max(0, logprobs_k)) + max_len * expert_bytes
    groups, batches = batching.groups_per_step, batching.phases.batches
    needed = batches * groups * samples_per_group * longest
    if needed > max_bytes:
        holds = f"{batches} batches" if batches > 1 else "one step"
        raise UserError(
            f"{KEY}={max_bytes / MIB:g} is too small: {holds} of schedule.groups_per_step="
            f"{groups} x rollout.samples_per_prompt={samples_per_group} samples of up to "
            f"{longest / MIB:.3g} MiB each; use {-(-needed // MIB)} or more, or a smaller "
            "rollout.max_new_tokens or rollout.logprobs_k."
        )


def groups_that_fit(
    room: int,
    *,
    max_bytes: int,
    used_bytes: int,
    completed: tuple[int, int],
    in_flight: int,
    missing: int,
) -> int:
    """How many of `room` groups may be admitted: those in flight are expected to take the mean size
    so far, and at least what a step lacks is admitted.

    completed: (groups completed so far, bytes they kept). missing: groups that a step lacks.
    """
    free = max_bytes - used_bytes
    if free <= 0:
        return 0
    count, size = completed
    if not size:
        return room
    return min(room, max(missing, int(free // (size / count)) - in_flight))
