"""Advantages of turns and of tokens with every correction and every loss: refused by validation, or
the gradient of the weighted log-probs with the advantages that are computed by hand here."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from learner_helpers import make_batch, make_update, sharp_policy, small_model

from rlcore.config.checks import check
from rlcore.config.compose import load
from rlcore.config.sentences import validate
from rlcore.corrections.numerics import ONE_RANK
from rlcore.corrections.specs import CORRECTIONS
from rlcore.errors import UserError
from rlcore.learner.batch import observed
from rlcore.objectives.specs import LOSSES
from rlcore.registry import load_object
from rlcore.testing.records import make_score, make_trajectory
from rlcore.types import Episode, Group

SHARE, DISCOUNT = 0.75, 0.5
# (observation, sampled) of each turn, and a reward for every sampled token
EPISODES = [
    ([((3, 4, 5), (6, 7, 8))], [(0.25, 0.0, 0.25)]),
    ([((3, 4, 5), (6, 7)), ((9, 10), (8, 6, 4))], [(-1.0, 0.0), (0.5, 0.0, -0.25)]),
    ([((3, 4, 5), (6,)), ((9, 3), (7, 8)), ((5,), (9,))], [(0.0,), (0.5, 0.5), (2.0,)]),
]
REQUIRED = {"opsm": {"delta": 0.02}, "outliers": {"threshold": 0.05}}  # settings without a default


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("model"))


def to_go(rewards):
    out = []
    for reward in reversed(rewards):
        out.append(reward + DISCOUNT * (out[-1] if out else 0.0))
    return out[::-1]


def by_hand(credit):
    """[B][S]: (1 - SHARE) A(episode) + SHARE A(turn or token), each less the mean of those in its
    place."""
    steps = []  # rewards of each episode's turns, or tokens
    for _, rewards in EPISODES:
        flat = [r for turn in rewards for r in turn]
        steps.append(flat if credit == "token" else [sum(turn) for turn in rewards])
    totals = [sum(sum(turn) for turn in rewards) for _, rewards in EPISODES]
    returns = [to_go(rewards) for rewards in steps]
    found = []
    for (turns, _), own, total in zip(EPISODES, returns, totals):
        centred = []
        for at, value in enumerate(own):
            others = [row[at] for row in returns if at < len(row)]
            centred.append(value - sum(others) / len(others))
        repeats = [1] * len(own) if credit == "token" else [len(said) for _, said in turns]
        spread = [c for c, n in zip(centred, repeats) for _ in range(n)]
        whole = (1 - SHARE) * (total - sum(totals) / len(totals))
        found.append([whole + SHARE * c for c in spread])
    return found


def log_probs(lm, t):
    """[S, V] at the temperature of the job, where each sampled token was predicted."""
    logits = lm(torch.tensor(t.token_ids)[None].long()).logits[0]
    return torch.log_softmax(logits / 0.8, -1)[np.flatnonzero(t.sampled) - 1]


def played(model):
    """The episodes as an actor with other weights would have sampled them."""
    lm, rng, episodes = sharp_policy(model, -0.05).lm, np.random.default_rng(0), []
    for index, (turns, rewards) in enumerate(EPISODES):
        t = make_trajectory(0, index, turns=turns, k=4)
        with torch.no_grad():
            logp = log_probs(lm, t)
        top = logp.topk(4)
        own = logp[range(len(logp)), t.sampled_ids.astype(np.int64)].numpy()
        noise = 0.3 * rng.standard_normal(len(own))
        t = replace(
            t,
            logp_inf=(own + noise).astype(np.float32),
            topk_ids=top.indices.numpy().astype(np.int32),
            topk_logp=top.values.numpy().astype(np.float32),
        )
        flat = tuple(r for turn in rewards for r in turn)
        episodes.append(Episode([t], make_score(t, sum(flat), token_rewards=flat)))
    return Group(0, "digits/train/0", 0, episodes)


@cache
def configured():
    words = ["run_dir=grid", "environment=task", "schedule=on_policy"]
    return load(words).model_dump(mode="json")


def refusal(name, loss, credit):
    """Why a run's validation refuses the cell, or ""."""
    data = configured()
    settings = {"loss": loss, "turn_share": SHARE, "turn_discount": DISCOUNT, "credit": credit}
    spec = load_object(CORRECTIONS[name]) if name != "none" else None
    settings["advantage"] = (spec and spec.replaces_advantage) or "dr_grpo"
    try:
        chosen = {
            "correction": {name: REQUIRED.get(name, {})},
            "algorithm": data["algorithm"] | settings,
        }
        check(validate(data | chosen))
    except UserError as error:
        return str(error)
    return ""


def centred(t, logp):
    """[S]: sum_v c_v log p_v over the stored tokens, c = q_v - (q_T/p_T) p_v a constant."""
    at = logp.gather(1, torch.tensor(t.topk_ids).long())
    q, p = torch.tensor(t.topk_logp).double().exp(), at.detach().double().exp()
    alpha = (1 - q.sum(-1, keepdim=True)).clamp(min=1e-6) / (1 - p.sum(-1, keepdim=True))
    return ((q - alpha * p) * at).sum(-1).float()


@pytest.mark.parametrize("credit", ["turn", "token"])
@pytest.mark.parametrize("name", ["none", *CORRECTIONS])
def test_every_accepted_cell_has_the_gradient_by_hand(model, name, credit):
    accepted = []
    # to a correction sapo and gmpo are as ppo
    for loss in [each for each in LOSSES if name == "none" or each not in ("sapo", "gmpo")]:
        why = refusal(name, loss, credit)
        if why:
            assert why.endswith(".") and ("algorithm.loss" in why or "turn_share" in why), why
            continue
        accepted.append(loss)
        settings = {"turn_share": SHARE, "turn_discount": DISCOUNT, "credit": credit, "loss": loss}
        corrections = {} if name == "none" else {name: REQUIRED.get(name, {})}
        update = make_update(model, advantage="group_mean", corrections=corrections, **settings)
        group = played(model)
        batch = make_batch([group])
        update.prepare([batch], first=True)
        update.run(batch, 0, first=True)

        values = by_hand(credit)
        width = max(map(len, values))
        hand = torch.tensor([[*row, *[0.0] * (width - len(row))] for row in values])
        ref = update.score_ref(batch)
        weighed = update.pipeline.correct(observed(batch.sent, (0, 0), hand, ref, ref), ONE_RANK)
        lm, objective = sharp_policy(model).lm, torch.zeros(())
        for row, e in enumerate(group.episodes):
            ids = torch.tensor(e.parts[0].sampled_ids).long()
            every = log_probs(lm, e.parts[0])
            factor = (weighed.weight * weighed.mask * hand)[row, : len(ids)]
            objective = objective + (factor * every[range(len(ids)), ids]).sum()
            if name == "centre":
                objective = objective - (factor * centred(e.parts[0], every)).sum()
        (-objective / weighed.mask.sum()).backward()
        ours = update.engine.gradients()
        for parameter, p in lm.named_parameters():
            torch.testing.assert_close(
                ours[parameter], p.grad, atol=3e-6, rtol=1e-4, msg=f"{loss} {parameter}"
            )
    assert bool(accepted) != (name == "rapid"), accepted


def test_the_two_credits_differ_and_are_not_the_episode_s():
    turn, token = by_hand("turn"), by_hand("token")
    assert turn != token and len({len({*row}) for row in turn}) > 1
    assert all(len({*row}) == len(row) for row in token[1:])
