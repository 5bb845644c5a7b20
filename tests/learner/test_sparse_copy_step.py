"""A step of DistillSparse's copy on a plain torch engine: its teacher and its clip."""

from types import SimpleNamespace

import pytest
import torch
from learner_helpers import (
    PlainEngine,
    disturb,
    make_batch,
    make_groups,
    make_job,
    make_update,
    sharp_policy,
    small_model,
)

from rlcore.attention.specs import SparseSpec
from rlcore.corrections.numerics import ONE_RANK
from rlcore.learner.lm_head import HeadSpec
from rlcore.learner.lora import add_adapters
from rlcore.learner.parts.sparse_copy import SparseCopy
from rlcore.learner.policy import Policy, load_causal_lm
from rlcore.learner.specs import DistillSpec, LoraSpec

RULE = SparseSpec(block_size=2, blocks=2)
VOCAB = 15


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("model"))


def _copy(model, policy, kl="k3", **settings):
    """A copy whose adapters are not 0 any more, beside `policy`."""
    lm = load_causal_lm(model, "float32", "sdpa", sparse=True)
    lora = LoraSpec(rank=4, alpha=8.0, targets=("q_proj", "v_proj"))
    add_adapters(lm, lora, seed=1, key="learner.distill.lora")
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, p in lm.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1, generator=generator)
    distill = DistillSpec(kl=kl, lora=lora)
    job = make_job(model, sparse=RULE, distill=distill, **settings)
    return SparseCopy(job, distill, PlainEngine(Policy(lm, RULE)), policy, ONE_RANK)


def _run(model, kl, *, later, k=VOCAB, actor_noise=None, **settings):
    """One step of the copy; `later`: the policy has moved since its log-probs were computed.

    `actor_noise`: the actor sampled from the copy itself, up to numerics of this size.
    """
    update = make_update(model, logprobs_k=k, **settings)
    batch = make_batch(make_groups(4, k=k), 60)
    update.prepare([batch, batch], first=True)
    if later:
        disturb(update.engine.policy)
        batch.ref_is_old = True
    copy = _copy(model, update.engine, kl, logprobs_k=k, **settings)
    if actor_noise is not None:
        generator = torch.Generator().manual_seed(3)
        for mb, logp in zip(batch.micro, _scores(copy.engine, batch)):
            noise = actor_noise * torch.randn(logp.shape, generator=generator)
            batch.sent.logp_inf[mb.episodes[mb.row], mb.column] = logp + noise
    before = update.engine.forwards
    metrics = copy.step(batch, 0, update.group_advantages(batch))
    passes = update.engine.forwards - before
    return SimpleNamespace(batch=batch, copy=copy, metrics=metrics, passes=passes)


def _scores(engine, batch):
    """Log-probs of the batch's sampled tokens, one tensor a micro-batch."""
    with torch.no_grad():
        return [engine.forward(mb, None, HeadSpec(0.8, 1024)).logp for mb in batch.micro]


@pytest.mark.parametrize("kl", ["k1", "k3"])
def test_later_in_a_phase_the_sampled_kl_is_to_the_policy_as_it_is_now(model, kl):
    run = _run(model, kl, later=True)
    now = sharp_policy(model)
    old = torch.cat(_scores(PlainEngine(now), run.batch))
    disturb(now)
    sparse = torch.cat(_scores(run.copy.engine, run.batch))
    dense = torch.cat(_scores(PlainEngine(now), run.batch))
    sent = torch.cat([mb.flat(run.batch.sent.logp_inf) for mb in run.batch.micro])
    ratio = (sparse - sent).exp().clamp(max=2.0)

    def estimate(teacher):
        d = teacher - sparse
        return float((ratio * (-d if kl == "k1" else torch.expm1(d) - d)).mean())

    assert run.metrics["loss/distill_kl"] == pytest.approx(estimate(dense), rel=1e-4)
    assert abs(estimate(dense) - estimate(old)) > 1e-3
    assert run.passes == len(run.batch.micro)


@pytest.mark.parametrize("later", [False, True])
def test_topk_over_the_whole_vocabulary_is_the_full_kl_at_every_step_of_a_phase(model, later):
    topk, full = (_run(model, kl, later=later) for kl in ("topk", "full"))
    value = full.metrics["loss/distill_kl"]
    assert topk.metrics["loss/distill_kl"] == pytest.approx(value, rel=1e-4) and value > 1e-4
    mine, theirs = topk.copy.engine.gradients(), full.copy.engine.gradients()
    for name in mine:
        torch.testing.assert_close(mine[name], theirs[name], atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize("kl", ["k1", "k3", "topk"])
def test_the_first_step_of_a_phase_takes_the_log_probs_that_are_there(model, kl):
    assert _run(model, kl, later=False).passes == 0


def test_gspo_s_clip_does_not_bind_on_the_actor_s_numerics(model):
    """The copy's ratio is to the actor, whose own rounding exceeds GSPO's clip of 3e-4."""
    tight = {"eps_low": 3e-4, "eps_high": 4e-4, "advantage": "group_mean"}
    numerics = {"later": False, "actor_noise": 0.01}
    gspo = _run(model, "k3", loss="gspo", **tight, **numerics)
    assert gspo.metrics["distill/clip_share"] == 0.0
    assert 0 < gspo.metrics["distill/actor_abs_dlogp_mean"] < 0.02
    # a clip per token is the run's own, and this one does bind
    ppo = _run(model, "k3", loss="ppo", **tight, **numerics)
    assert ppo.metrics["distill/clip_share"] > 0.2


def test_a_loss_without_a_ratio_still_leads_from_the_actor_to_the_copy(model):
    ppo, reinforce = (
        _run(model, "k3", later=False, advantage="group_mean", loss=loss)
        for loss in ("ppo", "reinforce")
    )
    mine, theirs = ppo.copy.engine.gradients(), reinforce.copy.engine.gradients()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
