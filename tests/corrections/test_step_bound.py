"""The step bound: what it measures of tensors, and the rule against a plant in plain Python."""

import json
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.corrections.numerics import InvalidArgument
from rlcore.corrections.step_bound import AGES, Drift, StepBound, drift_accumulate, drift_values


def sampled(rows=6, width=5, *, apart=0.2, seed=0):
    """Log-probs [B, T] of learner and actor, and a mask with an empty row and unequal answers."""
    g = torch.Generator().manual_seed(seed)
    ref = -1 - torch.rand(rows, width, generator=g)
    inf = ref - apart * torch.randn(rows, width, generator=g)
    lengths = torch.tensor([0, *range(1, rows)])
    return ref, inf, torch.arange(width) < lengths[:, None]


def k3(ref, inf):
    d = ref.double() - inf.double()
    return torch.expm1(d) - d


def test_drift_is_the_kl_by_age_and_kind():
    ref, inf, mask = sampled()
    age = torch.arange(6)[:, None].expand(6, 5) // 2  # 0, 0, 1, 1, 2, 2
    kinds = torch.tensor([0, 0, 0, 1, 1, 1])
    drift = drift_values(drift_accumulate(ref, inf, mask, age, kinds=kinds, count=2), 2)
    assert [row[:4] for row in drift.tokens] == [[1, 2, 0, 0], [0, 3, 9, 0]]
    expected = k3(ref, inf)
    for kind in (0, 1):
        for own in range(3):
            cell = mask & (age == own) & (kinds == kind)[:, None]
            assert drift.kl[kind][own] == pytest.approx(float(expected[cell].sum()), abs=1e-8)
    assert drift.answers == [2, 3] and drift.sampled == [3, 12]
    each = (expected * mask).sum(-1)
    squares = [float(e.square().sum()) for e in (each[:3], each[3:])]
    assert drift.squares == pytest.approx(squares, abs=1e-4) and drift.groups == [2, 3]
    groups = torch.tensor([7, 7, 8, 8, 9, 9])  # one of them has answers of both kinds
    again = drift_accumulate(ref, inf, mask, age, kinds=kinds, groups=groups, count=2)
    a, b, c, d = (float(e) for e in (each[1], each[2], each[3], each[4] + each[5]))
    assert drift_values(again, 2).groups == [2, 2]
    assert drift_values(again, 2).squares == pytest.approx([a**2 + b**2, c**2 + d**2], abs=1e-4)


def test_tokens_without_a_ratio_count_for_the_length_alone():
    ref, inf, mask = sampled()
    inf[5, 0], inside = torch.nan, torch.ones(6, 5, dtype=torch.bool)
    inside[4, 0] = False
    age = torch.full((6, 5), 3)
    drift = drift_values(drift_accumulate(ref, inf, mask, age, inside=inside))
    assert drift.count == 13 and drift.length() == 3.0


def test_sums_are_equal_to_the_bit_however_a_batch_is_divided():
    ref, inf, mask = sampled(rows=12, width=11)
    age = torch.arange(12)[:, None].expand(12, 11) % 5
    whole = drift_accumulate(ref, inf, mask, age)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    parts = [drift_accumulate(*(t[own] for t in (ref, inf, mask, age))) for own in order.split(5)]
    assert torch.equal(torch.stack(parts).sum(0), whole)


def test_one_wild_token_is_16_nats_and_old_tokens_are_of_the_last_age():
    ref, inf, mask = torch.zeros(1, 1), torch.full((1, 1), -50.0), torch.ones(1, 1)
    drift = drift_values(drift_accumulate(ref, inf, mask, torch.full((1, 1), 10 * AGES)))
    assert drift.kl[0][AGES - 1] == pytest.approx(16.1, abs=0.1) and drift.tokens[0][AGES - 1] == 1


def batch(*cells, answer=10.0, kinds=1):
    """A Drift of (kind, age, tokens, KL of a token), in answers of `answer` tokens."""
    tokens = [[0.0] * AGES for _ in range(kinds)]
    kl = [[0.0] * AGES for _ in range(kinds)]
    for kind, age, count, each in cells:
        tokens[kind][age] += count
        kl[kind][age] += count * each
    sizes = [sum(row) for row in tokens]
    return Drift(tokens, kl, sizes, [size / answer for size in sizes])


