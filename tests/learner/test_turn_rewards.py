"""Rewards of turns in a step: each token's advantage, by hand, and the gradient that it gives."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from learner_helpers import make_batch, make_job, make_update, sharp_policy, small_model

from rlcore.corrections.numerics import ONE_RANK
from rlcore.learner.batch import build_batch
from rlcore.learner.task_advantages import TaskAdvantages
from rlcore.testing.records import make_score, make_trajectory
from rlcore.types import Episode, Group

# (observation, sampled) turns of each record
SHAPES = {
    "one turn": [[((3, 4, 5), (6, 7, 8))]],
    "two turns": [[((3, 4, 5), (6, 7)), ((9, 10), (8, 6, 4))]],
    "three turns, two parts": [[((3, 4, 5), (6,))], [((9, 3, 6), (7, 8)), ((5, 4), (9,))]],
}
REWARDS = [(0.5,), (-1.0, 0.25), (0.0, 1.0, 2.0)]
# to go: 0.5 | -0.75, 0.25 | 3, 3, 2; the mean of the first turns is 2.75/3, of the second 3.25/2
FIRST, SECOND = 2.75 / 3, 3.25 / 2
OF_TURNS = [
    [0.5 - FIRST] * 3,
    [-0.75 - FIRST] * 2 + [0.25 - SECOND] * 3,
    [3 - FIRST] + [3 - SECOND] * 2 + [0.0],
]
OF_EPISODES = [[0.5 - FIRST] * 3, [-0.75 - FIRST] * 5, [3 - FIRST] * 4]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("model"))


def group(rewards=REWARDS, group_id=0):
    episodes = []
    for index, (shape, given) in enumerate(zip(SHAPES.values(), rewards)):
        parts = [
            make_trajectory(group_id, index, turns=turns, part=i, parts=len(shape), k=4)
            for i, turns in enumerate(shape)
        ]
        score = make_score(parts[0], sum(given), turn_rewards=given)
        episodes.append(Episode(parts, score))
    return Group(group_id, f"digits/train/{group_id}", 0, episodes)


def padded(rows):
    width = max(map(len, rows))
    return torch.tensor([[*row, *[0.0] * (width - len(row))] for row in rows])


def advantages(model, groups, **settings):
    job = make_job(model, advantage="group_mean", **settings)
    return TaskAdvantages(job).over_tokens(make_batch(groups), ONE_RANK)


def test_tokens_have_the_advantages_of_their_turns(model):
    by_turn, by_episode = padded(OF_TURNS), padded(OF_EPISODES)
    for share in (0.0, 0.25, 1.0):
        found = advantages(model, [group()], turn_share=share)
        torch.testing.assert_close(found, share * by_turn + (1 - share) * by_episode)


def test_a_discount_shortens_what_a_turn_is_rewarded_for(model):
    found = advantages(model, [group()], turn_share=1.0, turn_discount=0.5)
    # to go: 0.5 | -0.875, 0.25 | 1, 2, 2
    first, second = (0.5 - 0.875 + 1) / 3, 2.25 / 2
    expected = [
        [0.5 - first] * 3,
        [-0.875 - first] * 2 + [0.25 - second] * 3,
        [1 - first] + [2 - second] * 2 + [0.0],
    ]
    torch.testing.assert_close(found, padded(expected))


def test_without_rewards_of_turns_all_belongs_to_the_last(model):
    plain = group()
    for e in plain.episodes:
        e.score = replace(e.score, turn_rewards=())
    found = advantages(model, [plain], turn_share=1.0)
    first, second = (0.5 - 0.75 + 3) / 3, (-0.75 + 3) / 2
    expected = [
        [0.5 - first] * 3,
        [-0.75 - first] * 2 + [-0.75 - second] * 3,
        [3 - first] + [3 - second] * 2 + [0.0],
    ]
    torch.testing.assert_close(found, padded(expected))


@pytest.mark.parametrize("credit", ["turn", "token"])
def test_a_long_episode_s_penalty_is_of_its_last_token(model, credit):
    """Rewards to go have it, be they of turns or of tokens."""
    settings = {"turn_share": 1.0, "credit": credit, "advantage": "reinforce"}
    found = {}
    for share in (0.0, 0.9):
        update = make_update(model, overlong_share=share, **settings)
        batch = make_batch([group()])
        update.prepare([batch], first=True)
        found[share] = update.group_advantages(batch), batch
    # 3, 5 and 4 of 10 tokens, over the last 9 of which the penalty rises to 1
    penalty = torch.tensor([-2 / 9, -4 / 9, -3 / 9])
    (plain, before), (shaped, after) = found.values()
    added = after.sent.rewards - before.sent.rewards
    torch.testing.assert_close(added.float(), penalty)
    torch.testing.assert_close(
        after.turns.rewards.sum(1) - before.turns.rewards.sum(1), penalty.double()
    )
    on = before.sent.mask
    moved = (shaped - plain)[on]
    expected = penalty[:, None].expand(on.shape)[on]
    # the mean over the batch's turns or tokens moves by as much for all of them
    torch.testing.assert_close(moved - moved[0], expected - expected[0])


@pytest.mark.parametrize("name", ["reinforce", "reinforce_pp", "grpo"])
def test_each_of_several_tasks_compares_its_own_turns(model, name):
    other = group([(5.0,), (1.0, 8.0), (0.0, 1.0, -20.0)], group_id=1)
    other.prompt_id = "b/train/1"
    job = make_job(model, turn_share=1.0, advantage=name)
    rule = TaskAdvantages(replace(job, task_advantages={"digits": name, "b": name}))
    both = rule.over_tokens(make_batch([group(), other]), ONE_RANK)
    single = TaskAdvantages(job)
    for rows, one in ((slice(0, 3), group()), (slice(3, 6), other)):
        assert torch.equal(both[rows], single.over_tokens(make_batch([one]), ONE_RANK))


def test_an_empty_share_makes_every_collective_call(model):
    calls = []

    class Counting:
        def __call__(self, values):
            calls.append("sum")
            return values

        def max(self, values):
            calls.append("max")
            return values

    rule = TaskAdvantages(make_job(model, turn_share=0.5, advantage="reinforce_pp"))
    seen = []
    for groups in ([group()], []):
        calls.clear()
        rule.over_tokens(make_batch(groups), Counting())
        rule.metrics(make_batch(groups), Counting())
        seen.append(list(calls))
    assert seen[0] == seen[1]


def test_turns_that_no_other_sample_reached_are_counted(model):
    rule = TaskAdvantages(make_job(model, turn_share=0.5))
    found = rule.metrics(make_batch([group(), group(group_id=1)]), ONE_RANK)
    assert found == {"train/single_turn_share": 2 / 12}
    assert TaskAdvantages(make_job(model)).metrics(make_batch([group()]), ONE_RANK) == {}


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo", "reinforce"])
@pytest.mark.parametrize("micro_batch_tokens", [8, 10_000])
def test_every_loss_has_the_gradient_of_each_turn_s_advantage(model, loss, micro_batch_tokens):
    update = make_update(model, advantage="group_mean", loss=loss, turn_share=1.0)
    batch = make_batch([group()], micro_batch_tokens)
    update.prepare([batch], first=True)
    update.run(batch, 0, first=True)
    lm = sharp_policy(model).lm
    objective = torch.zeros(())
    for episode, row in zip(group().episodes, OF_TURNS):
        values = iter(row)
        for t in episode.parts:
            ids = torch.tensor(t.token_ids)[None].long()
            logp = torch.log_softmax(lm(ids).logits[0] / 0.8, -1)
            for at in np.flatnonzero(t.sampled):
                objective = objective + next(values) * logp[at - 1, int(t.token_ids[at])]
    (-objective / group().tokens).backward()
    ours = update.engine.gradients()
    for name, p in lm.named_parameters():
        torch.testing.assert_close(ours[name], p.grad, atol=3e-6, rtol=1e-4, msg=name)


def test_a_score_that_leaves_a_turn_out_is_an_error():
    wrong = group()
    wrong.episodes[1].score = replace(wrong.episodes[1].score, turn_rewards=(1.0,))
    with pytest.raises(ValueError, match="has 2 turns and 1 rewards"):
        build_batch([wrong], with_topk=False, device=torch.device("cpu"))


# of the tokens of each episode; the sums by turn are REWARDS
BY_TOKEN = [(0.25, 0.0, 0.25), (-1.0, 0.0, 0.5, 0.0, -0.25), (0.0, 0.5, 0.5, 2.0)]


def by_token():
    found = group()
    for e, given in zip(found.episodes, BY_TOKEN):
        e.score = replace(e.score, turn_rewards=(), token_rewards=given)
    return found


def reference(rewards, discount):
    """Each token's reward to go less the mean of the group's tokens at its place, by hand."""
    to_go = []
    for row in rewards:
        out = [0.0] * (len(row) + 1)
        for t in reversed(range(len(row))):
            out[t] = row[t] + discount * out[t + 1]
        to_go.append(out[:-1])
    width = max(map(len, rewards))
    at = [[row[t] for row in to_go if t < len(row)] for t in range(width)]
    return [[g - sum(at[t]) / len(at[t]) for t, g in enumerate(row)] for row in to_go]


def test_rewards_of_tokens_count_by_turn_unless_tokens_are_credited(model):
    turned = advantages(model, [group()], turn_share=0.5)
    assert torch.equal(advantages(model, [by_token()], turn_share=0.5), turned)
    whole = advantages(model, [group()])
    assert torch.equal(advantages(model, [by_token()]), whole)


@pytest.mark.parametrize("discount", [1.0, 0.5, 0.0])
def test_every_token_may_have_the_advantage_of_its_own_reward_to_go(model, discount):
    settings = {"turn_share": 1.0, "turn_discount": discount, "credit": "token"}
    found = advantages(model, [by_token()], **settings)
    torch.testing.assert_close(found, padded(reference(BY_TOKEN, discount)))
    # a turn's reward is its last token's
    last = [(0.0, 0.0, 0.5), (0.0, -1.0, 0.0, 0.0, 0.25), (0.0, 0.0, 1.0, 2.0)]
    found = advantages(model, [group()], **settings)
    torch.testing.assert_close(found, padded(reference(last, discount)))


def test_a_score_that_leaves_a_token_out_is_an_error():
    wrong = by_token()
    wrong.episodes[1].score = replace(wrong.episodes[1].score, token_rewards=(1.0,))
    with pytest.raises(ValueError, match="has 5 tokens and 1 rewards"):
        build_batch([wrong], with_topk=False, device=torch.device("cpu"))
