"""Advantages of several tasks: each by its own rule, over its own episodes."""

from dataclasses import replace

import pytest
import torch
from learner_helpers import (
    make_batch,
    make_groups,
    make_job,
    make_update,
    small_model,
    with_rewards,
)

from rlcore.corrections.numerics import ONE_RANK
from rlcore.learner.task_advantages import TaskAdvantages

NAMES = ("grpo", "dr_grpo", "rloo", "reinforce", "reinforce_pp", "reinforce_pp_baseline")


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return make_job(small_model(tmp_path_factory.mktemp("model")))


def mixed_groups():
    """Six groups, every other one of task b, which has fewer samples and ten times the reward."""
    groups = with_rewards(make_groups(6), lambda e: (e.score.group_id * 7 + e.sample_index) % 3)
    for g in groups[1::2]:
        g.prompt_id = f"b/train/{g.group_id}"
        g.episodes = g.episodes[:2]
        for e in g.episodes:
            e.score = replace(e.score, reward=10.0 * e.sample_index)
    for g in groups[::2]:
        g.prompt_id = f"a/train/{g.group_id}"
    return groups


def advantages(job, groups, **by_task):
    return TaskAdvantages(replace(job, task_advantages=by_task))(make_batch(groups), ONE_RANK)


def alone(job, groups, name):
    single = replace(job, objective=job.objective.model_copy(update={"advantage": name}))
    return TaskAdvantages(single)(make_batch(groups), ONE_RANK)


@pytest.mark.parametrize("first", NAMES)
@pytest.mark.parametrize("second", NAMES)
def test_each_task_has_the_advantages_that_it_has_alone(job, first, second):
    groups = mixed_groups()
    both = advantages(job, groups, a=first, b=second)
    tasks = torch.tensor([t == "a" for t in make_batch(groups).tasks])
    own = [g for g in groups if g.prompt_id.startswith("a/")]
    others = [g for g in groups if g.prompt_id.startswith("b/")]
    assert torch.equal(both[tasks], alone(job, own, first))
    assert torch.equal(both[~tasks], alone(job, others, second))


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_advantages_over_groups_do_not_depend_on_the_mixture(job, name):
    groups = mixed_groups()
    assert torch.equal(advantages(job, groups, a=name, b=name), alone(job, groups, name))


def test_a_task_without_episodes_and_an_empty_share_make_every_collective_call(job):
    calls = []

    class Counting:
        def __call__(self, values):
            calls.append("sum")
            return values

        def max(self, values):
            calls.append("max")
            return values

    rule = TaskAdvantages(replace(job, task_advantages={"a": "reinforce", "b": "reinforce_pp"}))
    seen = []
    for groups in (mixed_groups(), [g for g in mixed_groups() if g.prompt_id[0] == "a"], []):
        calls.clear()
        values = rule(make_batch(groups), Counting())
        assert torch.isfinite(values).all() and len(values) == sum(len(g.episodes) for g in groups)
        seen.append(list(calls))
    assert seen[0] == seen[1] == seen[2] and seen[0]


def test_an_episode_of_a_task_that_the_learner_does_not_know_is_an_error(job):
    with pytest.raises(ValueError, match=r"episodes of \['b'\]"):
        advantages(job, mixed_groups(), a="grpo")


def test_the_loss_of_a_mixture_does_not_depend_on_micro_batches(job):
    def gradient(tokens):
        update = make_update(job.model_path, corrections={}, advantage="rloo")
        update.advantages = TaskAdvantages(
            replace(job, task_advantages={"a": "rloo", "b": "reinforce"})
        )
        batch = make_batch(mixed_groups(), tokens)
        update.prepare([batch], first=True)
        update.run(batch, 0, first=True)
        return len(batch.micro), update.engine.gradients()

    (few, whole), (many, split) = gradient(10_000), gradient(16)
    assert few == 1 < many
    for name, values in whole.items():
        assert torch.allclose(values, split[name], rtol=1e-4, atol=1e-6), name
