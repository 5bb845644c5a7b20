"""A critic on plain torch engines: its values, its targets, its step, and the policy's gradient."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from learner_helpers import (
    SHARED,
    PlainEngine,
    make_batch,
    make_groups,
    make_job,
    sharp_policy,
    small_model,
)
from tabular import TabularEngine

from rlcore.corrections.numerics import ONE_RANK
from rlcore.corrections.pipeline import build
from rlcore.learner.batch import StepBatch, build_batch
from rlcore.learner.packing import pack
from rlcore.learner.parts.critic import Critic, ValueModel, freeze_trunk
from rlcore.learner.policy import load_causal_lm
from rlcore.learner.probes import share_prefixes
from rlcore.learner.specs import CriticSpec
from rlcore.learner.update import Update
from rlcore.objectives.specs import ValueSpec
from rlcore.objectives.values import estimates
from rlcore.testing.records import make_group, make_trajectory

OPEN = 1e6
F = torch.float64


class ValueEngine(PlainEngine):
    """Gradients of plain torch, and no optimizer."""

    def outputs(self, mb: Any) -> torch.Tensor:
        found: torch.Tensor = self.policy(mb, None, None)
        return found


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("model"))


def _values(model: str, *, head: bool = False) -> ValueEngine:
    lm = load_causal_lm(model, "float32", "sdpa")
    assert share_prefixes(lm) is None
    engine = ValueEngine(ValueModel(lm))
    with torch.no_grad():
        weight = lm.value_head.weight
        weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(4)))
    if head:
        freeze_trunk(lm)
    return engine


def _update(model: str, values: Any, spec: CriticSpec, **settings: Any) -> tuple[Update, Critic]:
    job = make_job(model, **({"advantage": "gae", "credit": "token"} | settings))
    engine = PlainEngine(sharp_policy(model))
    assert share_prefixes(engine.policy.lm) is None
    critic = Critic(spec, values, engine, ONE_RANK)
    pipeline = build(job.corrections, job.run_seed, job.objective)
    return Update(job, engine, None, pipeline, ONE_RANK, critic=critic), critic


def _trained(model: str, batch: StepBatch, spec: CriticSpec, **settings: Any):
    """(Gradient of the policy, of the critic, the batch's estimates, metrics) of one step."""
    values = _values(model, head=spec.kind == "value_head")
    update, critic = _update(model, values, spec, **settings)
    update.prepare([batch], first=True)
    gradient = update.run(batch, 0, first=True)
    row = critic.step(batch, 0, gradient.advantages)
    return update.engine.gradients(), values.gradients(), batch.estimates, row, gradient


def _close(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], atol=2e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize(
    ("tokens", "layout", "costs"),
    [(20, "sorted", None), (40, "sorted", None), (30, "sorted", SHARED)],
)
def test_neither_values_nor_gradients_depend_on_micro_batches(model, tokens, layout, costs) -> None:
    spec = CriticSpec(kind="model", lam=0.8, clip=0.3)
    whole = _trained(model, make_batch(make_groups(4)), spec, corrections={"tis": {}})
    batch = make_batch(make_groups(4), tokens, layout, costs)
    assert len(batch.micro) > 1
    parts = _trained(model, batch, spec, corrections={"tis": {}})
    _close(whole[0], parts[0])
    _close(whole[1], parts[1])
    torch.testing.assert_close(whole[2].targets, parts[2].targets, atol=1e-5, rtol=1e-4)
    assert whole[3]["critic/explained_variance"] == pytest.approx(
        parts[3]["critic/explained_variance"], abs=1e-4
    )


def test_the_step_is_that_of_the_written_out_loss(model) -> None:
    """Mean over states of half the squared error, and targets of the recursion on the rewards."""
    groups = make_groups(3)
    batch = make_batch(groups)
    spec = CriticSpec(kind="model", traces="gae", lam=0.7, discount=0.9, whiten=False)
    _, gradient, found, row, step = _trained(model, batch, spec)
    values = _values(model)
    (mb,) = batch.micro
    mask = batch.sent.mask
    dense = torch.zeros(mask.shape)
    dense[mb.episodes] = mb.dense(values.outputs(mb), mask.shape[1])
    rewards = torch.zeros(mask.shape, dtype=F)
    last = mask.sum(1) - 1
    rewards[torch.arange(len(last)), last] = batch.sent.rewards.double()
    zero = torch.zeros_like(rewards)
    count = mask.sum(1)
    by_hand = estimates(rewards, dense.detach().double() * mask, zero, count, count < 0, spec)
    torch.testing.assert_close(found.targets, by_hand.targets)
    torch.testing.assert_close(step.advantages, (by_hand.advantages * mask).float())
    loss = (0.5 * (dense - by_hand.targets.float()).square() * mask).sum() / mask.sum()
    loss.backward()
    assert row["loss/value"] == pytest.approx(float(loss.detach()), rel=1e-5)
    _close(gradient, values.gradients())


def test_a_value_head_is_on_the_policys_own_tensors_and_trains_alone(model) -> None:
    batch = make_batch(make_groups(3))
    values = _values(model, head=True)
    update, critic = _update(model, values, CriticSpec(kind="value_head"))
    trunk = values.names["model.layers.0.mlp.up_proj.weight"]
    assert trunk.data_ptr() == update.engine.names["model.layers.0.mlp.up_proj.weight"].data_ptr()
    update.prepare([batch], first=True)
    critic.step(batch, 0, update.run(batch, 0, first=True).advantages)
    assert set(values.gradients()) == {"value_head.weight", "value_head.bias"}


def test_while_the_critic_warms_up_the_policy_has_no_gradient_and_no_step(model) -> None:
    def of(warmup: int):
        spec = CriticSpec(kind="model", warmup_steps=warmup)
        policy, values, _, _, step = _trained(model, make_batch(make_groups(3)), spec)
        return policy, values, step.step_scale

    policy, values, scale = of(1)
    assert scale == 0.0 and all(not g.any() for g in policy.values())
    others, same, full = of(0)
    assert full == 1.0 and any(g.any() for g in others.values())
    _close(values, same)


def test_whitened_advantages_have_mean_0_and_deviation_1_over_the_tokens(model) -> None:
    batch = make_batch(make_groups(4))
    advantages = _trained(model, batch, CriticSpec(kind="model"))[4].advantages[batch.sent.mask]
    assert float(advantages.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(advantages.double().std()) == pytest.approx(1.0, abs=1e-4)


def test_an_answer_that_was_cut_off_teaches_its_last_state_nothing(model) -> None:
    groups = make_groups(2)
    for episode in groups[0].episodes:
        episode.parts[0].finish_reason = "length"
    batch = make_batch(groups)
    known = _trained(model, batch, CriticSpec(kind="model", bootstrap=True))[2].known
    assert (batch.sent.mask.sum(1) - known.sum(1)).tolist() == [1, 1, 1, 0, 0, 0]


@pytest.mark.parametrize("credit", ["token", "turn"])
def test_whitening_is_over_the_tokens_with_a_target(model, credit) -> None:
    """A cut answer's last state has none: its tokens have advantage 0, and move no other one."""
    groups = make_groups(4)
    for episode in groups[0].episodes:
        episode.parts[-1].finish_reason = "length"
    batch = make_batch(groups)
    spec = CriticSpec(kind="model", bootstrap=True)
    _, _, found, row, step = _trained(model, batch, spec, credit=credit)
    known = batch.states.spread(found.known, batch.sent.mask).bool()
    unknown = batch.sent.mask & ~known
    assert unknown.any() and (step.advantages[~known] == 0).all()
    having = step.advantages[known].double()
    assert float(having.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(having.std()) == pytest.approx(1.0, abs=1e-4)
    assert row["critic/untargeted_share"] == pytest.approx(
        float(unknown.sum() / batch.sent.mask.sum())
    )
    assert row["critic/advantage_rms"] == pytest.approx(1.0, rel=0.1)


# ----- the policy's gradient, enumerated -----

V, PROMPT = 3, 3
LENGTH = 2


class _TableOfValues(TabularEngine):
    """Any value for each state: a prompt alone, and a prompt with one token."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__(torch.zeros(V + 1, V))
        self._table = table  # [V + 1], by the last token

    def outputs(self, mb: Any) -> torch.Tensor:
        return self._table[mb.input_ids.flatten()[mb.predict]]


def _table(seed: int) -> torch.Tensor:
    return torch.randn(V + 1, V, generator=torch.Generator().manual_seed(seed), dtype=F)


def _expected(inf: torch.Tensor, ref: torch.Tensor, reward: Any, spec: CriticSpec) -> torch.Tensor:
    """The update's expected gradient [V + 1, V] over all sequences of the actor, p_new = p_ref."""
    total = torch.zeros(V + 1, V, dtype=F)
    values = torch.randn(V + 1, generator=torch.Generator().manual_seed(9), dtype=F)
    for a, b in product(range(V), repeat=LENGTH):
        logp = torch.stack([inf[PROMPT].log_softmax(0)[a], inf[a].log_softmax(0)[b]])
        record = make_trajectory(0, 0, turns=[([PROMPT], [a, b])], logp_inf=logp.float().numpy())
        group = make_group([record], [float(reward[a, b])], admitted_version=0, arrival_version=0)
        batch = build_batch([group], with_topk=False, device=torch.device("cpu"))
        batch.sent.logp_inf = logp[None]
        batch.micro = pack(batch.episodes, 100, "sorted")
        job = make_job(
            "",
            advantage="gae",
            credit="token",
            corrections={"tis": {"cap": OPEN}},
            aggregation="seq-mean-token-sum-norm",
            temperature=1.0,
        )
        engine = TabularEngine(ref)
        pipeline = build(job.corrections, 0, job.objective)
        critic = Critic(spec, _TableOfValues(values), engine, ONE_RANK)
        update = Update(job, engine, None, pipeline, ONE_RANK, critic=critic)
        update.prepare([batch], first=True)
        update.run(batch, 0, first=True)
        total -= logp.sum().exp() * engine.gradient() * job.sampling.max_new_tokens
    return total


def _exact(inf: torch.Tensor, ref: torch.Tensor, reward: Any, after: torch.Tensor) -> torch.Tensor:
    """Prefixes as the actor draws them, the token as the learner does, by its action value when
    `after` [V + 1, V] continues."""
    z = ref.clone().requires_grad_()
    p_inf, p, logp = inf.softmax(-1), after.softmax(-1), z.log_softmax(-1)
    own = ref.softmax(-1)
    q = (p[:V] * reward).sum(1)  # of the first token
    objective = (own[PROMPT] * q * logp[PROMPT]).sum()
    objective = objective + (p_inf[PROMPT, :, None] * own[:V] * reward * logp[:V]).sum()
    found: torch.Tensor = torch.autograd.grad(objective, z)[0]
    return found


def test_the_corrected_gradient_is_that_of_the_learners_own_action_values() -> None:
    inf, ref = _table(0), _table(1)
    reward = torch.randn(V, V, generator=torch.Generator().manual_seed(2), dtype=F)
    open_traces = {"lam": 1.0, "rho_cap": OPEN, "c_cap": OPEN, "whiten": False}
    found = _expected(inf, ref, reward, CriticSpec(kind="model", **open_traces))
    torch.testing.assert_close(found, _exact(inf, ref, reward, ref), atol=1e-6, rtol=1e-5)
    # without traces, the token is valued as the actor goes on from it
    plain = CriticSpec(kind="model", traces="gae", lam=1.0, whiten=False)
    found = _expected(inf, ref, reward, plain)
    torch.testing.assert_close(found, _exact(inf, ref, reward, inf), atol=1e-6, rtol=1e-5)
    assert float((_exact(inf, ref, reward, ref) - _exact(inf, ref, reward, inf)).abs().max()) > 0.05


def test_the_defaults_are_identities_on_policy() -> None:
    """With p_ref = p_inf caps of 1 never bind, to the bit."""
    ref = _table(1)
    reward = torch.randn(V, V, generator=torch.Generator().manual_seed(2), dtype=F)
    usual = {"lam": ValueSpec().lam, "whiten": False}
    one = _expected(ref, ref, reward, CriticSpec(kind="model", **usual))
    other = _expected(ref, ref, reward, CriticSpec(kind="model", traces="gae", **usual))
    torch.testing.assert_close(one, other, atol=1e-12, rtol=0)
