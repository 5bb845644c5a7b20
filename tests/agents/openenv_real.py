"""The game of `openenv_stand_in.py` as a server of openenv-core: python FILE PORT, with the Python
of an environment that has openenv-core."""

import sys

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    guess: str


class Told(Observation):
    told: str


class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.number = (seed or 0) % 5
        return Told(told="Guess from 0 to 4.")

    def step(self, action, timeout_s=None, **kwargs):
        right = action.guess == str(self.number)
        return Told(told="right" if right else "wrong", reward=1.0 if right else -0.25, done=right)

    @property
    def state(self):
        return State()


if __name__ == "__main__":
    app = create_fastapi_app(Game, Guess, Told, max_concurrent_envs=2)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
