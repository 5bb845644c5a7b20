"""The learner on a masked-diffusion policy: it replays the very estimate of its actors, in every
layout, with the gradient of plain autograd; matched weights make every correction the identity."""

import numpy as np
import pytest
import torch
from learner_helpers import PlainEngine, make_job
from masked_models import drawn, masked_engine, masked_requests, sharp_folder

from rlcore.corrections.numerics import ONE_RANK
from rlcore.corrections.pipeline import build
from rlcore.extras.diffusion.estimates import Estimate, MaskedEstimator, MaskedSequence
from rlcore.learner.batch import build_batch
from rlcore.learner.packing import pack
from rlcore.learner.policy import FrozenPolicy, Policy, load_causal_lm
from rlcore.learner.update import Update
from rlcore.models.specs import DiffusionSpec
from rlcore.testing.records import make_group

MASK, CPU = 14, torch.device("cpu")
CORRECTIONS = [{}, {"tis": {}}, {"ais": {}}, {"mis": {}}, {"veto": {}}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return sharp_folder(tmp_path_factory.mktemp("masked"))


@pytest.fixture(scope="module")
def groups(model):
    done = drawn(masked_engine(model), masked_requests(8, temperature=0.8))
    for i, t in enumerate(done):
        t.group_id = i // 4
        t.sample_index = i % 4
    rewards = [0.0, 1.0, 0.5, 0.0]
    return [make_group(done[i : i + 4], rewards) for i in (0, 4)]


def estimator(model):
    return MaskedEstimator(model, DiffusionSpec(prompt_masking=0.4))


def masked_batch(model, groups, tokens=10_000, layout="sorted"):
    batch = build_batch(groups, with_topk=False, device=CPU, read=estimator(model).read)
    batch.micro = pack(batch.episodes, tokens, layout)
    return batch


def masked_update(model, corrections=None, **settings):
    job = make_job(model, corrections=corrections, logprobs_k=0, **settings)
    policies = [Policy(load_causal_lm(model, "float32", "sdpa")) for _ in range(2)]
    pipeline = build(job.corrections, job.run_seed, job.objective)
    frozen = FrozenPolicy(policies[1]) if job.objective.kl_coef else None
    return Update(job, PlainEngine(policies[0]), frozen, pipeline, ONE_RANK)


def gradients(update, batch):
    update.prepare([batch], first=True)
    out = update.run(batch, 0, first=True)
    return update.engine.gradients(), out


@pytest.mark.parametrize(("tokens", "layout"), [(10_000, "sorted"), (40, "sorted"), (60, "packed")])
def test_the_learner_replays_the_estimate_of_its_actors(model, groups, tokens, layout):
    update = masked_update(model)
    batch = masked_batch(model, groups, tokens, layout)
    ref = update.score_ref(batch)
    mask = batch.sent.mask
    assert mask.sum() == sum(g.tokens for g in groups)
    torch.testing.assert_close(ref.logp[mask], batch.sent.logp_inf[mask], atol=2e-5, rtol=0)


@pytest.mark.parametrize("corrections", CORRECTIONS, ids=str)
def test_matched_weights_leave_every_token_at_weight_one(model, groups, corrections):
    plain, _ = gradients(masked_update(model), masked_batch(model, groups))
    found, out = gradients(masked_update(model, corrections), masked_batch(model, groups))
    assert out.metrics["correction/kept_share"] == 1.0
    assert out.metrics["correction/weight_mean"] == pytest.approx(1.0, abs=2e-5)
    assert out.metrics["mismatch/abs_dlogp_max"] < 2e-5
    for name, g in plain.items():
        torch.testing.assert_close(found[name], g, atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize(("tokens", "layout"), [(10_000, "sorted"), (40, "sorted"), (60, "packed")])
def test_the_gradient_is_that_of_the_estimate_in_every_layout(model, groups, tokens, layout):
    settings = {"advantage": "group_mean", "entropy_coef": 0.0}
    found, _ = gradients(
        masked_update(model, **settings), masked_batch(model, groups, tokens, layout)
    )
    lm = load_causal_lm(model, "float32", "sdpa")
    total, loss = sum(g.tokens for g in groups), torch.zeros(())
    for group in groups:
        rewards = [e.score.reward for e in group.episodes]
        for e in group.episodes:
            (t,) = e.parts
            inputs = torch.from_numpy(Estimate.of_record(t).inputs(t.prompt_ids, MASK))[None]
            logp = (lm(inputs).logits[0, len(t.prompt_ids) :] / 0.8).log_softmax(-1)
            chosen = logp[torch.arange(len(t.sampled_ids)), torch.tensor(t.sampled_ids).long()]
            loss = loss - (e.score.reward - np.mean(rewards)) * chosen.sum() / total
    loss.backward()
    for name, p in lm.named_parameters():
        torch.testing.assert_close(found[name], p.grad, atol=1e-5, rtol=1e-3)


def test_kl_to_the_starting_policy_is_of_the_same_estimate(model, groups):
    for estimator in ("k3", "full"):
        _, out = gradients(
            masked_update(model, kl_coef=0.1, kl_estimator=estimator), masked_batch(model, groups)
        )
        assert out.sums.losses(out.sums.over_ranks(ONE_RANK, CPU))["loss/kl"] == pytest.approx(
            0.0, abs=1e-6
        )


def test_the_variance_is_of_the_masks_alone(model, groups):
    update = masked_update(model)

    def scores(sequences):
        out = []
        for mb in pack([(s,) for s in sequences], 1000, "sorted"):
            values = update.engine.forward(mb, None, update.head).logp.detach()
            out += [(int(i), values[mb.row == r].numpy()) for r, i in enumerate(mb.episodes)]
        return [values for _, values in sorted(out, key=lambda pair: pair[0])]

    of = estimator(model)
    same = of.twice(groups)[0]
    assert all(isinstance(s, MaskedSequence) for s in same)
    none = of.metrics(list(zip(scores(same), scores(same))), ONE_RANK)
    assert none == {"estimate/token_variance": 0.0, "estimate/sequence_variance": 0.0}
    one, two = of.twice(groups)
    some = of.metrics(list(zip(scores(one), scores(two))), ONE_RANK)
    assert some["estimate/token_variance"] > 0 and some["estimate/sequence_variance"] > 0
