"""`rlcore train ... dry_run=true`: every check before a start, what would be started, memory by
role; nothing is started."""

import json
import math
import re
import socket
import string

import pytest
import ray
from ray.cluster_utils import Cluster

from rlcore.cli import main
from rlcore.commands import start_checks
from rlcore.config.compose import load, to_yaml
from rlcore.loop import checkpoint
from rlcore.models.fresh import build_char_tokenizer, build_fresh_model
from rlcore.models.specs import FreshModelSpec
from rlcore.weights.experts import single_shapes

WORDS = ("train", "experiment=quickstart", "dry_run=true")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def printed(capsys, *words):
    assert main([*WORDS, *words]) == 0
    return capsys.readouterr().out


def refused(capsys, *words):
    assert main([*WORDS, *words]) == 2
    said = capsys.readouterr()
    assert "passed" not in said.out
    (sentence,) = said.err.strip().splitlines()
    return sentence


def test_what_would_be_started_is_printed_and_nothing_is_written(tmp_path, capsys):
    shown = printed(capsys, "run_dir=runs/x", "actor=[bf16,fp8]", "actor.bf16.count=2")
    for part in (
        "nothing is started",
        f"{tmp_path}/runs/x, new, to step 150",
        "fresh, 1.6 M parameters, after 60 supervised steps",
        "actor.bf16: the policy in float32; 2 x vllm, 1 CPU and 0 GPUs each",
        "actor.fp8: fp8 emulated",
        "tis: cap=2 floor=0 level=token normalised=false adjusted=false",
        "150 steps of 64 prompts x 8 samples, weights published every 1 step",
        "at most 1 step behind",
        "1 rank of deepspeed, ZeRO-0, float32 on cpu",
        "4 CPUs and 0 GPUs on a cluster of this machine",
        "6.1 MiB of weights a publication, in float32 by object_store",
        f"{tmp_path}/runs/x/metrics.jsonl",
        f"{tmp_path}/runs/x/wandb/",
    ):
        assert part in shown, part
    assert not ray.is_initialized() and not list(tmp_path.iterdir())


def test_what_bounds_the_steps_in_flight_is_said(capsys):
    late = printed(capsys, "run_dir=x", "schedule=async", "schedule.max_staleness=4")
    assert "samples are up to 4 steps old; steps are shortened or held" in late
    off = printed(capsys, "run_dir=x", "learner.step_bound=null")
    assert "nothing bounds the steps meanwhile (learner.step_bound=null)" in off
    for fresh in (("schedule=on_policy",), ("schedule=large_batch",)):
        assert "steps are shortened" not in printed(capsys, "run_dir=x", *fresh)


def test_the_form_of_episodes_is_said(capsys):
    words = ("run_dir=runs/x", "task=higher_lower", "environment=higher_lower")
    assert "episodes     plain text, without tools" in printed(capsys, *words)


def test_phases_are_shown_and_a_clip_that_cannot_bind_is_said(tmp_path, capsys):
    assert "the clip of algorithm.loss=ppo never binds" in printed(
        capsys, "run_dir=x", "algorithm.eps_high=0.3"
    )
    words = ("algorithm.eps_high=0.3", "schedule.steps_per_phase=2", "schedule.epochs=3")
    shown = printed(capsys, "run_dir=x", *words)
    assert "one p_ref for 2 batches x 3 epochs" in shown and "never binds" not in shown
    assert "published every 6 steps" in printed(
        capsys, "run_dir=x", *words, "schedule=on_policy", "schedule.on_publish=finish"
    )


def test_no_correction_is_said(capsys):
    assert "none: the mismatch is measured" in printed(capsys, "run_dir=x", "correction=none")


def checkpointed(run_dir):
    with checkpoint.new_checkpoint(run_dir / "checkpoints", 7) as folder:
        for part in checkpoint.PARTS:
            (folder / part).parent.mkdir()
            (folder / part).write_text("{}")
        (folder / checkpoint.STATE).write_text(
            json.dumps({"progress": {"step": 7}, "prompts": {"cursor": 70}})
        )


def test_a_resume_is_shown_and_left_alone(tmp_path, capsys):
    checkpointed(tmp_path / "x")
    before = sorted(tmp_path.rglob("*"))
    assert "continues from step_000007" in printed(capsys, "run_dir=x", "resume=auto")
    (tmp_path / "x" / "metrics.jsonl").write_text('{"step": 1}\n')
    assert "ends at step 1 and the run continues from step 7" in refused(
        capsys, "run_dir=x", "resume=auto"
    )
    assert sorted(tmp_path.rglob("*")) == sorted([*before, tmp_path / "x" / "metrics.jsonl"])


