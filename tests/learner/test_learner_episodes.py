"""Episodes of several turns and of several records: observations have no gradient, no statistic and
no column, and what is taken over a sequence spans the whole episode.

Expected values come from plain transformers forwards, one a record.
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from learner_helpers import disturb, make_batch, make_update, sharp_policy, small_model

from rlcore.corrections.numerics import ONE_RANK
from rlcore.learner.batch import build_batch
from rlcore.testing.records import make_group, make_score, make_trajectory
from rlcore.types import Episode, Group

CPU = torch.device("cpu")
# (observation, sampled) turns of each record; the gradient and all statistics are over `sampled`
SINGLE = [[((3, 4, 5), (6, 7, 8))]]
TURNS = [[((3, 4, 5), (6, 7)), ((9, 10), (8, 6, 4))]]
PARTS = [[((3, 4, 5), (6, 7))], [((9, 3, 6), (7, 8)), ((5, 4), (9,))]]
REWARDS = (1.0, 0.25, 0.5)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("model"))


def _episode(shape, index, rng):
    """One episode with random log-probs, near those of the policy that `make_update` trains."""
    parts = []
    for part, turns in enumerate(shape):
        count = sum(len(sampled) for _, sampled in turns)
        fields = {
            "logp_inf": (-4.0 + 0.5 * rng.standard_normal(count)).astype(np.float32),
            "topk_ids": np.argsort(rng.random((count, 15)))[:, :4].astype(np.int32),
            "topk_logp": np.log(np.full((count, 4), 0.1, np.float32)),
        }
        one = make_trajectory(0, index, turns=turns, part=part, parts=len(shape), **fields)
        parts.append(one)
    return Episode(parts, make_score(parts[0], REWARDS[index]))


def _group(*shapes):
    rng = np.random.default_rng(0)
    episodes = [_episode(shape, i, rng) for i, shape in enumerate(shapes)]
    return Group(0, "digits/train/0", 0, episodes)


def _plain_logp(lm, episode):
    """Log-probs [S] of an episode's sampled tokens at temperature 0.8."""
    rows = []
    for t in episode.parts:
        logp = torch.log_softmax(lm(torch.tensor(t.token_ids)[None].long()).logits[0] / 0.8, -1)
        at = torch.tensor(np.flatnonzero(t.sampled))
        ids = torch.tensor(t.sampled_ids).long()[:, None]
        rows.append(logp[at - 1].gather(1, ids)[:, 0])
    return torch.cat(rows)


def _logp_inf(episode):
    return torch.tensor(np.concatenate([t.logp_inf for t in episode.parts]))


def _step(update, batch, *, later=False):
    """Run one step on a batch; `later`: not the first of its phase, the policy has moved."""
    update.prepare([batch], first=not later)
    if later:
        disturb(update.engine.policy)
    return update.run(batch, 0, first=not later)


def _assert_gradients(update, lm, loss):
    loss.backward()
    ours = update.engine.gradients()
    for name, p in lm.named_parameters():
        torch.testing.assert_close(ours[name], p.grad, atol=3e-6, rtol=1e-4, msg=name)
    assert max(float(g.abs().max()) for g in ours.values()) > 1e-4


@pytest.mark.parametrize("layout", ["sorted", "packed"])
@pytest.mark.parametrize("micro_batch_tokens", [8, 10_000])
def test_the_gradient_is_that_of_a_plain_forward_with_a_mask(model, layout, micro_batch_tokens):
    group = _group(SINGLE, TURNS, PARTS)
    update = make_update(model, advantage="group_mean", entropy_coef=0.01)
    gradient = _step(update, make_batch([group], micro_batch_tokens, layout))
    lm = sharp_policy(model).lm
    mean = np.mean(REWARDS)
    loss = torch.zeros(())
    for e in group.episodes:
        loss = loss - float(e.score.reward - mean) * _plain_logp(lm, e).sum() / group.tokens
        for t in e.parts:
            logits = lm(torch.tensor(t.token_ids)[None].long()).logits[0] / 0.8
            logp = torch.log_softmax(logits, -1)[np.flatnonzero(t.sampled) - 1]
            loss = loss + 0.01 * (logp.exp() * logp).sum() / group.tokens
    _assert_gradients(update, lm, loss)
    assert gradient.kept == group.tokens == 13


