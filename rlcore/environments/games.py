"""Games for tests and examples: sorting names over turns, a hidden number, and a house of rooms."""

from __future__ import annotations

import random
from collections import deque

from rlcore.environments.protocol import Action, Environment, Opening, Reply
from rlcore.errors import UserError
from rlcore.interfaces import Task
from rlcore.tasks.game_problems import AlphabetSort as Names
from rlcore.types import Grade, Item


class AlphabetSortGame(Environment):
    """Plays the task `alphabet_sort`. Every turn is rewarded: by the likeness of its list with the
    right one, to the power `power`, divided by the number of turns. So the best reward is 1. Part
    `correct`: all lists were right.
    """

    def __init__(self, task: Task, *, power: float = 4.0) -> None:
        if not isinstance(task, Names):
            raise UserError(
                "environment.name=alphabet_sort plays no other task's problems: set "
                "task=alphabet_sort."
            )
        if power <= 0:
            raise ValueError("power must be above 0")
        self._task = task
        self._power = power

    def reset(self, item: Item, seed: int) -> Opening:
        self._lists = item.meta["lists"]
        self._names: list[str] = list(self._lists[0])
        self._turn = 0
        self._right = 0
        return Opening([{"role": "user", "content": item.question}])

    def step(self, action: Action) -> Reply:
        likeness = self._task.likeness(action.text, self._names)
        self._right += likeness == 1.0
        self._turn += 1
        reward = likeness**self._power / self._task.turns
        if self._turn == self._task.turns:
            return Reply(over=True, reward=reward)
        names = self._lists[self._turn]
        self._names += names
        message = {"role": "user", "content": self._task.asked(names, self._turn)}
        return Reply([message], reward=reward)

    def grade(self) -> Grade:
        lists = float(self._right)
        return Grade(0.0, {"correct": float(lists == self._task.turns), "right_lists": lists})

    def worked(self) -> str | None:
        return self._task.written(self._names)


HIGHER, LOWER, UNREADABLE = ">", "<", "?"


class HigherLower(Environment):
    """The hidden number is the answer of an item of the task `higher_lower`. The reward is 1 for a
    guess that hits it within `guesses`, else 0.

    `hinted`: share of the worked guesses that heed the hints so far; the others are random. Fresh
    models learn the form of the game from them, and its strategy from the reward. `forgiving`: an
    unreadable guess is answered `?` and costs a guess; otherwise it ends the game, so that a policy
    cannot settle on wasting guesses.
    """

    def __init__(self, *, guesses: int = 4, hinted: float = 0.0, forgiving: bool = True) -> None:
        if guesses < 1 or not 0 <= hinted <= 1:
            raise ValueError("guesses must be at least 1, and hinted a share from 0 to 1")
        self._guesses = guesses
        self._hinted = hinted
        self._forgiving = forgiving

    def reset(self, item: Item, seed: int) -> Opening:
        self._number = item.answer
        self._random = random.Random(seed)
        self._range = 0, 10 ** len(item.answer)  # [low, high) after the hints so far
        self._count = 0
        self._found = False
        return Opening([{"role": "user", "content": item.question}])

    def step(self, action: Action) -> Reply:
        guess = action.text.strip()
        self._count += 1
        self._found = guess == self._number
        if self._found or self._count >= self._guesses:
            return Reply(over=True)
        hint = self._hint(guess)
        parts = {"unreadable": float(hint == UNREADABLE)}
        if hint == UNREADABLE and not self._forgiving:
            return Reply(over=True, parts=parts)
        return Reply([{"role": "user", "content": hint}], parts=parts)

    def _hint(self, guess: str) -> str:
        if len(guess) != len(self._number) or not (guess.isascii() and guess.isdecimal()):
            return UNREADABLE
        low, high = self._range
        if guess < self._number:
            self._range = max(low, int(guess) + 1), high
            return HIGHER
        self._range = low, min(high, int(guess))
        return LOWER

    def grade(self) -> Grade:
        found = float(self._found)
        return Grade(found, {"correct": found, "guesses": float(self._count)})

    def worked(self) -> str | None:
        width = len(self._number)
        heeds = self._random.random() < self._hinted
        low, high = self._range if heeds else (0, 10**width)
        return str(self._random.randrange(low, high)).zfill(width)


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
