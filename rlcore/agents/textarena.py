"""Games of the TextArena package for one player."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from rlcore.environments.protocol import Action, Environment, Opening, Reply
from rlcore.errors import UserError
from rlcore.types import Grade, Item

RAW = "-raw"  # the registered form without TextArena's own wrapping of observations
KEY = "environment.args.game"


class TextArena(Environment):
    """A game by the name of TextArena's registry (`GuessTheNumber-v0`), over any task, whose
    problems are not used. `settings`: arguments of the game.

    A turn is the game's action as the model says it, and it is answered by what the game shows
    after it. The reward is the game's own; 0 for a game that a limit of the run has cut short.
    """

    confined = True

    def __init__(self, *, game: str, settings: Mapping[str, Any] | None = None) -> None:
        self._game = game
        self._settings = dict(settings or {})
        _check(game)

    def reset(self, item: Item, seed: int) -> Opening:
        # its games draw from the global generators
        random.seed(seed)
        np.random.seed(seed % (1 << 32))
        self._env = _made(self._game, self._settings)
        self._env.reset(num_players=1, seed=seed % (1 << 32))
        self._over = False
        return Opening([{"role": "user", "content": self._shown()}])

    def step(self, action: Action) -> Reply:
        self._over, _ = self._env.step(action.text)
        return Reply([{"role": "user", "content": self._shown()}], over=bool(self._over))

    def _shown(self) -> str:
        """Return the game's messages since the last turn, without those that the player has."""
        _, seen = self._env.get_observation()
        return "\n".join(str(text) for sender, text, _ in seen if sender != 0)

    def grade(self) -> Grade:
        rewards, info = self._env.close()
        reward = float(rewards[0]) if self._over and rewards else 0.0
        invalid = float(bool(info[0].get("invalid_move")))
        return Grade(
            reward,
            {"correct": float(reward >= 1), "finished": float(self._over), "invalid": invalid},
        )


def _made(game: str, settings: Mapping[str, Any]) -> Any:
    import textarena

    return textarena.make(f"{game}{RAW}", **settings)


@cache  # once, before processes are forked
def _check(game: str) -> None:
    """Raise UserError for a game that is unknown, or not for one player."""
    try:
        import textarena
        from textarena.envs.registration import ENV_REGISTRY
    except ImportError as error:
        raise UserError(
            "environment=textarena needs the package textarena, which is not installed: "
            f"pip install 'rlcore[textarena]' ({error})."
        ) from error
    if f"{game}{RAW}" not in ENV_REGISTRY:
        games = ", ".join(sorted(n.removesuffix(RAW) for n in ENV_REGISTRY if n.endswith(RAW)))
        raise UserError(f"{KEY}={game} is not accepted; choose one of: {games}.")
    try:
        env = _made(game, {})
        env.reset(num_players=1, seed=0)
    except Exception as error:  # of any kind: it is the package's own code
        raise UserError(
            f"{KEY}={game} does not begin with one player: {type(error).__name__}: {error}."
        ) from error
    if not isinstance(env.state, textarena.SinglePlayerState):
        raise UserError(f"{KEY}={game} is a game of several players: choose one for one player.")
