"""A text game: find the key in a house of rooms, and open the chest with it."""

from __future__ import annotations

import random
from collections import deque

from rlcore.environments.protocol import Action, Environment, Opening, Reply
from rlcore.types import Grade, Item

NAMES = ("attic", "cellar", "garden", "hall", "kitchen", "library", "pantry", "study", "workshop")
DIRECTIONS = {"north": (0, 1), "south": (0, -1), "east": (1, 0), "west": (-1, 0)}
RULES = (
    "Find the key and open the chest. Answer with one command a turn: go north, go south, go east, "
    "go west, take key, open chest."
)
Place = tuple[int, int]


def house(rooms: int, rng: random.Random) -> list[Place]:
    """Places of connected rooms on a grid, the first at (0, 0)."""
    places: list[Place] = [(0, 0)]
    while len(places) < rooms:
        x, y = rng.choice(places)
        dx, dy = rng.choice(list(DIRECTIONS.values()))
        if (x + dx, y + dy) not in places:
            places.append((x + dx, y + dy))
    return places


def way(places: list[Place], start: Place, end: Place) -> list[str]:
    """Directions of a shortest way through neighbouring rooms."""
    ways: dict[Place, list[str]] = {start: []}
    waiting = deque([start])
    while end not in ways:
        x, y = waiting.popleft()
        for name, (dx, dy) in DIRECTIONS.items():
            place = x + dx, y + dy
            if place in places and place not in ways:
                ways[place] = [*ways[(x, y)], name]
                waiting.append(place)
    return ways[end]


class Rooms(Environment):
    """A house of `rooms` rooms, made from the episode's seed: the same for all samples of a group,
    another for every group, whatever the task's problems are. The reward is 1 for an open chest,
    of which the turn that takes the key is given `key_reward`.
    """

    def __init__(self, *, rooms: int = 4, key_reward: float = 0.25) -> None:
        if not 3 <= rooms <= len(NAMES) or not 0 <= key_reward <= 1:
            raise ValueError(f"rooms must be from 3 to {len(NAMES)}, and key_reward from 0 to 1")
        self._rooms = rooms
        self._key_reward = key_reward

    def reset(self, item: Item, seed: int) -> Opening:
        rng = random.Random(seed)
        self._places = house(self._rooms, rng)
        self._names = dict(zip(self._places, rng.sample(NAMES, self._rooms)))
        self._here = self._places[0]
        self._key, self._chest = rng.sample(self._places[1:], 2)
        self._held = False
        self._open = False
        return Opening([{"role": "user", "content": f"{RULES}\n{self._seen()}"}])

    def _seen(self) -> str:
        x, y = self._here
        doors = [n for n, (dx, dy) in DIRECTIONS.items() if (x + dx, y + dy) in self._names]
        words = [f"You are in the {self._names[self._here]}.", f"Doors: {', '.join(doors)}."]
        if self._here == self._key and not self._held:
            words.append("There is a key.")
        if self._here == self._chest:
            words.append("There is a chest.")
        return " ".join(words)

    def step(self, action: Action) -> Reply:
        verb, _, what = " ".join(action.text.lower().split()).strip(".").partition(" ")
        if (verb, what) == ("take", "key") and self._here == self._key and not self._held:
            self._held = True
            return self._reply("You take the key.", self._key_reward)
        if (verb, what) == ("open", "chest") and self._here == self._chest:
            self._open = self._held
            return Reply(over=True) if self._open else self._reply("It is locked.")
        if verb == "go" and what in DIRECTIONS:
            dx, dy = DIRECTIONS[what]
            place = self._here[0] + dx, self._here[1] + dy
            if place in self._names:
                self._here = place
                return self._reply(self._seen())
            return self._reply("There is no door.")
        return self._reply("Nothing happens.", invalid=True)

    def _reply(self, text: str, reward: float | None = None, *, invalid: bool = False) -> Reply:
        return Reply([{"role": "user", "content": text}], False, {"invalid": invalid}, reward)

    def grade(self) -> Grade:
        opened = float(self._open)
        return Grade(opened * (1 - self._key_reward), {"correct": opened, "key": float(self._held)})

    def worked(self) -> str | None:
        goal = self._chest if self._held else self._key
        steps = way(self._places, self._here, goal)
        if steps:
            return f"go {steps[0]}"
        return "open chest" if self._held else "take key"