def test_answer_kl_is_of_stale_tokens_above_the_floor_of_their_kind():
    rule = StepBound(None, ("bf16", "sparse"))
    rule.scale(0, 1e-3, batch((0, 0, 100, 0.001), (1, 0, 100, 0.05), kinds=2))
    rule.took(0, 1e-3)
    _, row = rule.scale(
        1, 1e-3, batch((0, 1, 50, 0.021), (0, 0, 50, 0.001), (1, 1, 300, 0.06), kinds=2)
    )
    assert row["floor@bf16"] == pytest.approx(0.001) and row["floor@sparse"] == pytest.approx(0.05)
    assert row["answer_kl@bf16"] == pytest.approx(0.01 * 10)
    assert row["answer_kl@sparse"] == pytest.approx(0.01 * 10)
    assert row["answer_kl"] == pytest.approx((50 * 0.02 + 300 * 0.01) / 400 * 10)
    assert "scale" not in row


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
def test_a_rank_without_sequences_adds_nothing(shape):
    ref, inf, mask = sampled()
    age, none = torch.ones(6, 5, dtype=torch.long), torch.zeros(shape)
    whole = drift_accumulate(ref, inf, mask, age, kinds=torch.zeros(6), count=2)
    for kinds in (None, torch.zeros(shape[0], dtype=torch.uint8)):
        part = drift_accumulate(none, none, none.bool(), none.long(), kinds=kinds, count=2)
        assert torch.equal(whole + part, whole)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf"), -1e30])
def test_no_log_prob_of_an_actor_makes_the_factor_odd(odd):
    """Ratios that do not exist are left out, and a wild one is 19 nats at most."""
    ref, inf, mask = sampled()
    inf[3, 0] = odd
    drift = drift_values(drift_accumulate(ref, inf, mask, torch.ones(6, 5, dtype=torch.long)))
    usual = drift_values(drift_accumulate(*sampled(), torch.ones(6, 5, dtype=torch.long)))
    assert drift.length() == usual.length() and drift.count in (14, 15)
    assert abs(sum(drift.kl[0]) - sum(usual.kl[0])) < 19.1
    rule = StepBound(0.5)
    rule.took(0, 1e-3)
    found, row = rule.scale(1, 1e-3, drift)
    assert 0 <= found <= 1 and all(value == value for value in row.values())


@pytest.mark.parametrize("wrong", [0.0, -0.5, float("nan"), float("inf")])
def test_wrong_arguments_are_named(wrong):
    with pytest.raises(InvalidArgument, match="bound="):
        StepBound(wrong)
    if wrong:  # a rate may be 0
        with pytest.raises(InvalidArgument, match="first="):
            StepBound(first=wrong)
        with pytest.raises(InvalidArgument, match="rate="):
            StepBound().scale(0, wrong, batch((0, 1, 10, 0.1)))
    with pytest.raises(InvalidArgument, match="2 kinds of actors, and the bound 1"):
        StepBound().scale(0, 1e-3, batch((0, 1, 10, 0.1), kinds=2))


def test_answers_count_as_at_most_128_tokens():
    rule = StepBound(None)
    rule.took(0, 1e-3)
    _, row = rule.scale(1, 1e-3, batch((0, 1, 8000, 0.004), answer=4000.0))
    assert row["answer_kl"] == pytest.approx(0.004 * 128)


def test_state_goes_through_json_to_the_bit():
    rule = StepBound(0.5, ("a", "b"))
    for version in range(5):
        age = min(version, 2)
        rule.scale(version, 1e-3, batch((0, age, 7, 0.013), (1, age, 9, 0.1), kinds=2))
        rule.took(version, 1e-3 / (3 + version))
    other = StepBound(0.5, ("a", "b"))
    other.load(json.loads(json.dumps(rule.state())))
    seen = batch((0, 2, 7, 0.03), (1, 1, 9, 0.2), kinds=2)
    assert other.scale(5, 1e-3, seen) == rule.scale(5, 1e-3, seen)


class Plant:
    """A policy whose answers lie kappa l^2 nats apart after steps of summed length l, and batches
    that were sampled `lag` versions ago, half of them `older` more."""

    def __init__(self, rule, lag, *, older=0, rate=1e-3, floor=0.0):
        self.rule, self.lag, self.older, self.rate, self.floor = rule, lag, older, rate, floor
        self.taken, self.kls, self.scales = [], [], []

    def run(self, steps, kappa):
        for _ in range(steps):
            now = len(self.taken)
            ages = [min(now, self.lag), min(now, self.lag + self.older)]
            each = [kappa * sum(self.taken[now - age :]) ** 2 / 10 for age in ages]
            cells = [(0, age, 50, self.floor + own) for age, own in zip(ages, each)]
            scale, _ = self.rule.scale(now, self.rate, batch(*cells))
            self.rule.took(now, scale * self.rate)
            self.taken.append(scale * self.rate)
            self.kls.append(sum(each) / 2 * 10)
            self.scales.append(scale)
        return self


