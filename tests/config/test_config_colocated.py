"""What may have GPUs in turns (schedule.colocated), and what is refused in which words."""

import pytest

from rlcore.commands import derived
from rlcore.commands.processes import shared_places
from rlcore.config.compose import load
from rlcore.config.places import tied_by
from rlcore.errors import UserError

ON = ["schedule=on_policy", "schedule.colocated=true"]
GPUS = ["learner=gpu", "actor.bf16.num_gpus=1"]
TWO = ["learner.ranks=2", "actor.bf16.count=2"]

ACCEPTED = {
    "object store": [],
    "gloo": ["cluster.transport=gloo"],
    "disk": ["cluster.transport=disk"],
    "deltas": ["cluster.full_weights_every=4"],
    "ipc": [*GPUS, "cluster.transport=ipc"],
    "two pairs": [*GPUS, *TWO, "cluster.transport=ipc"],
    "more engines than ranks": [*GPUS, "actor.bf16.count=2"],
    "ZeRO-3, offloaded": [
        *GPUS,
        *TWO,
        "learner.zero_stage=3",
        "learner.offload_while_sampling=true",
    ],
    "FP8": ["actor=fp8", "actor.fp8.num_gpus=1", "actor.fp8.rounding=none", "learner=gpu"],
    "emulated FP8": ["actor=fp8"],
    "sparse": ["actor=sparse"],
    "mixed": ["actor=[bf16,fp8]", "learner.ranks=2"],
    "an adapter": ["learner.lora={publish: adapter}"],
    "a sparse copy": ["actor=sparse", "learner.distill={}"],
    "environment": ["environment=alphabet_sort", "task=alphabet_sort", "model=small"],
    "H=8": ["schedule=large_batch"],
    "epochs": ["schedule.steps_per_phase=2", "schedule.epochs=2"],
    "abort": ["schedule.on_publish=abort"],
}
REFUSED = {
    "asynchronous": (["schedule.max_staleness=1"], "schedule.max_staleness=1"),
    "several phases a publication": (
        ["schedule.steps_per_publish=4", "schedule.steps_per_phase=2"],
        "spans several phases of 2 steps",
    ),
    "diffusion": (["experiment=diffusion"], "engine=diffusion does not"),
    "draft": (["actor=draft", "actor.draft.draft_path=x"], "actor.draft.kind=draft"),
    "dense evaluations": (["evaluation.dense_actor=true"], "evaluation.dense_actor=true"),
    "tensor parallel": ([*GPUS, "actor.bf16.tensor_parallel=2"], "tensor_parallel=2 spans"),
    "shares": (["learner=gpu", "learner.num_gpus=0.5", "actor.bf16.num_gpus=0.5"], "num_gpus=0.5"),
    "one on a CPU": (["actor.bf16.num_gpus=1"], "learner.num_gpus=0, actor.bf16.num_gpus=1"),
    "more ranks": (["learner.ranks=2"], "learner.ranks=2 is more than actor.*.count=1"),
    "parts of sequences": ([*TWO, "learner.sequence_parallel=2"], "learner.sequence_parallel=2"),
    "parts of layers": ([*TWO, "learner.tensor_parallel=2"], "learner.tensor_parallel=2"),
    "parts of experts": ([*TWO, "learner.expert_parallel=2"], "learner.expert_parallel=2"),
    "ipc to more engines": (
        [*GPUS, "actor.bf16.count=2", "cluster.transport=ipc"],
        "cluster.transport=ipc reads a learner rank's memory on each engine's GPU",
    ),
    "offloaded twice": (
        [
            *GPUS,
            "learner.zero_stage=3",
            "learner.offload={optimizer: cpu}",
            "learner.offload_while_sampling=true",
        ],
        "learner.offload.optimizer=cpu keeps off the GPU at all times",
    ),
    "nccl": ([*GPUS, "cluster.transport=nccl"], "cluster.transport=nccl cannot join"),
    "its own nodes": (["cluster.launch.learner_nodes=1"], "cluster.launch.learner_nodes=1"),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name):
    assert load([*ON, *ACCEPTED[name], "run_dir=x"]).schedule.colocated


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_a_sentence(name):
    words, says = REFUSED[name]
    with pytest.raises(UserError) as refused:
        load([*ON, *words, "run_dir=x"])
    sentence = str(refused.value)
    assert says in sentence, sentence
    assert sentence.endswith(".")


def test_offloading_for_engines_needs_engines_on_the_same_gpus():
    with pytest.raises(UserError, match=r"learner\.offload_while_sampling=true frees memory"):
        load(["learner.offload_while_sampling=true", "run_dir=x"])


DRAFT = ["actor=draft", "actor.draft.draft_path=x", "learner=gpu"]


@pytest.mark.parametrize("words, processes", [([], 3), (["learner.draft={}"], 4)])
def test_a_draft_runs_on_shares_of_one_gpu(words, processes):
    shares = ["learner.num_gpus=0.25", "actor.draft.num_gpus=0.25"]
    memory = ["actor.draft.gpu_memory_utilization=0.3"]
    c = load([*DRAFT, *words, *shares, *memory, "run_dir=x"])
    assert derived.needed(c)[1] == 0.25 * processes
    assert tied_by(c) is None and shared_places(c) is None  # nothing is paired
