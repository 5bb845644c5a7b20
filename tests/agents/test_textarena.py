"""TextArena's games for one player: pip install 'rlcore[textarena]'."""

from __future__ import annotations

import re
import sys

import pytest

from rlcore.environments import environment_maker
from rlcore.environments.protocol import Action
from rlcore.environments.specs import EnvironmentSpec
from rlcore.errors import UserError
from rlcore.tasks import make_task


def game(name, **args):
    spec = EnvironmentSpec(name="textarena", args={"game": name, **args})
    return environment_maker(spec, make_task("digits", {}))()


def test_a_missing_package_is_named_in_a_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(UserError, match=re.escape("pip install 'rlcore[textarena]'")):
        game("GuessTheNumber-v0-hardcore")


def test_a_game_is_played_by_the_seed_to_its_own_reward():
    pytest.importorskip("textarena")
    item, found = make_task("digits", {}).item("train", 0), []
    for seed in (7, 7, 8):
        played = game("GuessTheNumber-v0")
        (asked,) = played.reset(item, seed).messages
        assert "number between 1 and 20" in asked["content"]
        low, high = 1, 20
        while True:  # by halves
            middle = (low + high) // 2
            reply = played.step(Action(f"I say [{middle}]"))
            if reply.over:
                break
            told = reply.messages[0]["content"]
            assert told in ("The target number is higher.", "The target number is lower.")
            low, high = (middle + 1, high) if "higher" in told else (low, middle - 1)
        grade = played.grade()
        assert (grade.reward, grade.parts["correct"], grade.parts["finished"]) == (1.0, 1.0, 1.0)
        found.append(middle)
    assert found[0] == found[1]


def test_an_unreadable_move_is_told_and_a_game_cut_short_has_no_reward():
    pytest.importorskip("textarena")
    played = game("GuessTheNumber-v0", settings={"max_number": 50})
    (asked,) = played.reset(make_task("digits", {}).item("train", 0), 7).messages
    assert "between 1 and 50" in asked["content"]
    reply = played.step(Action("hm"))
    assert not reply.over and "invalid move" in reply.messages[0]["content"]
    assert played.grade().reward == played.grade().parts["finished"] == 0.0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Guess", "environment.args.game=Guess is not accepted; choose one of: 2048-v0"),
        ("TicTacToe-v0", "does not begin with one player"),
    ],
)
def test_what_is_no_game_for_one_player_is_refused_in_a_sentence(name, words):
    pytest.importorskip("textarena")
    with pytest.raises(UserError, match=words):
        game(name)
