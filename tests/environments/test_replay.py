"""An episode that is played again from its beginning, as after a resume or an actor's death."""

from __future__ import annotations

import random

import numpy as np
import pytest
from environment_fakes import ScriptedSampler, ask, make_job

from rlcore.environments.play import Play
from rlcore.models.fresh import build_char_tokenizer

pytestmark = pytest.mark.processes

EOS = 1
OTHERS = ("draw_id", "timings")  # who played it, and how long it took


class SeededSampler(ScriptedSampler):
    """Samples what follows from a request's seed and prompt, as an engine does."""

    def __init__(self, play):
        super().__init__(play, [])

    def turn(self, request):
        rng = random.Random(repr((request.seed, request.prompt_ids.tolist())))
        digits = build_char_tokenizer("0123456789=").encode("0123456789")
        self.turns = [[*rng.choices(digits, k=3), EOS]]
        return super().turn(request)


def begin():
    tokenizer = build_char_tokenizer("0123456789=")
    return SeededSampler(Play(make_job("Dice"), tokenizer, ("bf16-0", "bf16")))


def play_until(sampler, turn):
    """Until the engine is asked for this turn of some episode, counted from 0."""
    play = sampler.play
    play.begin_waiting()
    while True:
        play.wait(1.0)
        asked, play.to_sample = play.to_sample, []
        sampler.asked += asked
        for request in asked:
            if sum(r.request_id == request.request_id for r in sampler.asked) > turn:
                return
            play.sampled(sampler.turn(request))


def contents(played):
    """Everything that is trained on, by sample."""
    found = {}
    for p in played:
        parts = [
            {
                name: value.tolist() if isinstance(value, np.ndarray) else value
                for name, value in ((n, getattr(record, n)) for n in record.__slots__)
                if name not in OTHERS
            }
            for record in p.parts
        ]
        found[p.score.sample_index] = parts, p.score.reward, p.score.turn_rewards, p.score.parts
    return found


@pytest.mark.parametrize("turn", [1, 2])
def test_it_is_the_same_to_the_bit(turn):
    whole, interrupted, again = begin(), begin(), begin()
    try:
        for sampler in (whole, interrupted, again):
            sampler.play.add(ask(3, group=4))
        expected = contents(whole.run())
        play_until(interrupted, turn)
        interrupted.play.close()  # its process is gone, with episodes in their middle
        assert contents(again.run()) == expected
    finally:
        for sampler in (whole, interrupted, again):
            sampler.play.close()
    rewards = {reward for _, reward, _, _ in expected.values()}
    said = {str(parts) for parts, _, _, _ in expected.values()}
    assert len(rewards) == 1 and len(said) == 3  # the dice are the group's, the answers are not


def test_what_was_dropped_begins_again_in_the_same_process():
    whole, dropped = begin(), begin()
    try:
        whole.play.add(ask(2))
        expected = contents(whole.run())
        dropped.play.add(ask(2))
        play_until(dropped, 1)
        dropped.play.drop({r.request_id for r in ask(2)})
        dropped.asked.clear()
        dropped.play.add(ask(2))
        assert contents(dropped.run()) == expected
    finally:
        whole.play.close()
        dropped.play.close()
