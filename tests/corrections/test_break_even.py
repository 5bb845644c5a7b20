"""N* from products between groups: five worlds whose N* is known, ages, ranks, and checkpoints."""

import json
import math
from dataclasses import replace

import pytest
import torch
from correction_helpers import on_ranks, pipeline_of
from shared_world import CAP, CURVES, STATE, VOCAB, WORLDS, World

from rlcore.corrections.break_even import BreakEven, last_layer_sketch
from rlcore.corrections.numerics import ONE_RANK

ANSWERS, STEPS = 512, 20


def steps_of(world, count=STEPS, answers=ANSWERS, age=0, seed=0):
    groups = answers // world.samples
    return [world.step(groups, 1000 * seed + n, version=n, age=age) for n in range(count)]


def followed(steps):
    seen = BreakEven(CAP)
    for step in steps:
        assert seen.follow(step, step.mask)
    return seen


FURTHER = ("context, small", "context, groups of 2")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in FURTHER else ()) for n in WORLDS]
)
def test_the_share_is_nearly_the_best_one_after_twenty_steps(name):
    steps, curve = steps_of(WORLDS[name]), CURVES[name]
    share, metrics = followed(steps).share(steps[-1], steps[-1].mask)
    assert len(share.unique()) == 1 and metrics["alpha"] == pytest.approx(float(share[0, 0]))
    assert curve.excess(metrics["alpha"], ANSWERS) < 0.05
    star = metrics.get("n_star", math.inf)
    if curve.n_star < 10_000:
        assert 0.5 < star / curve.n_star < 2.0
    else:  # thousands of answers more than were seen: any such number says the same
        assert star > 4 * ANSWERS


def test_sketches_of_the_head_keep_products_of_gradients():
    """In the mean over draws: the hash is one and the same."""
    g = torch.Generator().manual_seed(0)
    found = {pair: [] for pair in ((0, 0), (0, 1), (1, 1))}
    for _ in range(24):
        hidden, head = torch.randn(40, 96, generator=g), torch.randn(500, 96, generator=g) / 8
        targets = torch.randint(0, 500, (40,), generator=g)
        probs = (hidden @ head.T).softmax(-1)
        score = torch.nn.functional.one_hot(targets, 500) - probs
        scale = torch.randn(2, 40, generator=g)  # two gradients of the same tokens, in part alike
        scale[1] += scale[0]
        whole = [torch.einsum("n,nd,nv->dv", s, hidden, score) for s in scale]
        sketch = last_layer_sketch(hidden, probs, torch.ones(40, 1), targets)
        small = [torch.einsum("n,nd,nv->dv", s, sketch[:, :16], sketch[:, 16:]) for s in scale]
        for (a, b), ratios in found.items():
            ratios.append(float((small[a] * small[b]).sum() / (whole[a] * whole[b]).sum()))
    for ratios in found.values():
        assert sum(ratios) / len(ratios) == pytest.approx(1.0, abs=0.15)


def test_no_jump_where_tokens_begin_to_be_older():
    """The same error at every age: the first tokens of an age are corrected as all others are, and
    later ones by nearly the same share."""
    world = WORLDS["offset"]
    seen = followed(steps_of(world, 10))
    steps = steps_of(world, 10, seed=1)
    before, _ = seen.share(steps[0], steps[0].mask)
    for number, step in enumerate(steps):
        step.token_version[::2] -= 1  # half of each group
        seen.follow(step, step.mask)
        share, metrics = seen.share(step, step.mask)
        young, old = float(share[1, 0]), float(share[0, 0])
        assert old == pytest.approx(young, abs=0.1) == pytest.approx(float(before[0, 0]), abs=0.1)
        assert metrics["alpha"] == pytest.approx((young + old) / 2, abs=1e-6), number


