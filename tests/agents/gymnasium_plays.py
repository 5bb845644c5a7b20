"""Plays environments of gymnasium through the adapter; prints what was seen as JSON. It runs where
the package is."""

import json

import gymnasium
from gymnasium import spaces

from rlcore.environments import environment_maker
from rlcore.environments.protocol import Action
from rlcore.environments.specs import EnvironmentSpec
from rlcore.errors import UserError
from rlcore.tasks import make_task

TASK = make_task("digits", {})
LAKE = {"id": "FrozenLake-v1", "settings": {"render_mode": "ansi", "is_slippery": False}}


class Words(gymnasium.Env):
    """Wants the word that it shows, in two letters."""

    observation_space = spaces.Text(9)
    action_space = spaces.Text(min_length=2, max_length=2, charset="ab")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.word = "".join(self.np_random.choice(["a", "b"], 2))
        return f"say {self.word}", {}

    def step(self, action):
        return "done", float(action == self.word), True, False, {}


gymnasium.register("Words-v0", Words)


def made(**args):
    return environment_maker(EnvironmentSpec(name="gymnasium", args=args), TASK)()


def played(environment, turns, seed=3):
    opening = environment.reset(TASK.item("train", 0), seed)
    said = opening.messages[0]["content"]
    replies = [
        environment.step(Action(turn)) for turn in (turns(said) if callable(turns) else turns)
    ]
    grade = environment.grade()
    environment.close()
    return {
        "opening": said,
        "answers": [r.messages[0]["content"] for r in replies],
        "rewards": [r.reward for r in replies],
        "over": replies[-1].over,
        "parts": grade.parts,
    }


def refused(**args):
    try:
        made(**args)
    except UserError as error:
        return str(error)
    return ""


WAY = ["down", "down", "nowhere", "2", "DOWN", "right", "right"]
print(
    json.dumps(
        {
            "lake": played(made(**LAKE, actions=["left", "down", "right", "up"]), WAY),
            "words": [
                played(made(id="Words-v0"), lambda said: ["abc", said[4:]], seed)
                for seed in (1, 1, 2**40)
            ],
            "number": played(made(id="FrozenLake-v1"), ["9", "0"]),
            "refused": [
                refused(id="Nothing-v0"),
                refused(id="Pendulum-v1"),
                refused(**LAKE, actions=["left"]),
            ],
        }
    )
)
