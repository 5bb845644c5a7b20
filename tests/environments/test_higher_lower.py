"""The guessing game: what a guess is answered, and when a game is over."""

import pytest

from rlcore.environments.games import HigherLower
from rlcore.environments.protocol import Action
from rlcore.types import Item


def begun(**args):
    game = HigherLower(**args)
    game.reset(Item(prompt_id="higher_lower/train/0", question="?", answer="5"), seed=0)
    return game


def said(reply):
    return [message["content"] for message in reply.messages]


def test_wrong_guesses_are_answered_until_the_number_is_found():
    game = begun(guesses=3)
    assert said(game.step(Action("8"))) == ["<"] and said(game.step(Action("2"))) == [">"]
    assert game.step(Action("5")).over
    assert (game.grade().reward, game.grade().parts["guesses"]) == (1.0, 3.0)


@pytest.mark.parametrize("guess", ["", "x", "55"])
def test_an_unreadable_guess_costs_a_guess_or_the_game(guess):
    game = begun(guesses=2)
    reply = game.step(Action(guess))
    assert (said(reply), reply.over, reply.parts) == (["?"], False, {"unreadable": 1.0})
    assert game.step(Action("5")).over and game.grade().reward == 1.0

    game = begun(guesses=2, forgiving=False)
    reply = game.step(Action(guess))
    assert (reply.over, reply.parts, game.grade().reward) == (True, {"unreadable": 1.0}, 0.0)


def test_a_strict_game_goes_on_after_a_wrong_number():
    reply = begun(guesses=2, forgiving=False).step(Action("4"))
    assert (said(reply), reply.over, reply.parts) == ([">"], False, {"unreadable": 0.0})