def test_a_resume_that_would_go_on_with_other_problems_is_refused(tmp_path, capsys):
    checkpointed(tmp_path / "x")
    started = to_yaml(load(["experiment=quickstart", "run_dir=x"]))
    (tmp_path / "x" / "config.yaml").write_text(started)
    changed = ("run_dir=x", "resume=auto", "task.args.max_digits=9")
    assert "task.args.max_digits=9 cannot be resumed with" in refused(capsys, *changed)
    assert "continues from" in printed(capsys, "run_dir=x", "resume=auto", "learner.lr=1e-5")
    # a run that has no checkpoint yet begins anew, with whatever it is given
    (tmp_path / "x" / "checkpoints" / "step_000007").rename(tmp_path / "elsewhere")
    assert "new" in printed(capsys, *changed)


def test_more_log_probs_than_the_vocabulary_has_are_shown_as_the_vocabulary(capsys):
    shown = printed(capsys, "run_dir=x", "rollout.logprobs_k=1000")
    assert "rollout.logprobs_k=1000 is above the model's vocabulary of 64 tokens" in shown
    assert "logprobs_k=64" in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["learner.lrr=1"], "learner.lr"),
        (["cluster.num_cpus=1"], "cluster.num_cpus=1 is too few"),
        (["actor.bf16.num_gpus=64"], "actor.bf16.num_gpus=64"),
        (["cluster.address=127.0.0.1:1"], "cluster.address=127.0.0.1:1 does not answer"),
        (["cluster.address=abc"], "cluster.address=abc is not accepted"),
        (["cluster.buffer_mib=1", "rollout.samples_per_prompt=64"], "cluster.buffer_mib=1"),
        (
            ["model.fresh.hidden_size=1024", "model.fresh.intermediate_size=8192"],
            "cluster.object_store_mib=200 is smaller than one publication",
        ),
    ],
)
def test_what_a_run_would_refuse_is_refused(capsys, words, said):
    words = ["run_dir=x", "cluster.object_store_mib=200", *words]
    assert said in refused(capsys, *words)


def test_a_port_that_is_taken_is_refused(capsys):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        key = f"learner.port={s.getsockname()[1]}"
        assert key in refused(capsys, "run_dir=x", key)


@pytest.mark.cluster
def test_a_cluster_that_exists_is_asked_for_an_answer_and_not_joined(capsys):
    """A dry run of a cluster that hangs would hang too: the start looks at what it holds."""
    nodes = Cluster()
    try:
        nodes.add_node(num_cpus=2, include_dashboard=False, object_store_memory=10**8)
        joined = ("run_dir=x", f"cluster.address={nodes.address}")
        assert f"2 CPUs and 0 GPUs on the cluster at {nodes.address}" in printed(capsys, *joined)
        assert not ray.is_initialized()
        shown = printed(capsys, *joined, "actor.bf16.count=2")
        assert "not joined: whether it holds these roles is seen as the run starts" in shown
        assert not ray.is_initialized()
    finally:
        ray.shutdown()
        nodes.shutdown()
    assert "does not answer" in refused(capsys, *joined)


def test_a_run_directory_that_holds_a_run_is_refused(tmp_path, capsys):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "metrics.jsonl").write_text('{"step": 1}\n')
    assert "resume=auto" in refused(capsys, "run_dir=x")
    (tmp_path / "file").write_text("")
    assert "run_dir=" in refused(capsys, "run_dir=file/x")


def test_a_folder_of_models_that_cannot_be_written_is_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    kept = "model.warmup.cache_dir=file/warm"
    assert "cache_dir=" in refused(capsys, "run_dir=x", kept)


GPU_EXPERIMENTS = {
    "fp8_8xh100": (
        "4 x vllm, 1 CPU and 1 GPU each",
        "4 ranks of deepspeed, ZeRO-3, bfloat16 on cuda",
        "8 GPUs on",
        "by nccl",
    ),
    "sparse_h200": (
        "block top-k attention, 32 pages of 16 tokens",
        "1 x vllm, 1 CPU and 0.5 GPUs each",
        "1 rank of deepspeed",
        "and 1 GPU on",
        "by ipc",
    ),
    "fp8_4nodes": (
        "8 x vllm of 2 ranks, 1 CPU and 2 GPUs each",
        "16 ranks of deepspeed",
        "32 GPUs on",
        "by nccl",
    ),
}


