"""Where roles would be on the nodes of cluster.launch, and a word on GPUs that none would use."""

import pytest

from rlcore.commands.node_places import check_idle, placed, roles
from rlcore.config.compose import load
from rlcore.errors import UserError

GPUS = ("actor.bf16.num_gpus=1", "learner.num_gpus=1", "learner.zero_stage=1")


def config(*words):
    return load(["experiment=quickstart", "run_dir=x", "cluster=slurm", *words])


def launch(**keys):
    return [f"cluster.launch.{key}={value}" for key, value in keys.items()]


def test_roles_are_listed_by_node_with_those_of_the_learner_on_its_own():
    words = launch(nodes=3, learner_nodes=1, cpus_per_node=2)
    found = placed(config(*words, "actor.bf16.count=2", "actor.bf16.num_cpus=2"))
    assert [str(machine) for machine in found] == [
        "node 1: 1 x learner rank (1 of 2 CPUs)",
        "node 2: 1 x actor.bf16 (2 of 2 CPUs)",
        "node 3: 1 x actor.bf16 (2 of 2 CPUs)",
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            [*launch(nodes=1, cpus_per_node=1), "actor.bf16.count=100"],
            r"nodes=1 with cluster\.launch\.cpus_per_node=1 .* all but \d+ x actor\.bf16, each of "
            r"1 CPUs on one node",
        ),
        # enough of all nodes together, of none alone
        (
            [*launch(nodes=3, cpus_per_node=2), "actor.bf16.num_cpus=3"],
            r"all but 1 x actor\.bf16, each of 3 CPUs on one node",
        ),
        (
            [*launch(nodes=2, learner_nodes=1, cpus_per_node=2), "learner.ranks=3"],
            r"all but 1 x learner rank, each of 1 CPUs on one of the learner's node",
        ),
        (
            [
                *launch(nodes=2, learner_nodes=1, cpus_per_node=8, learner_cpus_per_node=2),
                "learner.ranks=3",
            ],
            r"learner_cpus_per_node=2 and .*all but 1 x learner rank, each of 1 CPUs on one of the "
            r"learner's node",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_role(words, said):
    with pytest.raises(UserError, match=said):
        placed(config(*words))


def idle(*words):
    found = config(*words)
    return [*check_idle(found, placed(found))]


@pytest.mark.parametrize(
    ("words", "used", "remedy"),
    [
        (
            launch(nodes=2, gpus_per_node=8),
            "0 of the 16 GPUs",
            "ask for cluster.launch.gpus_per_node=0",
        ),
        (
            [*launch(nodes=1, gpus_per_node=8), *GPUS],
            "2 of the 8 GPUs",
            "set actor.bf16.count=7, or ask for cluster.launch.nodes=1 "
            "cluster.launch.gpus_per_node=2",
        ),
        (
            [*launch(nodes=2, gpus_per_node=4, learner_nodes=1), *GPUS],
            "2 of the 8 GPUs",
            "set actor.bf16.count=4 learner.ranks=4, or ask for cluster.launch.nodes=2 "
            "cluster.launch.gpus_per_node=1",
        ),
        (
            [*launch(nodes=2, gpus_per_node=4, learner_nodes=1, learner_gpus_per_node=2), *GPUS],
            "2 of the 6 GPUs",
            "set actor.bf16.count=4 learner.ranks=2, or ask for cluster.launch.nodes=2 "
            "cluster.launch.learner_gpus_per_node=1 cluster.launch.gpus_per_node=1",
        ),
    ],
    ids=["none", "shared", "own", "unlike"],
)
def test_idle_gpus_are_refused_with_keys_that_would_use_all(words, used, remedy):
    with pytest.raises(UserError) as error:
        idle(*words)
    said = str(error.value)
    assert used in said and f": {remedy}, or cluster.launch.idle_gpus=allow." in said
    (line,) = idle(*words, "cluster.launch.idle_gpus=allow")
    assert line.endswith(f"{remedy} would use all") and used in line
    for part in remedy.split(", or ask for "):
        keys = [word for word in part.split() if "=" in word]
        assert idle(*words, *keys) == []


def test_all_gpus_used_need_no_word():
    assert idle(*launch(nodes=1, gpus_per_node=2), *GPUS) == []


def test_the_head_of_kubernetes_holds_no_gpu():
    words = launch(kind="kubernetes", nodes=2, learner_nodes=1, head_cpus=4)
    found = placed(config(*words))
    assert [machine.name for machine in found] == ["head", "node 1", "node 2"]
    assert sum(len(machine.roles) for machine in found) == len(roles(config(*words)))
