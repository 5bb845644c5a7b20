"""Memory by role in a dry run, of models whose weights are not there: a file of the right size
without content, behind a real header."""

import json
import math
import string

import pytest

from rlcore.cli import main
from rlcore.commands import start_checks
from rlcore.models.fresh import build_char_tokenizer
from rlcore.weights.experts import single_shapes

QWEN3_32B = {
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
QWEN3_1_7B = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
QWEN3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
QWEN3_235B = {
    "hidden_size": 4096,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}


def hollow_folder(folder, kind, settings):
    """A model folder of these sizes that takes no space."""
    import torch
    import transformers

    config = getattr(transformers, kind)(max_position_embeddings=131072, **settings)
    config.save_pretrained(folder)
    build_char_tokenizer(string.printable).save_pretrained(folder)
    with torch.device("meta"):
        lm = transformers.AutoModelForCausalLM.from_config(config)
    lm.tie_weights()
    shapes = {}
    for name, p in lm.named_parameters():
        shapes |= single_shapes(name, tuple(p.shape))
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        f.truncate(8 + len(text) + at)
    return at / 2


ROOM = ("cluster.launch.gpus_per_node=12", "cluster.launch.idle_gpus=allow")


def words(tmp_path, experiment, *more):
    row = json.dumps({"problem": "1+1", "solution": "\\boxed{2}", "answer": "2"})
    (tmp_path / "d.jsonl").write_text("\n".join([row] * 600))
    data = [f"task.args.{part}_path={tmp_path}/d.jsonl" for part in ("train", "heldout")]
    run = [f"experiment={experiment}", f"model.path={tmp_path}/m", f"run_dir={tmp_path}/x"]
    return ["train", "dry_run=true", *run, *data, *more]


@pytest.fixture
def no_cluster(monkeypatch):
    """On a machine without GPUs, so that the cluster itself is not looked at."""
    monkeypatch.setattr(start_checks, "check_cluster", lambda *args, **kwargs: None)


def test_a_dense_model_of_32b_fits_16_gpus_and_is_refused_on_fewer_ranks(
    tmp_path, capsys, no_cluster
):
    parameters = hollow_folder(tmp_path / "m", "Qwen3Config", QWEN3_32B)
    assert 32.7e9 < parameters < 32.9e9
    assert main(words(tmp_path, "dense_32b_16gpus")) == 0, capsys.readouterr().err
    shown = capsys.readouterr().out
    assert "16 GPUs on" in shown
    for part in (
        "memory       learner rank: 68.",
        "masters and moments 30.5",
        "actor.fp8 rank: ",
        "weights 15.3",
        "learner rank's host: ",
        "checkpoint 30.5",
    ):
        assert part in shown, (part, shown)
    fewer = ("learner.ranks=8", "cluster.launch.idle_gpus=allow")
    assert main(words(tmp_path, "dense_32b_16gpus", *fewer)) == 2
    said = capsys.readouterr().err
    for part in ("cluster.launch.gpu_memory_gib=79", "learner rank 79.0 GiB", "moments 45.8"):
        assert part in said, (part, said)
    assert "raise learner.ranks" in said and "learner.offload.optimizer=cpu" in said
    moved = (*fewer, "learner.offload.optimizer=cpu")
    assert main(words(tmp_path, "dense_32b_16gpus", *moved)) == 0, capsys.readouterr().err
    assert "states on the host 45.8" in capsys.readouterr().out
    tight = ("cluster.launch.gpu_memory_gib=72", "actor.fp8.gpu_memory_utilization=0.2")
    assert main(words(tmp_path, "dense_32b_16gpus", *tight)) == 2
    assert "raise actor.fp8.tensor_parallel" in capsys.readouterr().err


def test_a_mixture_on_64_gpus_is_refused_with_the_numbers_where_it_does_not_fit(
    tmp_path, capsys, no_cluster
):
    parameters = hollow_folder(tmp_path / "m", "Qwen3MoeConfig", QWEN3_235B)
    assert 234e9 < parameters < 236e9
    assert main(words(tmp_path, "experts_64gpus")) == 2
    said = capsys.readouterr().err
    assert "learner rank 79.0 GiB" in said and "masters and moments 54.7" in said
    # with room enough, what engines on GPUs do not take yet is what remains
    assert main(words(tmp_path, "experts_64gpus", "cluster.launch.gpu_memory_gib=160")) == 2
    assert "which actor.bf16.num_gpus=1 cannot serve yet" in capsys.readouterr().err


def test_a_long_context_fits_ranks_that_hold_parts_of_it(tmp_path, capsys, no_cluster):
    hollow_folder(tmp_path / "m", "Qwen3Config", QWEN3_8B)
    assert main(words(tmp_path, "long_context")) == 0, capsys.readouterr().err
    assert "8 GPUs on" in capsys.readouterr().out
    assert main(words(tmp_path, "long_context", "learner.sequence_parallel=1")) == 2
    said = capsys.readouterr().err
    assert "learner rank 79.0 GiB" in said and "learner.sequence_parallel" in said


def test_memory_is_printed_of_a_run_on_cpus(tmp_path, capsys):
    assert main(["train", "dry_run=true", "experiment=quickstart", f"run_dir={tmp_path}/x"]) == 0
    assert "learner rank: 0.3 GiB: " in capsys.readouterr().out


def test_a_learner_that_waits_must_fit_beside_the_engine_that_has_the_gpu(
    tmp_path, capsys, no_cluster
):
    hollow_folder(tmp_path / "m", "Qwen3Config", QWEN3_1_7B)
    card = "cluster.launch.gpu_memory_gib=80"
    assert main(words(tmp_path, "rapid_8gpus", card)) == 0, capsys.readouterr().err
    shown = capsys.readouterr().out
    assert "8 GPUs on" in shown and "on the same GPUs" in shown
    assert (
        "learner rank while engines sample: 5.6 GiB: weights 3.2, masters and moments 2.4" in shown
    )
    large = "actor.bf16.gpu_memory_utilization=0.95"
    assert main(words(tmp_path, "rapid_8gpus", card, large)) != 0
    refused = capsys.readouterr().err
    assert "leaves 4.0 GiB beside actor.bf16.gpu_memory_utilization=0.95" in refused
    assert "keeps 5.6 GiB" in refused and "learner.offload_while_sampling=true" in refused
    offload = "learner.offload_while_sampling=true"
    assert main(words(tmp_path, "rapid_8gpus", card, large, offload)) == 0, capsys.readouterr().err
    assert "while engines sample: 3.2 GiB: weights 3.2" in capsys.readouterr().out


def test_a_critic_with_a_model_of_its_own_is_counted(tmp_path, capsys, no_cluster):
    hollow_folder(tmp_path / "m", "Qwen3Config", QWEN3_32B)
    ppo = words(tmp_path, "dense_32b_16gpus", "algorithm.advantage=gae", "algorithm.credit=token")
    assert main([*ppo, "critic=model"]) == 2
    said = capsys.readouterr().err
    assert "gpu_memory_gib=79" in said and "critic " in said and "raise learner.ranks" in said
    assert main([*ppo, "critic=model", "critic.lora={}"]) == 0, capsys.readouterr().err
    assert "critic " in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["kubernetes", "slurm"])
