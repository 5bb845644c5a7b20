"""`rlcore doctor`: a run's own engine against its own learner, and keys that need a GPU."""

import json

import pytest

from rlcore.advisor.doctor import smallest_run
from rlcore.cli import main
from rlcore.commands.about import GpuMachine, lacking


def _doctor(command, small, *words, code=0):
    run = command(
        "doctor", *small, "schedule.groups_per_step=64", "schedule=on_policy", "json=true", *words
    )
    assert run.wait() == code, run.text[-3000:]
    return json.loads(run.text[run.text.index('{\n "machine"') :])["run"]


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.ranks
def test_a_precise_actor_needs_no_correction_and_a_rounded_one_does(command, small):
    same = _doctor(command, small, "correction=none")
    assert same["starts"] and same["tokens"] > 100
    assert same["mismatch"]["abs_dlogp_max"] < 1e-3 and same["mismatch"]["ess"] > 0.999
    assert same["advice"]["use"] == [] and same["advice"]["configured"].endswith("fits.")
    rounded = ("actor=fp8", "actor.fp8.rounding=int4")
    coarse = _doctor(command, small, *rounded)
    assert coarse["mismatch"]["abs_dlogp_mean"] > 10 * same["mismatch"]["abs_dlogp_mean"]
    assert coarse["advice"]["use"] != []
    worst = [abs(token["log_ratio"]) for token in coarse["worst_tokens"]]
    assert worst == sorted(worst, reverse=True) and worst[0] > 0.01


@pytest.mark.parametrize(
    "words, said",
    [
        (["start=maybe"], "start=maybe"),
        (["gpu=h100"], "gpu=h100 forecasts a run"),
        (["experiment=quickstart", "shape=qwen3-8b"], "rates=FILE or gpu=NAME"),
        (["learner.nothing=1"], "learner.nothing"),
        (["json=yes"], "json=yes"),
    ],
)
def test_wrong_words_are_refused(words, said, capsys):
    assert main(["doctor", *words]) == 2
    assert said in capsys.readouterr().err


def test_the_smallest_run_is_on_a_gpu_where_vllm_runs_on_gpus():
    for gpus, packages, share in [(0, {"vllm"}, 0), (2, set(), 0), (1, {"vllm"}, 0.5)]:
        config = smallest_run(GpuMachine(gpus, (9, 0), frozenset(packages)))
        assert config.learner.num_gpus == share
        assert config.actor["bf16"].num_gpus == share


# What `rlcore doctor` says of keys that need a GPU.


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