@pytest.mark.parametrize("older", [0, 3])
@pytest.mark.parametrize("lag", [1, 2, 4, 8, 16])
def test_a_plant_stays_below_twice_the_bound_and_goes_on(lag, older):
    """Its gain jumps tenfold and falls again: a bound is passed for as long as what was in flight
    before is, and no longer; the rule is never stuck at 0, and lets go when the gain is small."""
    plant = Plant(StepBound(0.5), lag, older=older)
    depth = lag + older + 1
    first = 100 / depth**2 * 0.5e6  # a hundred times what whole steps may have
    plant.run(60, first)
    assert max(plant.kls[depth:]) < 1.0
    for start in range(depth, 60 - 2 * depth):
        assert max(plant.scales[start : start + 2 * depth]) > 0
    assert sum(plant.scales[-depth:]) > 0.07 * depth  # 0.1 each would be all there is
    plant.run(60, 10 * first)
    assert max(plant.kls[60 + depth :]) < 1.0
    plant.run(40 + depth, 1e-4 * first)
    assert plant.scales[-1] == 1.0


@given(
    lag=st.integers(1, 16),
    older=st.integers(0, 6),
    gains=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=3),
    rate=st.sampled_from([1e-6, 1e-3, 1.0]),
)
@settings(max_examples=40, deadline=None)
def test_no_plant_is_stuck_at_0_and_each_is_left_alone_in_the_end(lag, older, gains, rate):
    """`gains`: of stretches of the run, in what whole steps may have at most."""
    plant, depth = Plant(StepBound(0.5), lag, older=older, rate=rate), lag + older + 1
    most = 0.5 / (depth * rate) ** 2
    for gain in gains:
        plant.run(3 * depth, gain * most)
    for start in range(len(plant.scales) - 2 * depth):
        assert max(plant.scales[start : start + 2 * depth]) > 0, start
    # kappa falls by a fifth a step: sixty steps are a factor of 6e5
    plant.run(60 + depth, 1e-3 * most)
    assert set(plant.scales[-depth:]) == {1.0}


def test_a_gain_that_falls_tenfold_gives_whole_steps_back_within_twenty():
    for lag in (1, 2, 4, 8):
        most = 0.5 / ((lag + 1) * 1e-3) ** 2
        plant = Plant(StepBound(0.5), lag).run(40, 5 * most)
        assert plant.scales[-1] < 0.5
        assert plant.run(20, 0.5 * most).scales[-1] == 1.0, lag


def test_steps_are_whole_where_the_samples_agree():
    """D below an eighth of the bound at age 1, below a third of it from age 4 on."""
    for lag, share in ((1, 0.24), (2, 0.43), (4, 0.6), (8, 0.75)):
        kappa = share * 0.5 / (lag * 1e-3) ** 2
        assert set(Plant(StepBound(0.5), lag).run(60, kappa).scales) == {1.0}, lag


def test_a_floor_is_no_movement():
    on_policy = Plant(StepBound(0.5), 0, floor=0.05).run(20, 1e9)
    assert set(on_policy.scales) == {1.0}
    late = [Plant(StepBound(0.5), 2, floor=f).run(40, 4e5) for f in (0.0, 0.05)]
    assert late[0].scales == pytest.approx(late[1].scales) and min(late[0].scales) < 0.5


@pytest.mark.parametrize(("lag", "ages"), [(1, 1), (1, 2), (4, 1), (4, 5), (8, 1), (8, 9)])
def test_what_a_floor_scatters_is_no_movement(lag, ages):
    """Drafts have several nats an answer, a twentieth more or less in each batch. Steps that do
    nothing to them would otherwise end at 0, since shorter ones make the same nats a larger
    kappa."""
    rng, means = random.Random(lag), {}
    for known in (True, False):
        rule, scales = StepBound(0.5), []
        for now in range(200):
            late = batch()
            for age in range(max(0, min(now, lag) - ages + 1), min(now, lag) + 1):
                late.tokens[0][age] = 900.0
                late.kl[0][age] = 900.0 * rng.gauss(1.0, 0.05)
            kl, sampled = sum(late.kl[0]), sum(late.tokens[0])
            answers = sampled / 10.0
            error = 0.05 * (900.0 / sampled) ** 0.5
            squares = (kl**2 / answers + (error * kl) ** 2,)
            groups = [answers] if known else ()
            late = Drift(late.tokens, late.kl, [sampled], [answers], groups, squares)
            scales.append(rule.scale(now, 1e-3, late)[0])
            rule.took(now, scales[-1] * 1e-3)
        means[known] = sum(scales[100:]) / 100
    assert means[True] > 0.9 and means[False] < 0.9 * means[True]


