"""A learner that loses its policy on late samples, and keeps it with the step bound: the learner
itself, on answers of an exact age that it samples in this process."""

from functools import partial
from statistics import fmean

import pytest

from benchmarks.evidence import late_learner
from rlcore.learner.specs import LearnerSpec

AGE, STEPS = 4, 40
pytestmark = [pytest.mark.nightly, pytest.mark.ranks, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A policy whose held-out reward is 0.6 and more."""
    folder = tmp_path_factory.mktemp("late") / "start"
    late_learner.make_start(folder, 0.6)
    return folder


def last_rewards(start, lr, seed, bound):
    """Mean reward of the last five batches of a run with tis."""
    spec = LearnerSpec(lr=lr, lr_warmup_steps=3, betas=(0.9, 0.95), step_bound=bound)
    rank = late_learner.learner(start, spec, STEPS, seed, lag=AGE, corrections={"tis": {}})
    sampled = partial(late_learner.batch, rank.engine.policy.lm, seed)
    steps = list(late_learner.late_steps(rank, STEPS, AGE, 1, sampled))
    return fmean(reward for _, reward, _ in steps[-5:])


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("lr", [2e-4, 4e-4])
def test_a_run_that_is_lost_without_the_bound_is_kept_by_it(start, lr, seed):
    """At two and a half times the rate that samples of four steps bear, and at five times."""
    assert last_rewards(start, lr, seed, None) < 0.55
    assert last_rewards(start, lr, seed, 0.5) > 0.65