def test_another_observation_changes_log_probs_and_nothing_that_is_counted(model):
    def run(observation):
        other = [[((3, 4, 5), (6, 7)), (observation, (8, 6, 4))]]
        group = _group(SINGLE, other, PARTS)
        update = make_update(model, corrections={"tis": {}, "veto": {}})
        batch = make_batch([group])
        gradient = _step(update, batch)
        totals = gradient.sums.over_ranks(ONE_RANK, CPU)
        return SimpleNamespace(batch=batch, gradient=gradient, totals=totals)

    one, two = run((9, 10)), run((11, 12))
    changed = one.batch.ref.logp != two.batch.ref.logp
    assert changed[1, 2:5].all() and not changed[[0, 2]].any() and not changed[1, :2].any()
    for name in ("mask", "logp_inf", "token_version", "topk_ids_inf", "topk_logp_inf"):
        assert torch.equal(getattr(one.batch.sent, name), getattr(two.batch.sent, name)), name
    assert one.batch.sent.mask.sum() == 13
    assert one.totals["train/tokens"] == two.totals["train/tokens"] == 13
    assert one.totals["train/sequences"] == two.totals["train/sequences"] == 3
    assert one.gradient.kept == two.gradient.kept == 13


@pytest.mark.parametrize("shape", [TURNS, PARTS], ids=["turns", "parts"])
def test_corrections_get_what_one_turn_of_the_same_tokens_would_give(shape):
    """Everything after `build_batch` sees these tensors and the learner's scores alone."""
    episode = _group(shape).episodes[0]
    fields = ("logp_inf", "topk_ids", "topk_logp", "token_version")
    joined = {n: np.concatenate([getattr(t, n) for t in episode.parts]) for n in fields}
    sampled = np.concatenate([t.sampled_ids for t in episode.parts]).tolist()
    version = joined.pop("token_version")
    one_turn = make_trajectory(0, 0, turns=[((3,), sampled)], version=version, **joined)
    groups = [Group(0, "p", 0, [episode]), make_group([one_turn], [REWARDS[0]])]
    mine, plain = (build_batch([g], with_topk=True, device=CPU).sent for g in groups)
    # all but `repeats`: what was observed between the tokens is part of their contexts
    for name in set(mine.__dataclass_fields__) - {"repeats"}:
        a, b = getattr(mine, name), getattr(plain, name)
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, name


def test_mismatch_metrics_are_over_the_sampled_tokens(model):
    group = _group(SINGLE, TURNS, PARTS)
    gradient = _step(make_update(model), make_batch([group], 8))
    lm = sharp_policy(model).lm
    with torch.no_grad():
        d = torch.cat([_plain_logp(lm, e) - _logp_inf(e) for e in group.episodes])
    assert gradient.metrics["mismatch/kl_k1"] == pytest.approx(float(-d.mean()), abs=1e-5)
    absolute = gradient.metrics["mismatch/abs_dlogp_mean"]
    assert absolute == pytest.approx(float(d.abs().mean()), abs=1e-5)


# name -> (corrections, weight of every token of an episode with log ratios d)
SEQUENCE_WEIGHTS = {
    "tis": ({"tis": {"level": "sequence"}}, lambda d: d.sum().exp().clamp(max=2.0)),
    "mis": (
        {"mis": {"level": "geometric", "low": 0.5, "high": 2.0}},
        lambda d: d.mean().exp() * float(0.5 <= float(d.mean().exp()) <= 2.0),
    ),
    "rapid": ({"rapid": {"eta": 1.5}}, lambda d: d.sum().exp().clamp(max=1.5)),
}


@pytest.mark.parametrize("name", SEQUENCE_WEIGHTS)
@pytest.mark.parametrize("micro_batch_tokens", [8, 10_000])
def test_sequence_weights_span_the_episode(model, name, micro_batch_tokens):
    corrections, weight = SEQUENCE_WEIGHTS[name]
    group = _group(SINGLE, TURNS, PARTS)
    loss_name = "reinforce" if name == "rapid" else "ppo"
    options = {"advantage": "group_mean", "loss": loss_name, "corrections": corrections}
    update = make_update(model, **options)
    _step(update, make_batch([group], micro_batch_tokens))
    lm = sharp_policy(model).lm
    logp = [_plain_logp(lm, e) for e in group.episodes]
    weights = [weight(p.detach() - _logp_inf(e)) for p, e in zip(logp, group.episodes)]
    baseline = [w if name == "rapid" else 1.0 for w in weights]
    mean = sum(float(b) * r for b, r in zip(baseline, REWARDS)) / len(REWARDS)
    loss = sum(
        -float(w) * (r - mean) * p.sum() / group.tokens for w, r, p in zip(weights, REWARDS, logp)
    )
    assert len({round(float(w), 4) for w in weights}) > 1
    _assert_gradients(update, lm, loss)


