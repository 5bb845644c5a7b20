"""What `rlcore doctor` says of keys that need a GPU."""

from rlcore.commands.about import GpuMachine, lacking

WHOLE = frozenset({"vllm", "triton", "flash_attn"})


def test_a_machine_of_cpus_lacks_a_gpu_for_every_key():
    said = dict(lacking(GpuMachine(0, (0, 0), frozenset())))
    assert all(what.startswith("a GPU") for what in said.values())
    assert "PROFILE=cuda" in said["actor.*.num_gpus=1"]


def test_what_is_there_is_not_said_to_be_lacking():
    assert set(dict(lacking(GpuMachine(8, (9, 0), WHOLE))).values()) == {""}


def test_each_key_names_its_own_lack():
    def lacks(machine):
        return {key for key, what in lacking(machine) if what}

    assert lacks(GpuMachine(1, (9, 0), WHOLE)) == {
        "cluster.transport=nccl",
        "actor.*.tensor_parallel=2",
    }
    assert lacks(GpuMachine(2, (9, 0), WHOLE - {"flash_attn"})) == {
        "learner.attention=flash_attention_2"
    }
    said = dict(lacking(GpuMachine(2, (8, 0), WHOLE)))
    assert "8.9 (this one has 8.0)" in said["actor.*.kind=fp8 rounding=none"]
    without = dict(lacking(GpuMachine(2, (9, 0), WHOLE - {"triton"})))
    assert {key for key, what in without.items() if what == "triton"} == {
        "actor.*.kind=sparse num_gpus=1",
        "actor.*.second_runner=true",
    }
