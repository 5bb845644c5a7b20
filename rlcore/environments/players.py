"""The episodes of several tasks beside one engine: an `EpisodePlayer` for each, in a thread of its
own, so that what one environment does never holds up another's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

from rlcore.environments.episode import is_turn
from rlcore.environments.player import EpisodePlayer, Exits, Sampler
from rlcore.environments.specs import EnvironmentJob
from rlcore.tasks import parse_prompt_id
from rlcore.types import ActorKind, Request, Trajectory


class Players:
    """All methods may be called from any thread and return at once."""

    def __init__(
        self,
        jobs: Sequence[EnvironmentJob],
        tokenizers: Sequence[Any],
        actor: tuple[str, ActorKind],
        exits: Exits,
    ) -> None:
        """`tokenizers`: one for each job, since they are not made for two threads. `actor`: id and
        kind. Starts the environments' processes; raises StageError."""
        self._exits = exits
        self._players: dict[str, EpisodePlayer] = {}
        try:
            for job, tokenizer in zip(jobs, tokenizers, strict=True):
                self._players[job.label] = EpisodePlayer(job, tokenizer, actor, exits)
        except BaseException:
            for player in self._players.values():
                player.end_processes()
            raise

    @property
    def error(self) -> BaseException | None:
        """What ended one of the threads."""
        return next((p.error for p in self._players.values() if p.error is not None), None)

    def start(self, sampler: Sampler) -> None:
        """Begin to play."""
        for player in self._players.values():
            player.start(sampler)

    def plays(self, request: Request) -> bool:
        """Whether a request is an episode; others are answered in one turn."""
        return _task(request) in self._players

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue episodes."""
        for label, player in self._players.items():
            if own := [r for r in requests if _task(r) == label]:
                player.submit(own)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop episodes; unknown ids are ignored."""
        ids = list(request_ids)
        for player in self._players.values():
            player.abort(ids)

    def finished(self, trajectories: list[Trajectory]) -> None:
        """From the engine's thread: turns, and answers that belong to no episode."""
        turns = [t for t in trajectories if is_turn(t)]
        for label, player in self._players.items():
            if own := [t for t in turns if _task(t) == label]:
                player.finished(own)
        if others := [t for t in trajectories if not is_turn(t)]:
            self._exits.others(others)

    def status(self) -> dict[str, int]:
        """Counts since the start, of all."""
        total: Counter[str] = Counter()
        for player in self._players.values():
            total.update(player.status())
        return dict(total)

    def close(self) -> None:
        """End the threads and every environment; open episodes are lost."""
        with ExitStack() as closing:  # all of them, whatever one raises
            for player in self._players.values():
                closing.callback(player.close)


def _task(sample: Request | Trajectory) -> str:
    return parse_prompt_id(sample.prompt_id)[0]