@pytest.mark.parametrize("experiment", sorted(GPU_EXPERIMENTS))
def test_gpu_experiments_show_their_roles_and_gpus(experiment, tmp_path, capsys, monkeypatch):
    """On a machine without GPUs, so that the cluster itself is not looked at."""
    monkeypatch.setattr(start_checks, "check_cluster", lambda *args, **kwargs: None)
    shape = FreshModelSpec(hidden_size=64, layers=1, heads=4, kv_heads=2, head_dim=16)
    build_fresh_model(tmp_path / "m", string.printable, shape, seed=0, max_len=16384)
    row = json.dumps({"problem": "1+1", "solution": "\\boxed{2}", "answer": "2"})
    (tmp_path / "d.jsonl").write_text("\n".join([row] * 600))
    data = [f"task.args.{part}_path={tmp_path}/d.jsonl" for part in ("train", "heldout")]
    words = [f"experiment={experiment}", f"model.path={tmp_path}/m", *data]
    assert main(["train", "dry_run=true", "run_dir=x", *words]) == 0, capsys.readouterr().err
    shown = capsys.readouterr().out
    for part in GPU_EXPERIMENTS[experiment]:
        assert part in shown, (part, shown)


def test_a_dry_run_forecasts_its_pace_where_rates_are_given(tmp_path, capsys):
    assert "forecast     none: rates=FILE" in printed(capsys, "run_dir=x")
    rates = tmp_path / "rates.json"
    given = {
        "actor": {"decode_s": 0.001, "max_running": 64, "load_s": 0.001},
        "learner": {"step_s": 2.0, "token_s": 0.0, "publish_s": 0.001},
        "lengths": {"prompt": 7, "median": 7},
        "grade_s": 1e-4,
    }
    rates.write_text(json.dumps(given))
    shown = printed(capsys, "run_dir=x", "schedule.groups_per_step=8", f"rates={rates}")
    assert re.search(r"forecast     2(\.0\d)? s a step, 150 steps in 5(\.\d\d)? minutes", shown)
    assert "1 at most" in shown and "pace set by: learner" in shown


def test_words_of_a_forecast_that_do_not_fit_a_dry_run_are_refused(capsys):
    assert "either rates=FILE or gpu=NAME" in refused(capsys, "run_dir=x", "spread=0.5")
    assert "actors=1,2 is not a key of rlcore train: it is a key of rlcore plan" in refused(
        capsys, "run_dir=x", "gpu=h100", "actors=1,2"
    )


def test_the_held_out_prompts_that_an_evaluation_uses_are_counted(tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1 2", "answer": "3"}\n' * 3)
    more = f"evaluation.tasks.few={{name: file, args: {{heldout_path: {rows}, grader: {rows}:f}}}}"
    (tmp_path / "grader.py").write_text("def grade(item, response):\n    return 0.0\n")
    more = more.replace(f"grader: {rows}:f", f"grader: '{tmp_path}/grader.py:grade'")
    shown = printed(capsys, "run_dir=runs/x", "evaluation.prompts=50")
    assert "on digits: 50 prompts, " in shown
    shown = printed(capsys, "run_dir=runs/x", "evaluation.prompts=50", more)
    said = "50 prompts of digits, 3 prompts of few (evaluation.prompts=50; few: all there are), "
    assert said in shown
    with rows.open("a") as file:
        file.write('{"prompt": "1 2 3 4 5", "answer": "3"}\n')
    short = ", overlong_rows: skip, max_prompt_tokens: 5}"
    shown = printed(capsys, "run_dir=runs/x", "evaluation.prompts=50", more[:-1] + short)
    assert said in shown
    assert "few: 1 of 4 heldout prompts have more than 5 tokens and are left out" in shown


# With a model of their own; `test_config_compose.py` has the settings of all.
FRESH = (
    "agent_quickstart diffusion diffusion_sudoku distill_sparse draft_cotrain draft_frozen "
    "dvp_mis_veto large_batch_jackpot mixed_fleet quickstart rapid sparse_training_free "
    "tools_quickstart"
)


@pytest.mark.parametrize("experiment", FRESH.split())
def test_a_shipped_experiment_s_dry_run_warns_of_nothing(experiment, capfd, recwarn):
    code = main(["train", f"experiment={experiment}", "run_dir=x", "dry_run=true"])
    shown, errors = capfd.readouterr()
    assert code == 0, errors
    assert not re.search("warn(?!-up)|not read|clip.* never", shown + errors, re.I)
    assert not recwarn.list


# Memory by role in a dry run, of models whose weights are not there: a file of the right size
# without content, behind a real header.


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
