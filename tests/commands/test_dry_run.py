"""`rlcore train ... dry_run=true`: every check before a start, what would be started, nothing
started."""

import json
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
from rlcore.models.fresh import build_fresh_model
from rlcore.models.specs import FreshModelSpec

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
