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
    terms = {"kl_coef": 0.0, "kl_estimator": "k3", "entropy_coef": 0.0}
    terms |= {name: over.pop(name) for name in terms if name in over}
    settings: dict[str, Any] = {
        "engine": PlainEngine(_policy(model, 0.05)),
        "frozen": FrozenPolicy(_policy(model, -0.05)) if terms["kl_coef"] else None,
        "pipeline": pipeline,
        "objective": Objective("ppo", 0.2, 0.2, needs.short_circuit, "token-mean", **terms),
        "spec": HeadSpec(safe_set_rho=needs.safe_set_rho, entropy_grad=terms["entropy_coef"] > 0),
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
    update.prepare([batch], first=True)
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
        update.prepare([batch], first=True)
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
    update.prepare([batch], first=True)
    metrics = update.run(batch, 0, first=True)[2]
    assert measured == [False] * len(batch.micro) + [True] and len(batch.micro) > 1
    assert "mismatch/kl_k3" in metrics


def _disturb(update: Update) -> None:
    """What an optimizer step does, for the purpose: the policy is another one now."""
    with torch.no_grad():
        update.engine.policy.head.weight.mul_(1.1)


WHOLE_BATCH = {
    "none": {},
    "tis+veto": {"tis": {}, "veto": {"threshold": 0.01}},
    "tis.adjusted": {"tis": {"adjusted": True}},
    "ais": {"ais": {}},
    "rapid": {"rapid": {}},
    "dvp+mis+veto": {"dvp": {"rho": 0.02}, "mis": {}, "veto": {}},
    "jackpot": {"jackpot": {}},
    "jackpot new": {"jackpot": {"target": "new", "tail": "none"}},
}


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("name", WHOLE_BATCH)
def test_a_single_micro_batch_is_scored_and_differentiated_by_one_pass(model, name, later):
    results = []
    for ref_pass in ("auto", "always"):
        update = _update(model, WHOLE_BATCH[name], ref_pass=ref_pass, entropy_coef=0.01)
        batch = _batch(make_groups(5))
        update.prepare([batch], first=not later)
        if later:
            _disturb(update)
        _, kept, metrics = update.run(batch, 0, first=not later)
        results.append((_gradients(update), kept, metrics, update.engine.forwards, batch))
    (gradients, kept, metrics, passes, batch), (two, its_kept, its_metrics, its_passes, its_batch) = results
    assert passes == 1 + later and its_passes == 2 + (later and update.pipeline.needs.new)
    assert kept == its_kept > 0 and metrics == its_metrics
    assert all(torch.equal(a, b) for a, b in zip(gradients, two, strict=True))
    assert max(float(g.abs().max()) for g in gradients) > 0
    assert torch.equal(batch.ref.logp, its_batch.ref.logp)


def test_the_last_step_of_a_resumed_phase_keeps_the_p_ref_that_the_phase_began_with(model):
    update = _update(model, {"tis": {}})
    batch = _batch(make_groups(4))
    update.prepare([batch], first=False)
    assert update.engine.forwards == 1
    logp = batch.ref.logp
    _disturb(update)
    sums, kept, _ = update.run(batch, 1, first=False)
    assert batch.ref.logp is logp
    assert abs(float(sums._values["policy/ratio"]) / kept - 1.0) > 1e-4


@pytest.mark.parametrize("corrections", [{}, {"tis": {}}, {"jackpot": {"target": "new"}}])
def test_every_run_says_how_far_the_stored_top_k_reaches(model, corrections):
    rows = []
    for micro_batch_tokens, ref_pass in ((10_000, "auto"), (40, "auto"), (40, "always")):
        for later in (False, True):
            update = _update(model, corrections, ref_pass=ref_pass)
            batch = _batch(make_groups(4), micro_batch_tokens)
            update.prepare([batch], first=not later)
            rows.append(update.run(batch, 0, first=not later)[2])
    for row in rows:
        for key in ("z_approx", "kappa", "unknown_share"):
            assert row[f"mismatch/{key}"] == pytest.approx(rows[0][f"mismatch/{key}"], rel=1e-4)
    assert 0 < rows[0]["mismatch/unknown_share"] < 1
