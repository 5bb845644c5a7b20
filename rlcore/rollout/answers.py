"""The text of a trajectory, for graders. numpy only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rlcore.types import Answer, Trajectory


@dataclass(frozen=True, slots=True)
class StopStrings:
    """What ends a response, by task: the first part of a prompt id.

    Example: StopStrings(("\n",), {"gsm8k": ("####",)})
    """

    usual: tuple[str, ...] = ()
    tasks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def of(self, prompt_id: str) -> tuple[str, ...]:
        """The strings of a prompt's task."""
        return self.tasks.get(prompt_id.partition("/")[0], self.usual)


def read_answer(
    trajectory: Trajectory,
    decode: Callable[[Sequence[int]], str],
    stop: Sequence[str],
    *,
    prompt: str = "",
    in_pieces: bool = False,
) -> Answer:
    """The answer of an episode of one record, cut before its first stop string.

    The trajectory keeps the tokens of the stop string: they were sampled, and the learner must be
    able to reinforce them. `prompt`: the prompt's text, for display. `in_pieces`: whether the text
    of every token is wanted besides."""
    versions = trajectory.token_version
    ids: list[int] = trajectory.sampled_ids.tolist()
    text = decode(ids)
    return Answer(
        group_id=trajectory.group_id,
        sample_index=trajectory.sample_index,
        draw_id=trajectory.draw_id,
        prompt_id=trajectory.prompt_id,
        text=cut(text, stop),
        tokens=len(trajectory.logp_inf),
        versions=(int(versions.min()), int(versions.max())) if len(versions) else None,
        finish_reason=trajectory.finish_reason,
        purpose=trajectory.purpose,
        prompt=prompt,
        pieces=tuple(decode([token]) for token in ids) if in_pieces else (),
    )


def cut(text: str, stop: Sequence[str]) -> str:
    """A response up to its first stop string."""
    found = [at for at in (text.find(s) for s in stop) if at >= 0]
    return text[: min(found)] if found else text