@pytest.mark.parametrize("micro_batch_tokens", [8, 10_000])
def test_gspo_s_ratio_is_the_mean_over_the_episode(model, micro_batch_tokens):
    group = _group(SINGLE, TURNS, PARTS)
    # wide enough that nothing clips
    options = {"advantage": "group_mean", "loss": "gspo", "eps_low": 0.9, "eps_high": 9.0}
    update = make_update(model, **options)
    _step(update, make_batch([group], micro_batch_tokens), later=True)
    policy = sharp_policy(model)
    with torch.no_grad():
        ref = [_plain_logp(policy.lm, e) for e in group.episodes]
    disturb(policy)
    loss = torch.zeros(())
    for e, old in zip(group.episodes, ref):
        new = _plain_logp(policy.lm, e)
        ratio = (new.detach() - old).mean().exp()
        assert abs(float(ratio) - 1) > 1e-3
        advantage = float(e.score.reward - np.mean(REWARDS))
        loss = loss - advantage * ratio * new.sum() / group.tokens
    _assert_gradients(update, policy.lm, loss)


def test_a_veto_in_one_part_drops_all_parts(model):
    group = _group(SINGLE, TURNS, PARTS)
    last = group.episodes[2].parts[1]
    last.logp_inf[-1] = 5.0  # so probable for the actor that p_ref/p_inf falls below the threshold
    update = make_update(model, corrections={"veto": {"threshold": 0.01}})
    gradient = _step(update, make_batch([group], 8))
    assert gradient.kept == group.tokens - group.episodes[2].tokens == 8
    update = make_update(model, corrections={"veto": {"threshold": 0.01}})
    alone = replace(group, episodes=group.episodes[:2])
    assert _step(update, make_batch([alone], 8)).kept == 8


def test_an_episode_without_a_reward_is_refused():
    trajectory = make_trajectory()
    failed = Episode([trajectory], make_score(trajectory, status="error"))
    with pytest.raises(ValueError, match="has no reward"):
        build_batch([Group(0, "p", 0, [failed])], with_topk=False, device=CPU)


def test_records_that_store_fewer_top_log_probs_are_padded():
    group = make_group([make_trajectory(k=2), make_trajectory(0, 1, k=4)], [0.0, 1.0])
    sent = build_batch([group], with_topk=True, device=CPU).sent
    assert sent.topk_ids_inf[0, 0].tolist() == [0, 1, -1, -1]
    assert torch.isinf(sent.topk_logp_inf[0, :, 2:]).all()
    assert torch.isfinite(sent.topk_logp_inf[1]).all()


def test_an_episode_is_of_the_kind_of_the_actor_that_drew_it():
    """Also one of a kind that the run does not have any more: it is counted behind the others."""
    actors = ("fp8-0", "bf16-11", "fp8-2", "int3-0")
    drawn = [make_trajectory(0, i, actor_id=actor) for i, actor in enumerate(actors)]
    groups = [make_group(drawn, [0.0] * 4)]
    batch = build_batch(groups, with_topk=False, device=CPU, kinds=("bf16", "fp8"))
    assert batch.sent.kinds.tolist() == [1, 0, 1, 2]
    assert build_batch(groups, with_topk=False, device=CPU).sent.kinds is None


def test_tokens_of_a_group_repeat_where_kind_versions_and_all_tokens_before_are_equal():
    def repeats(*turns, version=(3, 3, 3), actor_id="bf16-0", group=0):
        version = np.array(version, np.int32)
        drawn = make_trajectory(group, turns=turns, version=version, actor_id=actor_id)
        (row,) = build_batch([make_group([drawn], [0.0])], with_topk=False, device=CPU).sent.repeats
        return row.tolist()

    first = repeats(((5, 9), [4, 7, 1]))
    assert len(set(first)) == 3
    assert repeats(((5, 9), [4, 7, 1]), actor_id="bf16-1") == first
    # [how many of the first tokens repeat, the other answer]
    others = [
        (2, repeats(((5, 9), [4, 7, 2]))),
        (0, repeats(((5, 8), [4, 7, 1]))),
        (0, repeats(((9, 5), [4, 7, 1]))),  # the same tokens in another order
        (1, repeats(((5, 9), [4, 1, 7]))),
        (1, repeats(((5, 9), [4, 7, 1]), version=(3, 4, 4))),
        (0, repeats(((5, 9), [4, 7, 1]), actor_id="fp8-0")),
        (0, repeats(((5, 9), [4, 7, 1]), group=1)),  # another rank may hold it
        (1, repeats(((5, 9), [4]), ((7,), [7, 1]))),  # an observation between them
    ]
    for count, other in others:
        assert [a == b for a, b in zip(first, other)] == [n < count for n in range(3)]
