"""What masked diffusion is accepted with, and the sentences that refuse the rest."""

import pytest

from rlcore.advisor.plan import check_simulated
from rlcore.commands.model_checks import check_kind
from rlcore.config.compose import load
from rlcore.errors import UserError

BASE = ["run_dir=x", "experiment=diffusion"]
REFUSED = [  # words; parts of the sentence
    (["actor.bf16.engine=vllm"], ["actor.bf16.engine=vllm", "engine=diffusion"]),
    (
        ["learner.ranks=2", "learner.tensor_parallel=2"],
        ["learner.tensor_parallel=2", "model.diffusion", "use 1"],
    ),
    (
        ["learner.ranks=2", "learner.sequence_parallel=2"],
        ["learner.sequence_parallel=2", "model.diffusion", "use 1"],
    ),
    (
        ["learner.ranks=2", "learner.expert_parallel=2"],
        ["learner.expert_parallel=2", "model.diffusion", "use 1"],
    ),
    (["actor=sparse", "actor.sparse.engine=diffusion"], ["actor.sparse.kind=sparse"]),
    (["actor.bf16.tensor_parallel=2"], ["tensor_parallel=2", "actor.bf16.count"]),
    (["actor.bf16.kv_on_update=keep"], ["kv_on_update=keep", "recompute"]),
    (["actor.bf16.logit_noise=0.1"], ["logit_noise=0.1"]),
    (["actor.bf16.probability_floor=1e-6"], ["probability_floor=1e-06"]),
    (["actor.bf16.temperature_scale=1.1"], ["temperature_scale=1.1"]),
    (
        ["actor=fp8", "actor.fp8.num_gpus=1", "actor.fp8.rounding=none"],
        ["actor.fp8.kind=fp8", "rounding=fp8"],
    ),
    (["rollout.logprobs_k=20"], ["rollout.logprobs_k=20", "use 0"]),
    (['rollout.stop=["="]'], ["rollout.stop=['=']"]),
    (["rollout.top_p=0.9"], ["rollout.top_p=0.9", "use 1.0"]),
    (["rollout.top_k=5"], ["rollout.top_k=5", "use 0"]),
    (["rollout.min_p=0.1"], ["rollout.min_p=0.1", "use 0.0"]),
    (["actor.bf16.kv_cache_gib=2"], ["actor.bf16.kv_cache_gib=2", "leave it at 1.0"]),
    (["actor.bf16.second_runner=false"], ["second_runner=False", "leave it at null"]),
    (["schedule.on_publish=in_flight"], ["on_publish=in_flight", "finish or abort"]),
    (["environment=attempts"], ["environment="]),
    (["correction=jackpot"], ["correction=jackpot", "ais, tis, mis"]),
    (["correction=[dvp,mis]"], ["correction=dvp"]),
    (
        ["correction=ais", "correction.ais.alpha=n_star"],
        ["correction.ais.alpha=n_star", "use signals"],
    ),
    (
        ["learner.attention=flash_attention_2", "learner.num_gpus=1", "learner.zero_stage=1"],
        ["sdpa"],
    ),
    (["learner.lora={targets: [q_proj, ff_out]}"], ["learner.lora.targets", "ff_out"]),
    (["learner.lora={}"], ["learner.lora.targets", "o_proj", "attn_out"]),
    (["learner.lora={publish: adapter, targets: [q_proj]}"], ["publish=adapter", "merged"]),
    (
        ["algorithm.train_on_best=4", "algorithm.train_on_best_by=acceptance"],
        ["train_on_best_by=acceptance"],
    ),
    (["model.fresh.head_dim=16"], ["model.fresh.hidden_size=128"]),
]
ACCEPTED = [
    [],
    ["actor=fp8"],
    ["actor=fp8", "actor.fp8.rounding=int4", "correction=tis"],
    ["actor=fp8", "actor.fp8.num_gpus=1"],
    ["actor=[bf16,fp8]", "correction=none"],
    ["schedule.on_publish=abort", "schedule.max_staleness=2"],
    ["schedule.epochs=2", "schedule.steps_per_phase=2"],
    ["algorithm.kl_coef=0.1", "algorithm.kl_estimator=full"],
    ["learner.layout=packed"],
    ["learner.lora={targets: [q_proj, attn_out]}"],
    ["correction=rapid", "algorithm=rapid"],
    ["correction=[mis,veto]", "cluster.transport=gloo"],
    ["experiment=diffusion_sudoku"],
]


@pytest.mark.parametrize(("words", "said"), REFUSED, ids=lambda w: " ".join(w))
def test_what_is_for_causal_models_is_refused(words, said):
    with pytest.raises(UserError) as error:
        load([*BASE, *words])
    assert all(part in str(error.value) for part in said), str(error.value)


@pytest.mark.parametrize("words", ACCEPTED, ids=lambda w: " ".join(w))
def test_what_goes_with_it_is_accepted(words):
    assert load([*BASE, *words]).model.diffusion is not None


def test_a_forecast_is_not_of_masked_diffusion():
    with pytest.raises(UserError, match=r"model\.diffusion cannot be planned"):
        check_simulated(load(BASE))


def test_the_engine_alone_is_no_masked_diffusion():
    with pytest.raises(UserError, match=r"model\.diffusion is null"):
        load(["run_dir=x", "actor.bf16.engine=diffusion"])


def test_a_folder_is_taken_for_what_it_is():
    causal = load(["run_dir=x", "model=path", "model.path=m"])
    with pytest.raises(UserError, match="is a masked-diffusion model"):
        check_kind(causal, {"model_type": "llada", "vocab_size": 9})
    check_kind(causal, {"model_type": "qwen3", "vocab_size": 9})
    with pytest.raises(UserError, match="model_type=qwen3"):
        check_kind(load(BASE), {"model_type": "qwen3", "vocab_size": 9})
