"""`rlcore try` of an environment: episodes of a scripted model, and the records that they become.

The model says `say`, or the environment's worked turns, or the known answer of the problem, at
every turn. Everything else is as in a run: the environment's process, the chat template, the
limits.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from rlcore.commands.preflight import note
from rlcore.environments import environment_maker
from rlcore.environments.episode import Played
from rlcore.environments.play import Play
from rlcore.environments.protocol import Action, Environment
from rlcore.environments.specs import EnvironmentJob
from rlcore.errors import DeadlineExceeded
from rlcore.interfaces import Task
from rlcore.seeding import derive_seed
from rlcore.types import ActorKind, Item, Request, SamplingSpec, Trajectory

WAIT_S = 0.2
NO_TOKENS = np.zeros(0, np.int32)
ACTOR: tuple[str, ActorKind] = ("try", "bf16")


class ScriptedModel:
    """The words of a scripted model in one episode.

    An environment with worked turns is played a second time in this process, beside the real one,
    with the same seed: so its worked turns follow what has been said.
    """

    def __init__(self, job: EnvironmentJob, task: Task, item: Item, say: str | None) -> None:
        self._say = say if say is not None else task.worked_answer(item) or item.answer
        self._beside: Environment | None = None
        if say is None:
            made = environment_maker(job.environment, task)()
            worked = getattr(type(made), "worked", Environment.worked)
            if worked is not Environment.worked and not made.hosts_program:
                made.reset(item, derive_seed(job.run_seed, "environment", "train", 0))
                self._beside = made

    def next(self) -> str:
        """The next turn."""
        said = self._beside.worked() if self._beside is not None else None
        if said is None:
            self._beside = None
            return self._say
        assert self._beside is not None
        self._beside.step(Action(said))
        return said


def played(
    job: EnvironmentJob, tokenizer: Any, asked: tuple[Task, Item, SamplingSpec], say: str | None
) -> Played:
    """One episode. Raises DeadlineExceeded past `environment.episode_timeout_s`."""
    task, item, sampling = asked
    model = ScriptedModel(job, task, item, say)
    play = Play(job, tokenizer, ACTOR)
    try:
        play.add([Request(0, 0, item.prompt_id, NO_TOKENS, sampling, 0)])
        end = time.monotonic() + job.environment.episode_timeout_s + job.environment.step_timeout_s
        while play.busy:
            if time.monotonic() > end:
                raise DeadlineExceeded(f"the episode of {item.prompt_id} did not end")
            play.begin_waiting()
            play.wait(WAIT_S)
            play.check_deadlines()
            turns, play.to_sample = play.to_sample, []
            for request in turns:
                play.sampled(_turn(request, model.next(), tokenizer))
        (episode,) = play.done
        return episode
    finally:
        play.close()


def _turn(request: Request, text: str, tokenizer: Any) -> Trajectory:
    """A turn as an engine would have sampled it, of log-probs 0."""
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    said = np.array(ids[: request.sampling.max_new_tokens], np.int32)
    count, prompt = len(said), request.prompt_ids
    k = max(0, request.sampling.logprobs_k)
    return Trajectory(
        token_ids=np.concatenate([prompt, said]),
        sampled=np.arange(len(prompt) + count) >= len(prompt),
        logp_inf=np.zeros(count, np.float32),
        topk_ids=np.full((count, k), -1, np.int32),
        topk_logp=np.full((count, k), -np.inf, np.float32),
        token_version=np.zeros(count, np.int32),
        turn_starts=np.array([len(prompt)], np.int32),
        actor_id=ACTOR[0],
        actor_kind="bf16",
        group_id=request.group_id,
        prompt_id=request.prompt_id,
        sample_index=request.sample_index,
        finish_reason="stop" if count == len(ids) else "length",
        draw_id="",
        purpose=request.purpose,
        timings={"queue_s": 0.0, "generate_s": 0.0},
    )


def try_episodes(
    job: EnvironmentJob, tokenizer: Any, task: Task, items: Sequence[Item], asked: Any
) -> int:
    """Print the episodes of these problems; the number that failed. `asked`: (how the run samples,
    what the model says at every turn or None)."""
    sampling, say = asked
    note(f"environment {job.environment.name}: {len(items)} episodes with a scripted model")
    failed = 0
    for item in items:
        episode = played(job, tokenizer, (task, item, sampling), say)
        for line in shown(item, episode, tokenizer):
            note(line)
        failed += episode.score.status != "ok"
    return failed


def shown(item: Item, episode: Played, tokenizer: Any) -> list[str]:
    """Lines on one episode: what is given and what is sampled, by part, and the score."""
    score, lines = episode.score, ["", item.prompt_id]
    for part in episode.parts:
        count = int(part.sampled.sum())
        lines.append(
            f"  part {part.part + 1} of {part.parts}: {len(part.token_ids)} tokens, {count} of "
            f"them sampled in {len(part.turn_starts)} turns"
        )
        for first, last, sampled in runs(part.sampled):
            ids = part.token_ids[first:last].tolist()
            text = tokenizer.decode(ids, skip_special_tokens=False)
            who = "model" if sampled else "given"
            lines.append(f"    {who} {first}-{last - 1}: {json.dumps(text, ensure_ascii=False)}")
    if score.status != "ok":
        return [*lines, f"  FAILED ({score.status}): {score.error}"]
    parts = ", ".join(f"{name} {value:.4g}" for name, value in score.parts.items())
    lines.append(f"  reward {score.reward:.4g} ({parts}); {score.seconds:.2f} s in the environment")
    if score.turn_rewards:
        lines.append(f"  rewards of turns: {', '.join(f'{r:.4g}' for r in score.turn_rewards)}")
    return lines


def runs(mask: np.ndarray) -> list[tuple[int, int, bool]]:
    """(first, end, value) of the runs of equal values in a mask [L] bool.

    Example: runs of [0, 0, 1] are [(0, 2, False), (2, 3, True)].
    """
    edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)]
    return [(a, b, bool(mask[a])) for a, b in pairwise(edges)]
