"""Off-policy sequence masking: the printed rule, written out, and the gradient that it leaves."""

from __future__ import annotations

import math

import pytest
import torch
from bandit import Bandit
from correction_helpers import mismatched_step, pipeline_of
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.corrections import functional as F
from rlcore.corrections.functional import InvalidArgument, opsm
from rlcore.corrections.numerics import ONE_RANK
from rlcore.objectives.specs import ObjectiveSpec


def test_a_bad_sequence_that_was_left_behind_weighs_nothing() -> None:
    inf = torch.full((4, 3), -1.0)
    new = inf - torch.tensor([[0.3, 0.3, 9.0], [0.3, 0.3, 9.0], [0.1, 0.1, 9.0], [-0.3, -0.3, 9.0]])
    mask = torch.tensor([[1, 1, 0]] * 4)
    advantages = torch.tensor([[-1.0], [1.0], [-1.0], [-1.0]]).expand(4, 3)
    weight = opsm(new, inf, advantages, mask, delta=0.2)
    assert weight.tolist() == [[0, 0, 1], [1, 1, 1], [1, 1, 1], [1, 1, 1]]
    # the advantage decides token by token, the divergence for the sequence
    mixed = torch.tensor([[-1.0, 1.0, 0.0]] + [[0.0] * 3] * 3)
    assert opsm(new, inf, mixed, mask, delta=0.2)[0].tolist() == [0, 1, 1]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1000), delta=st.floats(0, 1))
def test_it_is_the_printed_rule_and_a_larger_delta_masks_less(seed: int, delta: float) -> None:
    step = mismatched_step(b=6, t=5, noise=1.0, seed=seed)
    found = opsm(step.logp_new, step.logp_inf, step.advantages, step.mask, delta=delta)
    for row in range(6):
        on = step.mask[row]
        kl = (step.logp_inf[row][on].double() - step.logp_new[row][on].double()).mean().item()
        if abs(kl - delta) < 1e-5:
            continue
        expected = 0.0 if kl > delta and step.advantages[row][on][0] < 0 else 1.0
        assert (found[row][on] == expected).all() and (found[row][~on] == 1).all()
    wider = opsm(step.logp_new, step.logp_inf, step.advantages, step.mask, delta=delta + 0.1)
    assert (wider >= found).all()


def test_undefined_and_impossible_tokens() -> None:
    inf, adv = torch.full((2, 3), -1.0), -torch.ones(2, 3)
    new = torch.tensor([[-1.0, math.nan, -1.0], [-1.0, -math.inf, -1.0]])
    weight = opsm(new, inf, adv, torch.ones(2, 3), delta=0.5)
    assert weight.tolist() == [[1, 0, 1], [0, 0, 0]]
    with pytest.raises(InvalidArgument, match="delta=-1"):
        opsm(inf, inf, adv, torch.ones(2, 3), delta=-1)
    with pytest.raises(InvalidArgument, match="advantages has shape"):
        opsm(inf, inf, adv[:, :2], torch.ones(2, 3), delta=1)
    assert "opsm" in F.__all__


@pytest.mark.parametrize("target", ["ref", "new"])
@pytest.mark.parametrize("loss", ["ppo", "reinforce"])
def test_the_gradient_is_that_of_the_sequences_that_stay(loss: str, target: str) -> None:
    """Over all sequences, written out: prefix and rest from p_inf, the token from p_new, and the
    masked sequences left out."""
    b, delta = Bandit(), 0.05
    logp = b.logits.log_softmax(-1)
    towards = b.new if target == "new" else b.ref
    total, masked = torch.zeros((), dtype=torch.float64), 0
    for a in range(3):
        for c in range(3):
            kl = (b.inf[0, a] / towards[0, a]).log() + (b.inf[1 + a, c] / towards[1 + a, c]).log()
            if b.reward[a, c] < 0 and kl / 2 > delta:
                masked += 1
                continue
            p = b.inf[0, a] * b.inf[1 + a, c]
            ratios = [b.new[0, a] / b.inf[0, a], b.new[1 + a, c] / b.inf[1 + a, c]]
            scores = [logp[0, a], logp[1 + a, c]]
            total = total + p * b.reward[a, c] * sum(r * s for r, s in zip(ratios, scores)) / 2
    assert masked > 0
    expected = torch.autograd.grad(total, b.logits)[0]
    wide = 1e9
    chosen = {"tis": {"cap": wide}, "opsm": {"delta": delta, "target": target}}
    objective = ObjectiveSpec(loss=loss, eps_low=wide, eps_high=wide)
    found = b.descent(pipeline_of(chosen, loss=loss), objective)
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)
    metrics = b.correct(pipeline_of(chosen, loss=loss)).metrics
    assert 0 < metrics["correction/opsm/masked_share"] < 1


def test_only_the_divergence_to_p_new_asks_for_it() -> None:
    assert pipeline_of({"opsm": {"delta": 1.0}}).needs.new
    assert not pipeline_of({"opsm": {"delta": 1.0, "target": "ref"}}).needs.new
    step = mismatched_step(noise=0.5)
    metrics = pipeline_of({"opsm": {"delta": 0.1}}).correct(step, ONE_RANK).metrics
    rows = [
        (step.logp_inf[r][step.mask[r]] - step.logp_new[r][step.mask[r]]).mean() for r in range(8)
    ]
    assert metrics["correction/opsm/kl_mean"] == pytest.approx(sum(rows).item() / 8, rel=1e-5)
