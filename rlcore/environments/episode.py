"""One episode while it is played: its turns so far, and the records that they become."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rlcore.models.routes import joined
from rlcore.seeding import derive_seed
from rlcore.types import (
    TURN,
    ActorKind,
    Answer,
    FinishReason,
    Played,
    Request,
    Score,
    ScoreStatus,
    Trajectory,
    request_id,
)

if TYPE_CHECKING:
    from rlcore.environments.episode_processes import Link
    from rlcore.environments.protocol import Renderer


@dataclass(slots=True)
class Conversation:
    """One of an episode's conversations with the model; most episodes have one."""

    renderer: Renderer
    number: int = 0  # its number in the episode
    part: int = 0  # of the episode, that its next turn belongs to
    ids: list[int] = field(default_factory=list)  # of this part so far, the next turn's prompt


@dataclass(slots=True)
class EpisodeState:
    """The state of one episode between two turns."""

    request: Request
    draw_id: str
    number: int  # unique within the actor's process
    now: Conversation  # the one of the last turn, or of the next
    conversations: dict[int, Conversation] = field(default_factory=dict)  # by their numbers
    link: Link | None = None
    # turns of every part, each a record of one turn after all that came before
    turns: list[list[Trajectory]] = field(default_factory=lambda: [[]])
    asked: int = 0  # turns that the engine was asked for
    # conversations whose next turn is being sampled, by its request's purpose; only a program has
    # several at once
    sampling: dict[str, Conversation] = field(default_factory=dict)
    max_tokens: int | None = None  # of the next turn, where its environment allows fewer
    hosts_program: bool = False  # as its environment says (`protocol.Environment`)
    once: bool = False  # whether its process, which is confined now, plays no other episode
    step_parts: dict[str, float] = field(default_factory=dict)  # sums over the steps
    stepped: list[int] = field(default_factory=list)  # turns that its environment was given
    rewards: dict[int, float] = field(default_factory=dict)  # of turns, where it gave one
    waits_for: str = ""  # the call that its environment has not answered yet
    deadline: float = np.inf  # of that call; monotonic seconds
    ends_at: float = np.inf  # deadline of the episode
    begun: float = field(default_factory=time.monotonic)
    environment_s: float = 0.0
    out_of_room: bool = False  # model.max_len has ended it

    def __post_init__(self) -> None:
        self.conversations[self.now.number] = self.now

    @property
    def count(self) -> int:
        """Turns of the model so far."""
        return sum(len(turns) for turns in self.turns)

    @property
    def tokens(self) -> int:
        """Sampled so far."""
        return sum(len(turn.sampled_ids) for turns in self.turns for turn in turns)

    @property
    def turn_ids(self) -> dict[str, str]:
        """The request ids of the turns that are being sampled, by their purposes."""
        key = self.request.group_id, self.request.sample_index
        return {purpose: request_id(purpose, *key) for purpose in self.sampling}

    def next_request(self) -> Request:
        """Of the next turn of `now`. The first has the sample's own seed, as a request of one turn
        has. A turn that comes late is never taken for one of another drawing of the same sample,
        nor of another conversation: `purpose` tells them apart."""
        seed = self.request.seed
        if self.asked:
            seed = derive_seed(seed, "turn", self.asked)
        self.asked += 1
        beside = f".{self.now.number}" if self.now.number else ""
        purpose = f"{self.request.purpose}{TURN}{self.number}{beside}"
        self.sampling[purpose] = self.now
        sampling = self.request.sampling
        if self.max_tokens is not None:
            most = min(self.max_tokens, sampling.max_new_tokens)
            sampling = replace(sampling, max_new_tokens=most)
        return replace(
            self.request,
            prompt_ids=np.array(self.now.ids, np.int32),
            sampling=sampling,
            seed=seed,
            purpose=purpose,
        )

    def add(self, turn: Trajectory) -> list[int]:
        """Take a turn that the engine has sampled; its tokens.

        Raises ValueError if it does not begin with the turns before it.
        """
        turns = self.turns[self.now.part]
        known = turns[-1].token_ids if turns else turn.token_ids[:0]
        if not np.array_equal(turn.token_ids[: len(known)], known):
            raise ValueError("the renderer has changed the tokens of an earlier turn")
        turns.append(turn)
        self.now.ids = turn.token_ids.tolist()
        sampled: list[int] = turn.sampled_ids.tolist()
        return sampled

    def begin_part(self, ids: list[int]) -> None:
        """The prefix could not be kept, or another conversation begins."""
        self.now.part = len(self.turns)
        self.turns.append([])
        self.now.ids = ids

    def begin_conversation(self, renderer: Renderer, number: int) -> None:
        """The next part is the first of a further conversation."""
        self.now = self.conversations[number] = Conversation(renderer, number)

    def forget(self, conversations: Sequence[int]) -> None:
        """Take the last turns of these conversations off: nobody has read them.

        Raises ValueError if no turn is left.
        """
        for number in conversations:
            turns = self.turns[self.conversations[number].part]
            if turns:
                turns.pop()
        if conversations and not self.count:
            raise ValueError("no answer of the model was read: its client had left each time")

    def graded(self, grade: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of the score that an environment's grade gives: reward, parts, rewards
        of turns.

        The grade's reward is the last turn's, or the last token's where tokens are rewarded. Raises
        ValueError for a grade that rewards another number of turns than its environment was given,
        or of tokens than were sampled.
        """
        own, tokens = grade["turn_rewards"], grade["token_rewards"]
        if tokens and not own and len(tokens) == len(self.stepped) != self.tokens:
            own, tokens = tokens, ()
        if tokens:
            return self._graded_by_token(grade, tokens)
        if own and len(own) != len(self.stepped):
            raise ValueError(f"grade rewards {len(own)} turns, of {len(self.stepped)} that it saw")
        for turn, reward in zip(self.stepped, own):
            self.rewards[turn] = self.rewards.get(turn, 0.0) + reward
        parts = {**grade["parts"], **self.step_parts, **self._counts()}
        if not self.rewards:
            return {"reward": grade["reward"], "parts": parts}
        parts["turn_rewards"] = math.fsum(self.rewards.values())
        turns = [self.rewards.get(i, 0.0) for i in range(self.count)]
        turns[-1] += grade["reward"]
        return {"reward": math.fsum(turns), "parts": parts, "turn_rewards": tuple(turns)}

    def _counts(self) -> dict[str, float]:
        """Turns of the episode, and the parts that they are in: one, unless the template rewrites
        earlier turns or there were several conversations."""
        return {"turns": float(self.count), "parts": float(sum(map(bool, self.turns)))}

    def _graded_by_token(self, grade: Mapping[str, Any], tokens: Sequence[float]) -> dict[str, Any]:
        """The verdict of a grade that rewards every token; rewards of replies go to the last tokens
        of their turns."""
        if len(tokens) != self.tokens:
            raise ValueError(
                f"grade rewards {len(tokens)} tokens or turns, of {self.tokens} tokens and "
                f"{len(self.stepped)} turns that it saw"
            )
        rewards, end = list(tokens), 0
        own = dict(zip(self.stepped, grade["turn_rewards"]))
        for number, turn in enumerate(turn for turns in self.turns for turn in turns):
            end += len(turn.sampled_ids)
            rewards[end - 1] += self.rewards.get(number, 0.0) + own.get(number, 0.0)
        rewards[-1] += grade["reward"]
        parts = {**grade["parts"], **self.step_parts, **self._counts()}
        return {"reward": math.fsum(rewards), "parts": parts, "token_rewards": tuple(rewards)}

    def played(
        self, status: ScoreStatus, decode: Any, actor: tuple[str, ActorKind], **score: Any
    ) -> Played:
        """The episode as it ends, with `score`: what the record has besides names and status."""
        parts = [turns for turns in self.turns if turns]
        if parts:
            records = [self._record(t, i, len(parts)) for i, t in enumerate(parts)]
        else:
            records = [self._nothing(*actor)]
        r = self.request
        key = r.group_id, r.sample_index, self.draw_id
        versions = np.concatenate([t.token_version for t in records])
        first = int(records[0].turn_starts[0])
        answer = Answer(
            *key,
            r.prompt_id,
            "\n".join(decode(t.token_ids[int(t.turn_starts[0]) :].tolist()) for t in records),
            len(versions),
            (int(versions.min()), int(versions.max())) if len(versions) else None,
            records[-1].finish_reason,
            r.purpose,
            "" if r.purpose == "train" else decode(records[0].token_ids[:first].tolist()),
        )
        judged = Score(*key, status, seconds=self.environment_s, **score).checked()
        return Played(records, answer, judged)

    def _record(self, turns: Sequence[Trajectory], part: int, parts: int) -> Trajectory:
        """One part: its last turn's tokens, and the sampled ones of every turn."""
        last = turns[-1]
        sampled = np.zeros(len(last.token_ids), bool)
        for t in turns:
            sampled[int(t.turn_starts[0]) : len(t.token_ids)] = True
        timings = {name: sum(t.timings[name] for t in turns) for name in last.timings}
        finish: FinishReason = "length" if self.out_of_room else last.finish_reason
        return replace(
            last,
            sampled=sampled,
            logp_inf=np.concatenate([t.logp_inf for t in turns]),
            topk_ids=np.concatenate([t.topk_ids for t in turns]),
            topk_logp=np.concatenate([t.topk_logp for t in turns]),
            token_version=np.concatenate([t.token_version for t in turns]),
            turn_starts=np.array([int(t.turn_starts[0]) for t in turns], np.int32),
            finish_reason=finish,
            draw_id=self.draw_id,
            part=part,
            parts=parts,
            purpose=self.request.purpose,
            timings={**timings, "environment_s": self.environment_s},
            extras={**last.extras, **joined(turns)},
        )

    def _nothing(self, actor_id: str, actor_kind: ActorKind) -> Trajectory:
        """A record without a sampled token, of an episode that failed before its first."""
        k = max(0, self.request.sampling.logprobs_k)
        r, ids = self.request, self.now.ids
        return Trajectory(
            token_ids=np.array(ids or [0], np.int32),
            sampled=np.zeros(len(ids) or 1, bool),
            logp_inf=np.zeros(0, np.float32),
            topk_ids=np.zeros((0, k), np.int32),
            topk_logp=np.zeros((0, k), np.float32),
            token_version=np.zeros(0, np.int32),
            turn_starts=np.array([len(ids) or 1], np.int32),
            actor_id=actor_id,
            actor_kind=actor_kind,
            group_id=r.group_id,
            prompt_id=r.prompt_id,
            sample_index=r.sample_index,
            finish_reason="abort",
            draw_id=self.draw_id,
            purpose=r.purpose,
        )
