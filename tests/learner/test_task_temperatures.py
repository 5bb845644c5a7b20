"""Tasks that are sampled at temperatures of their own: log-probs, KL and gradients of each, against
plain forwards."""

import pytest
import torch
from learner_helpers import make_groups, make_update, sharp_policy, small_model

from rlcore.corrections.numerics import ONE_RANK
from rlcore.learner.batch import build_batch
from rlcore.learner.packing import pack

RUN, OWN = 0.8, 0.5  # of the run and of task b


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("model"))


def two_tasks():
    groups = make_groups(4)
    for g in groups[1::2]:
        g.prompt_id = f"b/train/{g.group_id}"
    return groups


def batch_of(groups, budget=10_000):
    sharper = {"b": RUN / OWN}
    batch = build_batch(groups, with_topk=True, device=torch.device("cpu"), sharper=sharper)
    batch.micro = pack(batch.episodes, budget, "sorted")
    return batch


def plain(lm, group, t):
    """[S]: log-probs of a record's sampled tokens at its task's temperature."""
    temperature = OWN if group.prompt_id.startswith("b/") else RUN
    ids = torch.tensor(t.token_ids).long()
    logp = torch.log_softmax(lm(ids[None]).logits[0] / temperature, -1)
    at = torch.tensor(t.sampled).nonzero()[:, 0]
    return logp[at - 1, ids[at]]


def test_every_token_is_scored_at_its_task_s_temperature(model):
    groups = two_tasks()
    batch = batch_of(groups, 40)
    update = make_update(model, temperature=RUN)
    update.prepare([batch], first=False)
    lm, row = sharp_policy(model).lm, 0
    for g in groups:
        for e in g.episodes:
            expected = plain(lm, g, e.parts[0]).detach()
            found = batch.ref.logp[row, : len(expected)]
            torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
            row += 1


def test_the_gradient_is_that_of_each_task_s_own_temperature(model):
    groups = two_tasks()
    update = make_update(model, advantage="group_mean", loss="reinforce", temperature=RUN)
    batch = batch_of(groups, 30)
    update.prepare([batch], first=True)
    update.run(batch, 0, first=True)
    lm, objective = sharp_policy(model).lm, torch.zeros(())
    for g in groups:
        mean = sum(e.score.reward for e in g.episodes) / len(g.episodes)
        for e in g.episodes:
            objective = objective + (e.score.reward - mean) * plain(lm, g, e.parts[0]).sum()
    (-objective / sum(g.tokens for g in groups)).backward()
    ours = update.engine.gradients()
    for name, p in lm.named_parameters():
        torch.testing.assert_close(ours[name], p.grad, atol=3e-6, rtol=1e-4, msg=name)


def test_the_full_kl_is_between_policies_of_that_temperature(model):
    groups = two_tasks()
    settings = {"kl_coef": 1.0, "kl_estimator": "full", "temperature": RUN}
    update = make_update(model, **settings)
    batch = batch_of(groups)
    update.prepare([batch], first=True)
    sums = update.run(batch, 0, first=True).sums.over_ranks(ONE_RANK, torch.device("cpu"))
    policy, frozen, total = sharp_policy(model).lm, sharp_policy(model, -0.05).lm, 0.0
    for g in groups:
        temperature = OWN if g.prompt_id.startswith("b/") else RUN
        for e in g.episodes:
            (t,) = e.parts
            ids = torch.tensor(t.token_ids)[None].long()
            at = torch.tensor(t.sampled).nonzero()[:, 0] - 1
            new, old = (
                torch.log_softmax(lm(ids).logits[0, at].detach() / temperature, -1)
                for lm in (policy, frozen)
            )
            total += float((new.exp() * (new - old)).sum())
    assert sums["loss/kl"] == pytest.approx(total / sum(g.tokens for g in groups), rel=1e-4)


def test_without_temperatures_of_their_own_nothing_is_multiplied(model):
    batch = build_batch(two_tasks(), with_topk=True, device=torch.device("cpu"), sharper={"b": 1.0})
    assert [mb.sharper for mb in pack(batch.episodes, 30, "sorted")] == [None] * len(
        pack(batch.episodes, 30, "sorted")
    )
