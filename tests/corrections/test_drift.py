"""The estimate of drift against its exact value, in worlds of a dozen states."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from correction_helpers import on_ranks
from torch import Tensor

from rlcore.corrections import functional as F
from rlcore.corrections.break_even import last_layer_sketch
from rlcore.corrections.drift import DriftEstimate, policy_distance, unbiased_square
from rlcore.interfaces import Reduce
from rlcore.types import StepTensors

GROUPS, SAMPLES, STATES = 32, 8, 12


class World:
    """Answers of one token at states that differ in what they gain, so that E[A | state] is not 0;
    actors are off by Gaussian errors of the logits."""

    def __init__(self, vocabulary: int, stored: int, error: float, seed: int) -> None:
        self.g = torch.Generator().manual_seed(seed)
        self.stored = stored
        self.hidden = self.drawn(STATES, 24)
        logits = 2.0 * self.drawn(STATES, vocabulary)
        self.p = logits.softmax(-1)
        self.q = (logits + error * self.drawn(STATES, vocabulary)).softmax(-1)
        right = torch.rand(STATES, vocabulary, generator=self.g) < 0.4
        self.gain = right.double() + torch.rand(STATES, 1, generator=self.g).double()

    def drawn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.g, dtype=torch.float64)

    @property
    def exact(self) -> float:
        mean = (self.q * self.gain).sum(1, keepdim=True)
        drift = (mean - mean.mean()) * (self.q - self.p)
        return float(drift.norm() / (self.q * (self.gain - mean)).norm())

    def step(self, number: int) -> StepTensors:
        n = GROUPS * SAMPLES
        state = torch.randint(0, STATES, (n,), generator=self.g)
        token = torch.multinomial(self.q[state], 1, generator=self.g)[:, 0]
        rewards = self.gain[state, token].view(GROUPS, SAMPLES)
        advantages = (rewards - rewards.mean(1, keepdim=True)).flatten()[:, None]
        ids = self.q[state].topk(self.stored, -1).indices
        ref = self.p[state, token].log()[:, None]
        sketch = last_layer_sketch(
            self.hidden[state], self.p[state].float(), torch.ones(n, 1), token
        )
        return StepTensors(
            mask=torch.ones(n, 1, dtype=torch.bool),
            logp_inf=self.q[state, token].log()[:, None],
            logp_ref=ref,
            logp_new=ref,
            rewards=rewards.flatten(),
            group_ids=torch.arange(n) // SAMPLES,
            advantages=advantages,
            token_version=torch.zeros(n, 1, dtype=torch.int32),
            sample_ids=torch.arange(n),
            step=number,
            topk_ids_inf=ids[:, None],
            topk_logp_inf=self.q[state].gather(1, ids).log()[:, None],
            ref_logp_at_inf_ids=self.p[state].gather(1, ids).log()[:, None],
            token_ids=token[:, None],
            sketch=sketch[:, None],
        )


def followed(world: World, steps: int = 16) -> dict[str, float]:
    drift, found = DriftEstimate(), dict[str, float]()
    for number in range(steps):
        step = world.step(number)
        found = drift.follow(step, step.mask)
    return found


@pytest.mark.parametrize(("vocabulary", "stored"), [(12, 12), (200, 20)])
@pytest.mark.parametrize("error", [0.3, 1.0])
def test_it_is_the_exact_one(vocabulary: int, stored: int, error: float) -> None:
    worlds = [World(vocabulary, stored, error, seed) for seed in range(4)]
    found = torch.tensor([followed(world)["drift"] / world.exact for world in worlds])
    assert abs(found.mean() - 1.0) < 0.15 and found.min() > 0.7 and found.max() < 1.4


def test_equal_policies_do_not_drift() -> None:
    found = followed(World(200, 20, 0.0, 0), steps=4)
    assert found["drift"] < 1e-6 and found["tv"] < 1e-6


def test_the_distance_lies_between_its_bounds() -> None:
    for stored in (2, 8, 40):
        world = World(40, stored, 0.7, 1)
        ids = world.q.topk(stored, -1).indices
        least, most = policy_distance(ids, *(t.gather(1, ids).log() for t in (world.q, world.p)))
        true = 0.5 * (world.q - world.p).abs().sum(-1)
        assert (least <= true + 1e-5).all() and (true <= most + 1e-5).all()


def test_a_plain_square_would_see_drift_in_noise() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(200, 32, 64, generator=g, dtype=torch.float64)  # of 200 steps
    squares, n = x.square().sum((1, 2)), torch.tensor(32.0)
    plain = x.mean(1).square().sum(-1)
    assert abs(unbiased_square(x.sum(1), squares, n).mean()) < 0.1 < 1.8 < plain.mean()


def of_rank(
    halves: list[DriftEstimate], parts: list[StepTensors], rank: int, reduce: Reduce
) -> dict[str, float]:
    return halves[rank].follow(parts[rank], parts[rank].mask, reduce)


def test_ranks_and_a_checkpoint_change_nothing() -> None:
    world = World(40, 8, 0.7, 2)
    steps = [world.step(number) for number in range(3)]
    whole, halves = DriftEstimate(), [DriftEstimate(), DriftEstimate()]
    for step in steps:
        alone = whole.follow(step, step.mask)
        parts = [step.rows(step.group_ids % 2 == rank) for rank in range(2)]
        both = on_ranks(partial(of_rank, halves, parts), 2)
        assert both[0] == both[1] == pytest.approx(alone, rel=1e-9)
        resumed = DriftEstimate()
        resumed.restore(whole.state())
        whole = resumed


def test_another_trainer_has_it_from_parts_of_a_batch() -> None:
    world, whole = World(40, 8, 0.7, 2), DriftEstimate()
    step = world.step(5)
    expected = whole.follow(step, step.mask)["drift"]
    for cut in ([step], [step.rows(step.group_ids % 3 == part) for part in range(3)]):
        parts = [
            F.policy_drift_accumulate(
                *(s.topk_ids_inf, s.topk_logp_inf, s.ref_logp_at_inf_ids),
                token_ids=s.token_ids,
                sketch=s.sketch,
                advantages=s.advantages,
                mask=s.mask,
                group_ids=s.group_ids,
                step=5,
            )
            for s in cut
        ]
        squares = torch.tensor(F.policy_drift(F.merge(parts)))
        assert (squares[0] / squares[1]) ** 0.5 == pytest.approx(expected, rel=1e-5)
    assert F.policy_drift(parts[0] * 0.0) == (0.0, 0.0)


def test_what_is_outside_the_mask_changes_nothing() -> None:
    step = World(40, 8, 0.7, 3).step(0)
    on = torch.arange(len(step.mask))[:, None] % 5 != 0
    junk = {
        name: torch.where(on[..., None], getattr(step, name), torch.nan)
        for name in ("sketch", "topk_logp_inf", "ref_logp_at_inf_ids")
    }
    assert DriftEstimate().follow(replace(step, **junk), on) == DriftEstimate().follow(step, on)
    assert DriftEstimate().follow(replace(step, sketch=None), on) == {}