def test_movement_is_seen_above_a_floor_s_scatter():
    rule, error = StepBound(0.5), 0.1 * 2**0.5  # of either batch 0.1, and so of the difference
    fresh, late = batch((0, 0, 1010, 0.2)), batch((0, 1, 1010, 0.8))  # nats: 202 and 808
    rule.scale(0, 1e-3, replace(fresh, groups=[101], squares=[404 + 20.2**2 / 1.01]))
    rule.took(0, 1e-3)
    _, row = rule.scale(1, 1e-3, replace(late, groups=[101], squares=[6464 + 80.8**2 / 1.01]))
    assert row["answer_kl"] == pytest.approx(10 * (0.6 - 2 * error * (0.2 * 0.8) ** 0.5))
    assert row["floor"] == pytest.approx(0.2)


def test_the_ages_that_a_batch_lacks_need_no_place():
    """As the example of `Drift` has it."""
    rule = StepBound(0.5)
    rule.took(0, 1e-3)
    drift = Drift(((90.0, 10.0),), ((0.0, 0.2),), (100.0,), (20.0,))
    found, row = rule.scale(1, 1e-3, drift)
    assert found == 1.0 and row["answer_kl"] == pytest.approx(0.2 / 100 * 5)


def test_a_floor_that_rises_holds_steps_until_it_is_measured_again():
    plant = Plant(StepBound(0.5), 2, floor=0.0).run(10, 1e3)
    plant.floor = 0.5  # 5 nats an answer: ten times the bound
    plant.run(60, 1e3)
    assert 0.0 in plant.scales[10:16] and plant.scales[-1] > 0.5
    assert plant.rule.scale(70, 1e-3, batch((0, 0, 1, 0.5)))[1]["floor"] == pytest.approx(
        0.5, rel=0.1
    )


def test_a_phase_measures_to_its_start_and_counts_steps_to_now():
    rule = StepBound(0.5)
    for version in range(4):
        rule.took(version, 1e-3)
    _, row = rule.scale(4, 1e-3, batch((0, 1, 10, 0.01)), since=2)
    assert row["kappa"] == pytest.approx(0.1 / 1e-3**2)  # of version 1's step alone
    assert row["moved"] == pytest.approx(3e-3)


def test_the_first_steps_of_a_late_run_are_short_until_a_batch_can_show_one():
    """The first lag + 1 batches are all of version 0, and none shows what the first step does."""
    for lag in (1, 4, 8):
        plant = Plant(StepBound(0.5, first=1e-3 / (lag + 1)), lag).run(60, 100 / 1e-6)
        assert plant.scales[0] == pytest.approx(1 / (lag + 1))
        free = Plant(StepBound(0.5), lag).run(60, 100 / 1e-6)
        assert max(plant.kls) < max(free.kls) / lag**2 * 1.1
    near = Plant(StepBound(0.5, first=1e-3 / 5), 4).run(20, 1e3)
    assert near.scales == pytest.approx([0.2, *[1.0] * 19])
    warming = StepBound(0.5, first=2e-4)
    assert warming.scale(0, 1e-4, batch((0, 0, 10, 0.0)))[0] == 1.0  # a warm-up is short enough


def test_a_first_phase_is_short_in_all_its_steps():
    rule = StepBound(0.5, first=2e-4)
    for step in range(4):
        assert rule.scale(step, 1e-3, batch((0, 0, 10, 0.0)), since=0)[0] == pytest.approx(0.2)
        rule.took(step, 2e-4)
    assert rule.scale(4, 1e-3, batch((0, 0, 10, 0.0)))[0] == 1.0  # fresh, after steps


def test_nothing_is_scaled_where_no_rate_is_wanted():
    rule = StepBound(0.5)
    rule.took(0, 1e-3)
    assert rule.scale(1, 0.0, batch((0, 1, 10, 5.0)))[0] == 1.0


def test_a_run_that_is_resumed_with_a_bound_knows_what_was_measured_without():
    """learner.step_bound may change: lengths, kappa and floors are kept by a rule without one."""
    free, late = StepBound(None, ("a",)), batch((0, 0, 10, 0.01), (0, 1, 10, 0.03))
    for version in range(3):
        free.scale(version, 1e-3, late)
        free.took(version, 1e-3)
    bounded = StepBound(0.5, ("a", "b"))
    bounded.load(json.loads(json.dumps(free.state())))
    found, row = bounded.scale(3, 1e-3, batch((0, 1, 10, 0.03), (1, 1, 10, 0.03), kinds=2))
    assert row["kappa"] > 0 and 0 < found < 1
    assert row["floor@a"] == pytest.approx(0.01, rel=0.05) and row["floor@b"] == 0
    other = StepBound(2.0, ("a", "b"))
    other.load(json.loads(json.dumps(free.state())))
    wider, _ = other.scale(3, 1e-3, batch((0, 1, 10, 0.03), (1, 1, 10, 0.03), kinds=2))
    assert wider > found
