"""What a critic is combined with, what is refused, and which advantages read it."""

import pytest

from rlcore.config.compose import load
from rlcore.errors import UserError

PPO = ["algorithm=ppo", "critic=model", "rollout.samples_per_prompt=1"]
HEAD = ["algorithm=ppo", "critic=value_head"]
REFUSED = [  # words; parts that the sentence must hold
    (["algorithm=ppo"], ["algorithm.advantage=gae", "critic=value_head or critic=model"]),
    (["critic=model"], ["critic.kind=model", "algorithm.advantage=grpo", "algorithm=ppo"]),
    ([*PPO, "algorithm.turn_share=0.5"], ["algorithm.turn_share=0.5", "critic.kind=model"]),
    ([*PPO, "correction.tis.level=sequence"], ["weighs whole sequences", "critic.traces=gae"]),
    (
        [*PPO, "correction=none", "algorithm.ratio_to=p_inf"],
        ["ratio_to=p_inf", "critic.traces=gae"],
    ),
    (
        [*PPO, "correction=rapid", "algorithm.loss=reinforce", "critic.traces=gae"],
        ["correction=rapid", "algorithm=rapid"],
    ),
    ([*HEAD, "learner=lora"], ["critic.kind=value_head", "learner.lora"]),
    ([*HEAD, "learner.zero_stage=3"], ["critic.kind=value_head", "learner.zero_stage=3"]),
    ([*HEAD, "critic.lora={}"], ["critic.lora", "critic.kind=model"]),
    ([*PPO, "learner.ranks=2", "learner.sequence_parallel=2"], ["learner.sequence_parallel=2"]),
    ([*PPO, "learner.ranks=2", "learner.tensor_parallel=2"], ["learner.tensor_parallel=2"]),
    ([*PPO, "actor=sparse", "learner.distill={}"], ["critic.kind=model", "learner.distill"]),
    ([*PPO, "algorithm.dynamic_sampling=true"], ["samples_per_prompt=1", "dynamic_sampling"]),
    ([*PPO, "critic.rho_cap=0.5"], ["critic.rho_cap=0.5"]),
    (["algorithm.credit=token"], ["algorithm.credit=token", "turn_share", "critic"]),
]


def _load(words):
    return load(["run_dir=/tmp/x", *words])


@pytest.mark.parametrize(("words", "parts"), REFUSED, ids=lambda v: " ".join(map(str, v))[:60])
def test_what_does_not_fit_a_critic_is_refused_in_a_sentence(words, parts) -> None:
    with pytest.raises(UserError) as refused:
        _load(words)
    for part in parts:
        assert part in str(refused.value)


@pytest.mark.parametrize(
    "words",
    [
        PPO,
        [*PPO, "learner.zero_stage=3", "learner=lora", "critic.lora={}"],
        [*PPO, "correction=[jackpot]"],
        [*HEAD, "correction=[tis]", "correction.tis.level=sequence", "critic.traces=gae"],
        ["algorithm=ppo", "critic=model", "environment=higher_lower", "task=higher_lower"],
        ["experiment=ppo_quickstart"],
    ],
    ids=lambda words: " ".join(words)[:60],
)
def test_combinations_that_are_accepted(words) -> None:
    assert _load(words).critic.trained
