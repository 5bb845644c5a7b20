"""`rlcore try` of an environment: episodes of a scripted or served model, and their records.

A scripted model says at every turn `say`, or the environment's worked turns, or the problem's known
answer. A served one is asked for each turn. Everything else is as in a run: the environment's
process, the chat template, the limits.
"""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from rlcore.commands.preflight import note
from rlcore.environments import environment_maker
from rlcore.environments.play import Play
from rlcore.environments.protocol import Action, Environment
from rlcore.environments.specs import EnvironmentJob
from rlcore.errors import DeadlineExceeded, UserError
from rlcore.interfaces import Task
from rlcore.seeding import derive_seed
from rlcore.types import ActorKind, Item, Played, Request, SamplingSpec, Trajectory

WAIT_S = 0.2
NO_TOKENS = np.zeros(0, np.int32)
ACTOR: tuple[str, ActorKind] = ("try", "bf16")
SHOWN = 300  # characters of a server's error
Speak = Callable[[Request], tuple[list[int], bool]]  # (tokens of the next turn, whether it is cut)


@dataclass(frozen=True, slots=True)
class TriedModel:
    """The source of a model's turns. Example: TriedModel(url="http://127.0.0.1:8000/v1")"""

    text: str | None = None  # of a scripted model, at every turn
    url: str | None = None  # the base URL of a server with POST /completions
    served: str | None = None  # the name of its model


class ServedModel:
    """A model behind OpenAI's completions (POST URL/completions), given the tokens of a prompt.

    vLLM's server answers `return_token_ids` by the tokens that it sampled; the text of another is
    encoded again. The key is read from OPENAI_API_KEY, if it is set.
    """

    def __init__(self, job: EnvironmentJob, tokenizer: Any, said: TriedModel) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._said = said

    def next(self, request: Request) -> tuple[list[int], bool]:
        """The next turn: its tokens, and whether the length has cut it. Raises UserError."""
        answer = self._asked(request)
        try:
            (choice,) = answer["choices"]
            text, cut = str(choice["text"]), choice.get("finish_reason") == "length"
            ids = choice.get("token_ids")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise self._error(f"answered {json.dumps(answer)[:SHOWN]}") from error
        if isinstance(ids, list) and all(isinstance(i, int) for i in ids):
            return ids[: request.sampling.max_new_tokens], cut
        return _encoded(self._tokenizer, text, request, ends=not cut)

    def _asked(self, request: Request) -> Any:
        sampling, prompt = request.sampling, request.prompt_ids.tolist()
        body: dict[str, Any] = {
            "prompt": prompt,
            "max_tokens": min(sampling.max_new_tokens, self._job.max_len - len(prompt)),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": request.seed % 2**31,
            "skip_special_tokens": False,
            "return_token_ids": True,
        }
        body |= {"top_k": sampling.top_k} if sampling.top_k else {}
        body |= {"min_p": sampling.min_p} if sampling.min_p else {}
        body |= {"stop": list(self._job.stop)} if self._job.stop else {}
        body |= {"model": self._said.served} if self._said.served else {}
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        limit = self._job.environment.episode_timeout_s
        try:
            url = f"{str(self._said.url).rstrip('/')}/completions"
            asked = urllib.request.Request(url, json.dumps(body).encode(), headers)
            with urllib.request.urlopen(asked, timeout=limit) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            told = error.read().decode(errors="replace")[:SHOWN]
            raise self._error(f"answered {error.code}: {told}") from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise self._error(f"gave no answer ({error})") from error

    def _error(self, what: str) -> UserError:
        return UserError(
            f"url={self._said.url} {what}: give the base URL of a server of OpenAI's completions "
            "that takes tokens as a prompt, such as http://127.0.0.1:8000/v1 of vllm serve."
        )


class ScriptedModel:
    """The words of a scripted model in one episode.

    An environment with worked turns is played a second time in this process, in parallel with the
    real one, with the same seed. So its worked turns follow what has been said.
    """

    def __init__(
        self, job: EnvironmentJob, tokenizer: Any, task: Task, item: Item, say: str | None
    ) -> None:
        self._tokenizer = tokenizer
        self._say = say if say is not None else task.worked_answer(item) or item.answer
        self._beside: Environment | None = None
        if say is None:
            made = environment_maker(job.environment, task)()
            worked = getattr(type(made), "worked", Environment.worked)
            if worked is not Environment.worked and not made.hosts_program:
                made.reset(item, derive_seed(job.run_seed, "environment", "train", 0))
                self._beside = made

    def next(self, request: Request) -> tuple[list[int], bool]:
        """The next turn: its tokens, and whether the length has cut it."""
        return _encoded(self._tokenizer, self._text(), request, ends=True)

    def _text(self) -> str:
        said = self._beside.worked() if self._beside is not None else None
        if said is None:
            self._beside = None
            return self._say
        assert self._beside is not None
        self._beside.step(Action(said))
        return said


def played(
    job: EnvironmentJob, tokenizer: Any, asked: tuple[Task, Item, SamplingSpec], said: TriedModel
) -> Played:
    """One episode. Raises DeadlineExceeded past `environment.episode_timeout_s`, and UserError for
    a server that does not answer."""
    task, item, sampling = asked
    speak: Speak
    if said.url is not None:
        speak = ServedModel(job, tokenizer, said).next
    else:
        speak = ScriptedModel(job, tokenizer, task, item, said.text).next
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
                play.sampled(_turn(request, *speak(request)))
        (episode,) = play.done
        return episode
    finally:
        play.close()


def _encoded(tokenizer: Any, text: str, request: Request, *, ends: bool) -> tuple[list[int], bool]:
    """(tokens of a turn's text, with the end's if it `ends`; whether they had to be cut)."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    ids += [tokenizer.eos_token_id] if ends else []
    most = request.sampling.max_new_tokens
    return ids[:most], not ends or len(ids) > most


def _turn(request: Request, ids: list[int], cut: bool) -> Trajectory:
    """A turn as an engine would have sampled it, of log-probs 0."""
    said = np.array(ids, np.int32)
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
        finish_reason="length" if cut else "stop",
        draw_id="",
        purpose=request.purpose,
        timings={"queue_s": 0.0, "generate_s": 0.0},
    )


def try_episodes(
    job: EnvironmentJob,
    tokenizer: Any,
    task: Task,
    items: Sequence[Item],
    asked: tuple[SamplingSpec, TriedModel],
) -> int:
    """Print the episodes of these problems; the number that failed. `asked`: (how the run samples,
    where the model's turns come from)."""
    sampling, said = asked
    whose = f"the model at {said.url}" if said.url else "a scripted model"
    note(f"environment {job.environment.name}: {len(items)} episodes with {whose}")
    failed = 0
    for item in items:
        episode = played(job, tokenizer, (task, item, sampling), said)
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
