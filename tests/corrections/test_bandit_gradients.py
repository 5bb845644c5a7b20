"""Expected gradients by enumeration: losses x corrections x aggregations x steps of a phase.

A token-level method is exact when prefix and continuation are the actor's and the token is p_new's;
a sequence-level one when all of the sequence is its target's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from bandit import NEW, REF, Bandit, policy
from correction_helpers import pipeline_of
from torch import Tensor

from rlcore.objectives.specs import ObjectiveSpec
from rlcore.types import StepTensors

WIDE = 1e9  # a cap that never binds
NO_CLIP: dict[str, Any] = {"eps_low": WIDE, "eps_high": WIDE, "kl_ratio_cap": WIDE}
MEANS = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
LOSSES = ["ppo", "cispo", "reinforce"]
CAPS = {"c1": WIDE, "c2": WIDE}
EXACT: list[dict[str, dict[str, Any]]] = [
    {"tis": {"cap": WIDE}},
    {"mis": {"low": 0.0, "high": WIDE}},
    {"veto": {"threshold": 1e-30}, "icepop": {"low": 0.0, "high": WIDE}},
    {"jackpot": {**CAPS, "normaliser": "none"}},
    {"jackpot": {**CAPS, "normaliser": "none", "target": "new"}},
]
PAPER: list[dict[str, dict[str, Any]]] = [
    {"jackpot": {**CAPS, "target": target, "alpha_hat": alpha_hat, "normaliser": "paper"}}
    for target in ("ref", "new")
    for alpha_hat in ("bernoulli", "expected")
]


def names(chosen: dict[str, dict[str, Any]]) -> str:
    return "+".join(f"{n}:{','.join(map(str, a.values()))}" for n, a in chosen.items())


def bandit(*, later: bool) -> Bandit:
    """The first step of a phase, where p_new is p_ref, or a later one."""
    return Bandit() if later else Bandit(new=policy(REF))


def close(found: Tensor, expected: Tensor) -> None:
    assert expected.abs().max() > 0.01
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("later", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("chosen", EXACT, ids=names)
def test_token_weights_lead_to_p_new_under_every_loss(chosen, loss, mean, later) -> None:
    b = bandit(later=later)
    objective = ObjectiveSpec(loss=loss, aggregation=mean, **NO_CLIP)
    found = b.descent(pipeline_of(chosen, loss=loss, aggregation=mean), objective)
    close(found, b.reference(b.inf, b.new, b.inf))


@pytest.mark.parametrize("later", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("chosen", PAPER, ids=names)
def test_the_paper_s_jackpot_is_exact_over_the_tokens_kept(chosen, loss, later) -> None:
    b = bandit(later=later)
    objective = ObjectiveSpec(loss=loss, **NO_CLIP)
    close(b.descent(pipeline_of(chosen, loss=loss), objective), b.reference(b.inf, b.new, b.inf))


def test_the_clip_switched_off_leaves_the_whole_ratio_to_the_weights() -> None:
    b = bandit(later=True)
    for chosen in (
        {"tis": {"cap": WIDE, "adjusted": True}},
        {"jackpot": {**CAPS, "target": "new", "short_circuit": True}},
    ):
        found = b.descent(pipeline_of(chosen), ObjectiveSpec(eps_low=0.01, eps_high=0.01))
        close(found, b.reference(b.inf, b.new, b.inf))


@pytest.mark.parametrize("level", ["tis", "mis"])
def test_sequence_weights_lead_the_whole_sequence(level: str) -> None:
    settings = {"cap": WIDE} if level == "tis" else {"low": 0.0, "high": WIDE}
    chosen = {level: {"level": "sequence", **settings}}
    b = bandit(later=True)
    anchored = ObjectiveSpec(loss="reinforce", **NO_CLIP)
    found = b.descent(pipeline_of(chosen, loss="reinforce"), anchored)
    close(found, b.reference(b.new, b.new, b.new))
    # PPO's ratio is of the token alone: the sequence around it is p_ref's
    found = b.descent(pipeline_of(chosen), ObjectiveSpec(**NO_CLIP))
    close(found, b.reference(b.ref, b.new, b.ref))


def test_a_loss_without_the_ratio_would_have_been_wrong_with_weights_to_p_ref() -> None:
    """Guards the tests above: what was built before, on the same bandit."""
    b = bandit(later=True)
    stages = pipeline_of({"tis": {"cap": WIDE}}, loss="ppo")
    found = b.descent(stages, ObjectiveSpec(loss="reinforce", **NO_CLIP))
    assert (found - b.reference(b.inf, b.new, b.inf)).abs().max() > 0.01


@pytest.mark.parametrize("target", ["ref", "new"])
def test_z_shrinks_a_sum_over_a_constant_and_auto_leaves_it_out(target: str) -> None:
    b = bandit(later=True)
    true = b.reference(b.inf, b.new, b.inf)
    z = torch.minimum(b.inf[0], REF if target == "ref" else NEW).sum().item()
    counted = 1.0 - (1.0 - z) ** 2  # sequences with a token left, which the mean is over
    for normaliser, share in (("paper", z / counted), ("auto", 1.0)):
        chosen = {"jackpot": {**CAPS, "target": target, "normaliser": normaliser}}
        constant = {"aggregation": "seq-mean-token-sum-norm"}
        found = b.descent(pipeline_of(chosen, **constant), ObjectiveSpec(**constant, **NO_CLIP))
        close(found, share * true)


def test_a_mean_over_the_tokens_kept_of_each_sequence_is_biased_and_auto_leaves_z_out() -> None:
    b = bandit(later=True)
    true = b.reference(b.inf, b.new, b.inf)
    for normaliser, low, high in (("paper", 0.2, 0.3), ("auto", 0.0, 1e-6)):
        chosen = {"jackpot": {**CAPS, "normaliser": normaliser}}
        mean = {"aggregation": "seq-mean-token-mean"}
        found = b.descent(pipeline_of(chosen, **mean), ObjectiveSpec(**mean, **NO_CLIP))
        assert low <= (found - true).norm() / true.norm() <= high


def test_states_of_different_acceptance_count_alike_without_z_and_by_it_with_z() -> None:
    def mixed(state: Tensor) -> Tensor:
        table = policy(state)
        table[1] = torch.tensor([0.5, 0.25, 0.25])  # matched after token 0: nothing is rejected
        return table

    b = Bandit(ref=mixed(REF), new=mixed(NEW), inf=mixed(torch.tensor([0.5, 0.25, 0.25])))
    true = b.reference(b.inf, b.new, b.inf)
    objective = ObjectiveSpec(**NO_CLIP)
    free = b.descent(pipeline_of({"jackpot": {**CAPS, "normaliser": "none"}}), objective)
    close(free, true)
    paper = b.descent(pipeline_of({"jackpot": {**CAPS, "normaliser": "paper"}}), objective)
    assert (paper - true).abs().max() > 1e-3


@pytest.mark.parametrize("later", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("loss", ["ppo", "reinforce"])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("chosen", [{}, *EXACT, *PAPER], ids=lambda c: names(c) or "none")
def test_the_kl_term_descends_its_kl_whatever_corrects_the_policy(
    chosen, kind, loss, later
) -> None:
    b = bandit(later=later)
    objective = ObjectiveSpec(loss=loss, kl_estimator=kind, **NO_CLIP)
    close(
        b.kl_descent(pipeline_of(chosen, loss=loss), objective),
        b.kl_reference(forward=kind == "k3"),
    )


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_a_token_of_weight_zero_or_off_the_mask_has_no_kl(kind) -> None:
    b = bandit(later=True)
    pipeline = pipeline_of({"mis": {"low": 0.9, "high": 1.1}})  # token 2 alone keeps its weight
    corrected, step = b.correct(pipeline), b.step()
    weight = pipeline.penalty_weight(corrected, step.logp_new, step.logp_ref, step.logp_inf, WIDE)
    assert torch.equal(weight == 0, corrected.weight == 0) and (weight == 0).any()
    vetoed = pipeline_of({"veto": {"threshold": 0.9}})
    corrected = b.correct(vetoed)
    weight = vetoed.penalty_weight(corrected, step.logp_new, step.logp_ref, step.logp_inf, WIDE)
    assert torch.equal(weight == 0, ~corrected.mask) and not corrected.mask.all()


@dataclass
class Pruned(Bandit):
    """The learner's safe set leaves out token 0 at the start: p_ref and p_new are over the rest."""

    def __post_init__(self) -> None:
        for table in (self.ref, self.new):
            table[0, 0] = 1e-30
            table[0] /= table[0].sum()
        super().__post_init__()

    def step(self) -> StepTensors:
        step = super().step()
        step.ref_inside = step.new_inside = torch.ones_like(step.mask)
        step.ref_inside[:, 0] = self.tokens[:, 0] != 0
        step.coverage = torch.ones(step.mask.shape)
        return step


@pytest.mark.parametrize("zero", ["token", "trajectory"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_dvp_takes_out_a_token_or_its_trajectory_exactly(zero: str, level: str) -> None:
    """`trajectory` is exact with weights per sequence, `token` with weights per token."""
    b = Pruned()
    chosen = {"dvp": {"zero": zero}, "tis": {"cap": WIDE, "level": level}}
    found = b.descent(pipeline_of(chosen, loss="reinforce"), ObjectiveSpec(loss="reinforce"))
    if level == "sequence":
        close(found, b.reference(b.new, b.new, b.new))
        return
    true = b.reference(b.inf, b.new, b.inf)
    if zero == "token":
        close(found, true)
        return
    logp = b.logits.log_softmax(-1)
    lost = (b.inf[0, 0] * b.new[1] * b.reward[0] * logp[1]).sum() / 2  # what follows token 0
    close(found, true - torch.autograd.grad(lost, b.logits)[0])
