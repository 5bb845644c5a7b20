"""The rules of the text game, and that every house can be won."""

import random

import pytest

from rlcore.environments.games import DIRECTIONS, Rooms, house, way
from rlcore.environments.protocol import Action
from rlcore.types import Item

ITEM = Item("any/train/0", "", "")


def begun(seed=0, **args):
    game = Rooms(**args)
    return game, game.reset(ITEM, seed).messages[0]["content"]


def said(game, text):
    return game.step(Action(text)).messages[0]["content"]


@pytest.mark.parametrize("rooms", [3, 6, 9])
def test_every_house_is_won_by_its_worked_turns(rooms):
    for seed in range(30):
        game, _ = begun(seed, rooms=rooms)
        rewards = []
        for _ in range(2 * rooms + 2):
            reply = game.step(Action(game.worked()))
            rewards.append(reply.reward)
            if reply.over:
                break
        assert reply.over and rewards.count(0.25) == 1
        grade = game.grade()
        assert (grade.reward, grade.parts) == (0.75, {"correct": 1.0, "key": 1.0})


def test_rooms_are_connected_and_the_way_is_a_shortest_one():
    for seed in range(20):
        places = house(9, random.Random(seed))
        assert len(set(places)) == 9
        for end in places:
            x, y = 0, 0
            steps = way(places, (0, 0), end)
            for name in steps:
                x, y = x + DIRECTIONS[name][0], y + DIRECTIONS[name][1]
                assert (x, y) in places
            assert (x, y) == end and len(steps) >= abs(x) + abs(y)


def test_a_seed_makes_a_house_and_an_instance_starts_afresh():
    game, first = begun(3)
    game.step(Action(game.worked()))
    assert game.reset(ITEM, 3).messages[0]["content"] == first == begun(3)[1]
    assert len({begun(seed)[1] for seed in range(20)}) > 10


def test_what_is_not_possible_changes_nothing_and_earns_nothing():
    game, opening = begun(1)
    doors = opening.rpartition("Doors: ")[2].split(".")[0].split(", ")
    (closed, *_) = [name for name in DIRECTIONS if name not in doors]
    assert said(game, f"go {closed}") == "There is no door."
    for text in ("take key", "open chest", "dance", ""):
        reply = game.step(Action(text))
        assert reply.messages[0]["content"] == "Nothing happens."
        assert reply.reward is None and reply.parts == {"invalid": True} and not reply.over
    assert said(game, f" Go  {doors[0]}. ").startswith("You are in the ")


def test_the_chest_is_locked_without_the_key_which_is_rewarded_once():
    game, _ = begun(2)
    game._here = game._chest
    assert said(game, "open chest") == "It is locked."
    game._here = game._key
    assert game.step(Action("take key")).reward == 0.25
    assert game.step(Action("take key")).reward is None
    assert game.grade().reward == 0.0 and game.grade().parts["key"] == 1.0


def test_houses_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="rooms must be from 3 to 9"):
        Rooms(rooms=2)
