"""Truncated sampling: the learner conditions on the sets that sampling kept, and the expected
gradient is then that of the conditioned policy, by enumeration of the learner's own update."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tabular import TabularEngine

from rlcore.corrections.centre import CentreSpec
from rlcore.corrections.numerics import ONE_RANK
from rlcore.corrections.pipeline import build
from rlcore.corrections.tis import TisSpec
from rlcore.errors import UserError
from rlcore.learner.batch import build_batch
from rlcore.learner.packing import pack
from rlcore.learner.specs import LearnerJob, LearnerSpec
from rlcore.learner.update import Update
from rlcore.objectives.protocols import Advantage
from rlcore.objectives.specs import ObjectiveSpec
from rlcore.testing.records import make_group, make_sampling, make_trajectory

V, DRAWS = 5, 8
# token -> eighths, by state: what is not named was cut off
KEPT = [{0: 4, 3: 4}, {1: 2, 2: 5, 4: 1}, {4: 8}, {0: 1, 1: 1, 2: 3, 3: 3}]
STATES = range(V, V + len(KEPT))  # tokens that are prompts, and rows of a policy's table
REWARD = torch.linspace(-1.0, 2.0, len(KEPT) * V, dtype=torch.float64).view(-1, V).roll(3, 1)


class Given(Advantage):
    """The reward itself."""

    def __call__(self, rewards):
        return rewards.values


def policy(seed):
    """[V + states, V] logits."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(V + len(KEPT), V, dtype=torch.float64, generator=generator)


def groups(k=4):
    """Each state's tokens as often as the actor draws them: batch means are expectations."""
    made = []
    for g, (state, kept) in enumerate(zip(STATES, KEPT)):
        ids = sorted(kept, key=lambda token: -kept[token])[:k]
        logp = np.log([kept[token] / DRAWS for token in ids]).astype(np.float32)
        ids += [-1] * (k - len(ids))
        logp = np.concatenate([logp, np.full(k - len(logp), -np.inf, np.float32)])
        drawn = [token for token, eighths in kept.items() for _ in range(eighths)]
        samples = [
            make_trajectory(
                g,
                i,
                turns=[([state], [token])],
                logp_inf=np.log([kept[token] / DRAWS]).astype(np.float32),
                topk_ids=np.array([ids], np.int32),
                topk_logp=logp[None],
            )
            for i, token in enumerate(drawn)
        ]
        made.append(make_group(samples, [float(REWARD[g, token]) for token in drawn]))
    return made


def updated(ref, new, *, later, k=4, corrections=None):
    """What the learner's step ascends; `later`: the second step of its phase, at p_new."""
    objective = ObjectiveSpec(
        advantage=f"{__name__}:Given",
        aggregation="seq-mean-token-sum-norm",
        eps_low=0.999999,
        eps_high=1e9,
    )
    job = LearnerJob(
        model_path="",
        learner=LearnerSpec(),
        objective=objective,
        corrections=corrections or {"tis": TisSpec(cap=1e9)},
        sampling=make_sampling(max_new_tokens=1, logprobs_k=k, top_p=0.9),
        total_steps=2,
        run_seed=0,
        pad_id=0,
    )
    engine = TabularEngine(ref)
    update = Update(job, engine, None, build(job.corrections, 0, objective), ONE_RANK)
    assert update.head.kept_sets
    device = torch.device("cpu")
    batch = build_batch(groups(k), with_topk=True, device=device, kept_sets=True)
    batch.micro = pack(batch.episodes, 20, "sorted")
    update.prepare([batch], first=True, steps=1 + later)
    if later:
        engine.move(new)
    metrics = update.run(batch, int(later), first=not later).metrics
    return -engine.gradient(), batch.metrics | metrics


@pytest.mark.parametrize("later", [False, True])
def test_the_expected_gradient_is_that_of_the_conditioned_policy(later):
    ref, new = policy(0), policy(1)
    found, metrics = updated(ref, new, later=later)
    at = (new if later else ref).clone().requires_grad_()
    value = torch.zeros((), dtype=torch.float64)
    for g, (state, kept) in enumerate(zip(STATES, KEPT)):
        tokens = sorted(kept)
        value = value + (at[state, tokens].softmax(-1) * REWARD[g, tokens]).sum() / len(KEPT)
    wanted = torch.autograd.grad(value, at)[0]
    assert wanted.abs().max() > 0.02
    torch.testing.assert_close(found, wanted, atol=1e-7, rtol=1e-6)
    assert metrics["mismatch/unstored_share"] == 0
    covered = [ref[s].softmax(-1)[sorted(kept)].sum() for s, kept in zip(STATES, KEPT)]
    assert metrics["mismatch/coverage_mean"] == pytest.approx(float(sum(covered)) / len(KEPT))


def test_a_centred_gradient_is_the_actor_s_own_on_its_sets():
    """Both policies are conditioned on the set, and no mass is left outside it."""
    ref = policy(0)
    found, _ = updated(ref, ref, later=False, corrections={"centre": CentreSpec()})
    wanted = torch.zeros_like(ref)
    for g, (state, kept) in enumerate(zip(STATES, KEPT)):
        tokens = sorted(kept)
        q = torch.tensor([kept[t] / DRAWS for t in tokens], dtype=torch.float64)
        wanted[state, tokens] = q * (REWARD[g, tokens] - (q * REWARD[g, tokens]).sum()) / len(KEPT)
    torch.testing.assert_close(found, wanted, atol=1e-7, rtol=1e-6)


def test_a_set_that_is_not_stored_whole_is_refused_with_its_share():
    with pytest.raises(UserError, match=r"logprobs_k=2 .*: at 50\.0% of the tokens"):
        updated(policy(0), policy(1), later=False, k=2)


def test_single_tokens_without_their_set_leave_the_loss():
    whole = groups()
    (episode,) = whole[0].episodes[:1]
    record = episode.parts[0]
    cut = replace(record, topk_ids=record.topk_ids[:, :1], topk_logp=record.topk_logp[:, :1])
    episode.parts[0] = cut
    batch = build_batch(whole, with_topk=True, device=torch.device("cpu"), kept_sets=True)
    assert batch.unstored == 1
    assert torch.isnan(batch.sent.logp_inf).nonzero().tolist() == [[0, 0]]
    assert (batch.sent.topk_ids_inf[0, 0] == -1).all()
