"""Environments of the gymnasium package whose actions are words or numbers, and whose state is
text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from rlcore.environments.protocol import Action, Environment, Opening, Reply, as_json
from rlcore.errors import UserError
from rlcore.types import Grade, Item

KEY = "environment.args.id"
NUMBER = re.compile(r"-?[0-9]{1,9}")
MOST_SEED = 1 << 31


class GymnasiumText(Environment):
    """An environment by its `id` (`FrozenLake-v1`), over any task, whose problems are not used.
    `settings`: arguments of gymnasium.make.

    Of a space of texts (`spaces.Text`) a turn is the action. Of a discrete space it is a number, or
    one of `actions`, words for them in order. Any other turn is answered with what an
    action is, and costs a turn alone. The model reads the observation (other than text as JSON), or
    with settings.render_mode=ansi what the environment draws. `prompt` comes first. Every step's
    reward is its turn's.
    """

    def __init__(
        self,
        *,
        id: str,
        settings: Mapping[str, Any] | None = None,
        actions: Sequence[str] = (),
        prompt: str = "",
    ) -> None:
        self._id = id
        self._settings = dict(settings or {})
        self._actions = [str(word).lower() for word in actions]
        self._prompt = prompt
        _check(id, json.dumps(self._settings, sort_keys=True), tuple(self._actions))
        self._env: Any = None

    def reset(self, item: Item, seed: int) -> Opening:
        self._env = _made(self._id, self._settings)
        seen, _ = self._env.reset(seed=seed % MOST_SEED)
        self._total = 0.0
        self._over = False
        self._invalid = 0
        texts = [*([self._prompt] if self._prompt else []), self._shown(seen)]
        return Opening([{"role": "user", "content": "\n".join(texts)}])

    def step(self, action: Action) -> Reply:
        chosen = self._chosen(action.text.strip())
        if chosen is None:
            self._invalid += 1
            return Reply([{"role": "user", "content": self._told()}])
        seen, reward, terminated, truncated, _ = self._env.step(chosen)
        self._total += float(reward)
        self._over = bool(terminated or truncated)
        shown = {"role": "user", "content": self._shown(seen)}
        return Reply([shown], over=self._over, reward=float(reward))

    def _chosen(self, text: str) -> Any:
        """The action that a turn names; None: none."""
        space = self._env.action_space
        if not hasattr(space, "n"):
            return text if space.contains(text) else None
        first = int(space.start)
        if text.lower() in self._actions:
            return first + self._actions.index(text.lower())
        number = int(text) if NUMBER.fullmatch(text) else first - 1
        return number if first <= number < first + int(space.n) else None

    def _told(self) -> str:
        space = self._env.action_space
        if not hasattr(space, "n"):
            return f"That is not an action of {space}."
        first = int(space.start)
        words = f", or {', '.join(self._actions)}" if self._actions else ""
        return f"That is not an action: answer {first} to {first + int(space.n) - 1}{words}."

    def _shown(self, seen: Any) -> str:
        if self._env.render_mode == "ansi":
            return str(self._env.render())
        return as_json(seen.tolist() if hasattr(seen, "tolist") else seen)

    def grade(self) -> Grade:
        parts = {"correct": float(self._total >= 1), "finished": float(self._over)}
        return Grade(0.0, {**parts, "invalid": float(self._invalid)})

    def close(self) -> None:
        """End the environment."""
        if self._env is not None:
            self._env.close()
            self._env = None


def _made(id: str, settings: Mapping[str, Any]) -> Any:
    import gymnasium

    return gymnasium.make(id, **settings)


@cache  # once, before processes are forked
def _check(id: str, settings: str, actions: tuple[str, ...]) -> None:
    """Raise UserError for an environment that is not there, or has no such actions. `settings`: as
    JSON."""
    try:
        import gymnasium
    except ImportError as error:
        raise UserError(
            "environment=gymnasium needs the package gymnasium, which is not installed: "
            f"pip install gymnasium ({error})."
        ) from error
    try:
        made = _made(id, json.loads(settings))
    except Exception as error:  # of any kind: it is the environment's own code
        raise UserError(
            f"{KEY}={id} cannot be made: {type(error).__name__}: {' '.join(str(error).split())}."
        ) from error
    space = made.action_space
    made.close()
    if not isinstance(space, gymnasium.spaces.Text | gymnasium.spaces.Discrete):
        raise UserError(f"{KEY}={id} has actions of {space}: choose one of Text or Discrete.")
    if actions and len(actions) != getattr(space, "n", 0):
        raise UserError(
            f"environment.args.actions has {len(actions)} words for actions of {space}: give one "
            "for each."
        )
