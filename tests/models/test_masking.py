"""What is hidden of a prompt and a response follows from a seed, and travels with the record."""

from dataclasses import replace

import numpy as np
import pytest

from rlcore.extras.diffusion.estimates import Estimate, masked_answer
from rlcore.serialization import dump_trajectory, load_trajectory
from rlcore.testing.records import make_trajectory


def test_an_estimate_follows_from_its_seed():
    one, same = (Estimate.of_request(5, 400, 8, 0.15) for _ in range(2))
    other = Estimate.of_request(6, 400, 8, 0.15)
    assert (one.prompt_mask == same.prompt_mask).all()
    assert (one.prompt_mask != other.prompt_mask).any()
    assert 30 < one.prompt_mask.sum() < 90
    assert (one.again(0.15).prompt_mask != one.prompt_mask).any()
    assert not Estimate.of_request(5, 400, 8, 0.0).prompt_mask.any()


def test_an_estimate_reads_the_same_from_a_record_that_has_travelled():
    one = Estimate.drawn(2**62, 3, 16, 0.5)
    t = make_trajectory(turns=[([7, 8, 9], [4, 5])])
    t.extras = one.extras()
    found = Estimate.of_record(load_trajectory(dump_trajectory(t)))
    assert (found.seed, found.canvas) == (2**62, 16)
    assert (found.prompt_mask == one.prompt_mask).all()


def test_a_causal_record_has_no_estimate():
    with pytest.raises(ValueError, match="no mask_seed"):
        Estimate.of_record(make_trajectory())


def test_the_inputs_hide_the_whole_canvas():
    one = Estimate(0, np.array([False, True, False]), canvas=4)
    assert one.inputs(np.array([7, 8, 9]), 99).tolist() == [7, 99, 9, 99, 99, 99, 99]
    assert replace(one, canvas=1).inputs(np.array([7, 8, 9]), 99).tolist() == [7, 99, 9, 99]


def test_an_answer_fills_its_canvas_and_is_partly_hidden():
    rng = np.random.default_rng(0)
    drawn = [masked_answer([5, 6], 1, 6, rng) for _ in range(300)]
    assert all(tokens.tolist() == [5, 6, 1, 1, 1, 1] for tokens, _ in drawn)
    counts = np.bincount([masked.sum() for _, masked in drawn], minlength=7)
    assert counts[0] == 0 and (counts[1:] > 20).all()
    # longer than the canvas: it still ends
    assert masked_answer([5, 6, 7], 1, 2, rng)[0].tolist() == [5, 6, 7, 1]