def test_the_learners_own_nodes_hold_what_its_ranks_keep(kind, tmp_path, capsys, no_cluster):
    hollow_folder(tmp_path / "m", "Qwen3Config", QWEN3_32B)
    launch = (f"cluster.launch.kind={kind}", "cluster.launch.nodes=3", *ROOM)
    nodes = ("cluster.launch.learner_nodes=1", "cluster.launch.memory_gib_per_node=64")
    run = words(tmp_path, "dense_32b_16gpus", *launch, *nodes)
    assert main(run) == 2
    said = capsys.readouterr().err
    assert "learner_memory_gib_per_node=64 is less than what 12 learner ranks need" in said, said
    assert "checkpoint 30.5" in said
    larger = "cluster.launch.learner_memory_gib_per_node=900"
    assert main([*run, larger]) == 0, capsys.readouterr().err


def test_the_models_of_teachers_are_counted(tmp_path, capsys, no_cluster):
    hollow_folder(tmp_path / "m", "Qwen3Config", QWEN3_32B)
    hollow_folder(tmp_path / "small", "Qwen3Config", QWEN3_1_7B)
    base = words(tmp_path, "dense_32b_16gpus", "algorithm=distill")

    def teacher(*more):
        assert main([*base, *more]) == 0
        line = next(x for x in capsys.readouterr().out.splitlines() if "learner rank:" in x)
        return line.partition("teacher ")[2].split(",")[0]

    # 32.76e9 and 1.72e9 parameters in bfloat16 over 12 ranks of ZeRO-3, in GiB
    assert teacher("teacher=frozen", f"teacher.path={tmp_path / 'm'}") == "5.1"
    assert teacher("teacher=frozen", f"teacher.path={tmp_path / 'small'}") == "0.3"
    assert teacher("teacher=policy") == ""


def test_the_engine_of_a_teacher_has_a_gpu_of_its_own_and_its_memory(tmp_path, capsys, no_cluster):
    hollow_folder(tmp_path / "m", "Qwen3Config", QWEN3_32B)
    hollow_folder(tmp_path / "small", "Qwen3Config", QWEN3_1_7B)
    base = words(tmp_path, "dense_32b_16gpus", "algorithm=distill", *ROOM)
    assert main([*base, "teacher=policy"]) == 0
    gpus = [x for x in capsys.readouterr().out.splitlines() if x.startswith("resources")]
    engine = [*base, "teacher=engine", "teacher.engine.num_gpus=1"]
    assert main([*engine, f"teacher.path={tmp_path / 'small'}"]) == 0
    said = capsys.readouterr().out
    more = [x for x in said.splitlines() if x.startswith("resources")]
    assert "16 GPUs" in gpus[0] and "17 GPUs" in more[0]
    line = next(x for x in said.splitlines() if "teacher.engine rank:" in x)
    assert "weights 3.2" in line  # 1.72e9 parameters in bfloat16, in GiB
    assert "arriving weights" not in line
    large = [*engine, f"teacher.path={tmp_path / 'm'}"]
    assert main(large) == 2  # 61 of 55 GiB
    assert "raise teacher.engine.tensor_parallel" in capsys.readouterr().err
    assert main([*large, "teacher.engine.tensor_parallel=2"]) == 0


def test_a_teacher_of_another_vocabulary_is_refused(tmp_path, capsys, no_cluster):
    hollow_folder(tmp_path / "m", "Qwen3Config", QWEN3_32B)
    hollow_folder(tmp_path / "other", "Qwen3Config", {**QWEN3_1_7B, "vocab_size": 32000})
    path = f"teacher.path={tmp_path / 'other'}"
    assert main(words(tmp_path, "dense_32b_16gpus", "teacher=frozen", path)) == 2
    said = capsys.readouterr().err
    assert f"teacher.path={tmp_path / 'other'} has another vocabulary" in said
    assert "vocab_size is 32000" in said