def test_ages_with_errors_of_their_own_have_their_own_shares():
    steps = steps_of(WORLDS["noise"])
    for fresh, off in zip(steps, steps_of(WORLDS["offset"], seed=1)):
        rows = torch.arange(ANSWERS) // 8 % 2 == 1  # every other group is older, and off by more
        for name in ("logp_inf", "logp_ref", "advantages", "sketch"):
            getattr(fresh, name)[rows] = getattr(off, name)[rows]
        fresh.token_version[rows] -= 3
    share, _ = followed(steps).share(steps[-1], steps[-1].mask)
    assert float(share[0, 0]) < 0.3 < 0.6 < float(share[8, 0])


def test_groups_without_variance_count_neither_in_n_nor_in_n_star():
    steps = steps_of(WORLDS["offset"], 4)
    flat = [replace(step, advantages=step.advantages.clone()) for step in steps]
    kept = []
    for step in flat:
        on = torch.arange(ANSWERS) // 8 % 4 == 0
        step.advantages[~on] = 0.0
        kept.append(step.rows(on))
    whole, alone = followed(flat), followed(kept)
    assert whole.figures() == pytest.approx(alone.figures())
    of_flat, of_kept = (s.share(t[-1], t[-1].mask)[1] for s, t in ((whole, flat), (alone, kept)))
    assert of_flat == pytest.approx(of_kept)
    still = replace(steps[0], advantages=torch.zeros_like(steps[0].advantages))
    assert not BreakEven(CAP).follow(still, still.mask)
    assert whole.share(still, still.mask)[1]["alpha"] == 0.0


def test_statistics_add_up_over_ranks_and_do_not_depend_on_the_order_of_rows():
    steps = steps_of(WORLDS["offset"], 3, answers=64)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    shuffled = followed([step.rows(order) for step in steps]).figures()
    whole = followed(steps)
    assert shuffled == pytest.approx(whole.figures(), rel=1e-4)
    rows = [torch.arange(64) < 24, torch.arange(64) >= 24, torch.zeros(64, dtype=torch.bool)]

    def rank(number, reduce):
        seen = BreakEven(CAP)
        for step in steps:
            own = step.rows(rows[number])
            assert seen.follow(own, own.mask, reduce)
        own = steps[-1].rows(rows[number])
        return seen.figures(), seen.share(own, own.mask, reduce)[1]

    expected = whole.figures(), whole.share(steps[-1], steps[-1].mask)[1]
    for figures, metrics in on_ranks(rank, 3):
        assert figures == pytest.approx(expected[0], rel=1e-5)
        assert metrics == pytest.approx(expected[1], rel=1e-5)


def test_a_checkpoint_continues_to_the_bit_and_a_batch_counts_once():
    steps = steps_of(WORLDS["offset"], 4, answers=64)
    ais = {"ais": {"alpha": "n_star"}}
    one, other = pipeline_of(ais), pipeline_of(ais)
    for step in steps[:2]:
        one.correct(step, ONE_RANK)
    other.restore(json.loads(json.dumps(one.state())))
    for step in steps[2:]:
        expected, found = (pipeline.correct(step, ONE_RANK) for pipeline in (one, other))
        assert torch.equal(found.weight, expected.weight) and found.metrics == expected.metrics
    before = one.state()
    again = replace(steps[2], step=9, ref_version=2)  # a later epoch of the phase
    one.correct(again, ONE_RANK)
    assert one.state() == before
    assert pipeline_of({"tis": {}}).restore(one.state()) is None  # other corrections begin anew


def test_a_step_without_sketches_or_with_one_group_says_nothing():
    (step,) = steps_of(WORLDS["offset"], 1, answers=64)
    for poor in (replace(step, sketch=None), step.rows(torch.arange(64) < 8)):
        seen = BreakEven(CAP)
        assert not seen.follow(poor, poor.mask) and seen.figures() == {}
        _, metrics = seen.share(poor, poor.mask)
        answers = len(poor.mask)
        assert metrics == pytest.approx({"alpha": answers / (answers + 90), "n_star": 90})


def test_the_world_is_what_its_curves_say():
    """The mean gradients are those of its samples: no bias without an error, in few groups."""
    plain, corrected = World().gradients(16, 0)
    assert torch.equal(plain, corrected) and plain.shape == (16, VOCAB * STATE)
