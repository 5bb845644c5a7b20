"""A rank's step on a plain torch engine: what the loss is made of, and which passes lead to it."""

from typing import Any

import pytest
import torch
from learner_helpers import make_groups, small_model

from rlcore.corrections import build
from rlcore.corrections.reduction import ONE_RANK
from rlcore.learner.batch import StepBatch, build_batch
from rlcore.learner.head import HeadSpec
from rlcore.learner.loss import Objective
from rlcore.learner.packing import pack
from rlcore.learner.policy import FrozenPolicy, Policy, load_causal_lm
from rlcore.learner.update import Update
from rlcore.types import Group, TokenScores

CPU = torch.device("cpu")


class PlainEngine:
    """ZeroEngine's verbs of a step on one process, counting forward passes."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.forwards = policy, 0

    def forward(self, mb: Any, ids: Any, spec: HeadSpec) -> TokenScores:
        return self.forward_with_kl(mb, ids, spec, None)[0]

    def forward_with_kl(self, mb: Any, ids: Any, spec: HeadSpec, base: Any) -> tuple[TokenScores, Any]:
        self.forwards += 1
        kl, *scores = self.policy(mb, ids, spec, base)
        return TokenScores(*scores), kl

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        loss.backward()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("model"))


def _policy(model: str, noise: float = 0.0) -> Policy:
    """The small model with noise on its head, which makes its distributions far from flat."""
    policy = Policy(load_causal_lm(model, "float32", "sdpa"))
    with torch.no_grad():
        policy.head.weight.add_(
            noise * torch.randn(policy.head.weight.shape, generator=torch.Generator().manual_seed(1))
        )
    return policy


def _update(model: str, corrections: dict[str, Any], **over: Any) -> Update:
    pipeline = build(corrections, 5)
    needs = pipeline.needs
    kl = {"kl_coef": over.pop("kl_coef", 0.0), "kl_estimator": over.pop("kl_estimator", "k3")}
    settings: dict[str, Any] = {
        "engine": PlainEngine(_policy(model, 0.05)),
        "frozen": FrozenPolicy(_policy(model, -0.05)) if kl["kl_coef"] else None,
        "pipeline": pipeline,
        "objective": Objective("ppo", 0.2, 0.2, needs.short_circuit, "token-mean", entropy_coef=0.0, **kl),
        "spec": HeadSpec(safe_set_rho=needs.safe_set_rho),
        "topk": 4,
        "reduce": ONE_RANK,
        "advantage": "group_mean",
        "max_response_len": 10,
        "overlong": (0, 1.0),
        "ref_pass": "auto",
    }
    return Update(**(settings | over))


def _batch(groups: list[Group], micro_batch_tokens: int = 10_000) -> StepBatch:
    batch = build_batch(groups, with_topk=True, device=CPU)
    batch.micro = pack(batch.tokens, micro_batch_tokens, "sorted")
    return batch


def _gradients(update: Update) -> list[torch.Tensor]:
    return [p.grad.clone() for p in update.engine.policy.parameters() if p.grad is not None]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_leaves_out_tokens_outside_either_policy_s_safe_set(model, estimator):
    update = _update(model, {"dvp": {"rho": 0.02}}, kl_coef=1.0, kl_estimator=estimator)
    groups = make_groups(6)
    for g in groups:
        for t in g.trajectories:
            t.reward = 0.0  # the KL alone
    batch = _batch(groups)
    update.prepare([batch])
    sums, kept, _ = update.run(batch, 0, first=True)
    inside_new, inside_base, on = batch.ref.inside, batch.base.inside, batch.sent.mask
    assert (on & ~inside_new & inside_base).any() and (on & inside_new & ~inside_base).any()
    both = on & inside_new & inside_base
    d = (batch.base.logp - batch.ref.logp)[both].double()
    expected = {"k1": -d, "k2": d * d / 2, "k3": torch.expm1(d) - d}[estimator].sum() / kept
    assert float(sums._values["loss/kl"]) == pytest.approx(float(expected), rel=1e-5)
    assert max(float(g.abs().max()) for g in _gradients(update)) < 10.0


def test_rapid_takes_its_advantages_of_the_rewards_shaped_for_length(model):
    def gradients(buffer: int, rewards: Any) -> list[torch.Tensor]:
        update = _update(model, {"rapid": {}}, overlong=(buffer, 0.5))
        groups = make_groups(4)
        for g in groups:
            for t in g.trajectories:
                t.reward = float(rewards(t))
        batch = _batch(groups)
        update.prepare([batch])
        update.run(batch, 0, first=True)
        return _gradients(update)

    shaped = gradients(5, lambda t: t.reward)
    by_hand = gradients(0, lambda t: t.reward - 0.5 * min(max((len(t.response_ids) - 5) / 5, 0.0), 1.0))
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(shaped, by_hand))
    plain = gradients(0, lambda t: t.reward)
    assert not all(torch.allclose(a, b, atol=1e-4) for a, b in zip(shaped, plain))


def test_a_micro_batch_is_corrected_without_measuring_it(model, monkeypatch):
    update = _update(model, {"tis": {}})
    batch = _batch(make_groups(4), micro_batch_tokens=40)
    measured = []
    correct = update.pipeline.correct

    def spy(step: Any, reduce: Any, *, measure: bool = True) -> Any:
        measured.append(measure)
        return correct(step, reduce, measure=measure)

    monkeypatch.setattr(update.pipeline, "correct", spy)
    update.prepare([batch])
    metrics = update.run(batch, 0, first=True)[2]
    assert measured == [False] * len(batch.micro) + [True] and len(batch.micro) > 1
    assert "mismatch/kl_k3" in metrics
