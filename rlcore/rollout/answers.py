"""The text of a trajectory, for graders. numpy only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlcore.types import Answer, Trajectory


def read_answer(
    trajectory: Trajectory,
    decode: Callable[[Sequence[int]], str],
    stop: Sequence[str],
    *,
    prompt: str = "",
) -> Answer:
    """The answer of an episode of one record, cut before its first stop string.

    The trajectory keeps the tokens of the stop string: they were sampled, and the learner must be
    able to reinforce them. `prompt`: the prompt's text, for display."""
    versions = trajectory.token_version
    text = decode(trajectory.sampled_ids.tolist())
    found = [at for at in (text.find(s) for s in stop) if at >= 0]
    return Answer(
        group_id=trajectory.group_id,
        sample_index=trajectory.sample_index,
        draw_id=trajectory.draw_id,
        prompt_id=trajectory.prompt_id,
        text=text[: min(found)] if found else text,
        tokens=len(trajectory.logp_inf),
        versions=(int(versions.min()), int(versions.max())) if len(versions) else None,
        finish_reason=trajectory.finish_reason,
        purpose=trajectory.purpose,
        prompt=prompt,
    )
