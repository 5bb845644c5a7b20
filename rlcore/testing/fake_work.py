"""What a simulated rollout actor works on, and how fast."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlcore.loop.clients import Spawned
from rlcore.testing.clock import After
from rlcore.testing.records import make_trajectory
from rlcore.types import Request, Trajectory

if TYPE_CHECKING:
    from rlcore.testing.fake_actors import FakeActor

PROMPT = [1]  # tokens of what is asked, whatever it is


@dataclass(frozen=True, slots=True)
class Speed:
    """How long an actor takes, in simulated seconds."""

    step_s: float = 0.1  # one decode step, a token of every running request
    load_s: float = 0.5  # new weights, after a drain
    start_s: float = 10.0  # from its spawn to a ready engine
    place_s: float = 0.0  # until the cluster has room for it
    answer_s: float = 0.01  # any other call
    max_running: int = 64  # requests decoded together


@dataclass(slots=True, eq=False)
class Drawing:
    """A request and how far its decoding has come."""

    request: Request
    wanted: int  # tokens
    versions: list[int] = field(default_factory=list)  # of the tokens so far
    decoding_s: float = 0.0
    name: str = field(init=False)  # of the request

    def __post_init__(self) -> None:
        self.name = self.request.request_id

    def trajectory(self, actor: str, draw_id: str) -> Trajectory:
        """What the actor of this name has made of it."""
        request = self.request
        return make_trajectory(
            request.group_id,
            request.sample_index,
            turns=[(request.prompt_ids.tolist() or PROMPT, [7] * len(self.versions))],
            version=self.versions,
            prompt_id=request.prompt_id,
            purpose=request.purpose,
            actor_id=actor,
            draw_id=draw_id,
        )


def spawned(actor: FakeActor, fails: str = "") -> Spawned:
    """An actor on its way, as a spawn function returns it; `fails`: why its engine does not
    start."""
    speed = actor.speed
    return Spawned(actor, After(speed.place_s), After(speed.place_s + speed.start_s, fails))
