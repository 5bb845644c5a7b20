"""Whole runs on actors that are cheaper than the policy, equal to the bit, or taught."""

import json
import signal
from pathlib import Path

import numpy as np
import pytest
from conftest import left_over, rows, without_times
from equal_bits import skip_where_they_differ
from safetensors.numpy import load_file

from rlcore.models.fresh import build_fresh_model
from rlcore.models.specs import FreshModelSpec

# 81 tokens in 6 pages of 16: a budget of 2 bites
LONG = (
    "model.max_len=96",
    "task.args={op:copy,min_digits:40,max_digits:40,credit:digits}",
    "rollout.max_new_tokens=44",
    "schedule=on_policy",
    "schedule.groups_per_step=4",
    "model.warmup.steps=20",
    "model.warmup.batch_size=16",
)
LORA = ("learner=lora", "learner.lr=2e-3")
SPARSE_ALONE = (*LONG, "actor=sparse", "actor.sparse.sparse.blocks=2")
SPARSE = (*SPARSE_ALONE, "evaluation.dense_actor=true")
BEST = ("algorithm.train_on_best=3",)
DRAFT = ("actor.draft.draft_fresh.hidden_size=32", "actor.draft.draft_fresh.layers=1")


def _run(command, *words, code=0):
    run = command(*words)
    assert run.wait() == code, run.text[-3000:]
    return run


def _kinds(run_dir):
    records = [
        json.loads(line)
        for f in (run_dir / "samples").glob("step_*")
        for line in f.read_text().splitlines()
    ]
    return {r["actor_kind"] for r in records}


@pytest.mark.engine
@pytest.mark.ranks
def test_emulated_precision_is_called_by_its_name(command, small, tmp_path):
    run_dir = tmp_path / "run"
    run = _run(
        command,
        "train",
        *small,
        "actor=fp8",
        f"run_dir={run_dir}",
        "schedule=on_policy",
        "schedule.steps=2",
    )
    assert "fp8 emulated" in run.text
    assert _kinds(run_dir) == {"fp8_emulated"}
    assert "fp8_emulated" in (run_dir / "report.html").read_text()
    assert all(
        r["mismatch/abs_dlogp_mean"] > 1e-3 for r in rows(run_dir)
    )  # rounded again at every update


@pytest.mark.engine
@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["int3", "nvfp4"])
def test_a_learner_that_rounds_as_its_actors_has_no_mismatch(command, small, tmp_path, kind):
    """Also after updates: actors round what was published, the learner what it trains."""
    words = (*small, "actor=fp8", f"actor.fp8.rounding={kind}", "schedule=on_policy")
    found = {}
    for round_as in ("null", "fp8"):
        run_dir = tmp_path / round_as
        own = ("correction=none", "schedule.steps=3", f"learner.round_as={round_as}")
        _run(command, "train", *words, *own, f"run_dir={run_dir}")
        assert _kinds(run_dir) == {f"{kind}_emulated"}
        found[round_as] = [r["mismatch/kl_k3"] for r in rows(run_dir)]
    assert len(found["fp8"]) == 3 and all(abs(kl) < 1e-6 for kl in found["fp8"])
    assert all(kl > 1e-3 for kl in found["null"])
    form, out = {"int3": "rounded", "nvfp4": "compressed-tensors"}[kind], tmp_path / "out"
    _run(command, "export", f"run_dir={tmp_path / 'fp8'}", f"out={out}", f"format={form}")
    stem = "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(out / "model.safetensors") if kind == "int3" else None
    config = json.loads((out / "config.json").read_text())
    if tensors is not None:
        assert len(np.unique(tensors[stem])) == 7 and "quantization_config" not in config
    else:
        assert config["quantization_config"]["format"] == "nvfp4-pack-quantized"
    assert f"14 matrices rounded to {kind}" in (out / "README.md").read_text()


def distilling(publish):
    return f"learner.distill={{lr:1e-2,lora:{{publish:{publish}}}}}"


@pytest.fixture(scope="module")
def distilled(small, finished, tmp_path_factory):
    """A run of four steps whose sparse actors sample from a copy that is distilled."""
    run_dir = tmp_path_factory.mktemp("distilled") / "run"
    words = (*small, *SPARSE, *BEST, distilling("merged"), "cluster.transport=disk")
    finished("train", *words, f"run_dir={run_dir}", "schedule.steps=4")
    return run_dir


@pytest.mark.engine
@pytest.mark.ranks
def test_a_policy_trained_through_the_actors_attention_has_no_mismatch(
    command, small, distilled, tmp_path
):
    run_dir = tmp_path / "run"
    words = (*small, *SPARSE_ALONE, "learner.train_sparse=true", "schedule.steps=2")
    _run(command, "train", *words, f"run_dir={run_dir}")
    assert _kinds(run_dir) == _kinds(distilled) == {"sparse"}
    # before its first step the copy is the policy, which is scored densely there
    other = rows(distilled)[0]
    for same in rows(run_dir):
        assert same["mismatch/abs_dlogp_mean"] < 1e-4
        assert other["mismatch/abs_dlogp_mean"] > 10 * same["mismatch/abs_dlogp_mean"]


@pytest.mark.engine
@pytest.mark.ranks
@pytest.mark.slow
def test_pages_by_position_follow_their_set_point(command, small, tmp_path):
    """The copy attends to the pages that sampled each record, whatever the rule in force, those of
    prompts chosen by blocks; a run that was resumed moves them as one that was not."""
    words = ("train", *small, *LONG, "actor=sparse", distilling("merged"))
    pages = "actor.sparse.sparse={blocks:null,blocks_by_length:[2,2,2],length_step:32}"
    blocks = ("actor.sparse.sparse.prompt=block", "actor.sparse.sparse.prompt_block=32")
    target = "actor.sparse.target={moves:pages,value:0.95,rate:0.4,band:0}"
    words = (*words, pages, *blocks, target)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    _run(command, *words, f"run_dir={whole}", "schedule.steps=4")
    _run(command, *words, f"run_dir={parts}", "schedule.steps=2")
    _run(command, "train", f"run_dir={parts}", "resume=auto", "schedule.steps=4")
    found = rows(whole)
    versions = [r["control/sparse/rule_version"] for r in found]
    assert versions == sorted(versions) and versions[-1] > versions[0] >= 0
    assert found[-1]["control/sparse/pages_3"] > 2 and "mismatch/stretch_3/agreement_p5" in found[0]
    # as far from the copy as with fixed pages (0.002 to 0.004), and from the dense policy farther
    assert all(r["distill/actor_abs_dlogp_mean"] < r["mismatch/abs_dlogp_mean"] / 2 for r in found)
    keys = ("loss/policy", "mismatch/kl_k1", *(k for k in found[0] if k.startswith("control/")))
    for one, other in zip(found, rows(parts), strict=True):
        assert [one.get(k) for k in keys] == [other.get(k) for k in keys]


@pytest.mark.engine
@pytest.mark.ranks
@pytest.mark.slow
def test_distillsparse_publishes_both_and_resumes_exactly(command, small, distilled, tmp_path):
    words = ("train", *small, *SPARSE, *BEST, distilling("merged"), "cluster.transport=disk")
    parts = tmp_path / "parts"
    _run(command, *words, f"run_dir={parts}", "schedule.steps=2")
    _run(command, "train", f"run_dir={parts}", "resume=auto", "schedule.steps=4")
    keys = (
        "loss/policy",
        "loss/distill_kl",
        "distill/grad_norm",
        "mismatch/kl_k1",
        "eval/digits/greedy_reward",
    )
    for one, other in zip(rows(distilled), rows(parts), strict=True):
        assert [one.get(k) for k in keys] == [other.get(k) for k in keys]
    assert all(r["distill/grad_norm"] > 0 for r in rows(distilled))
    assert rows(distilled)[-1]["eval/policy_version"] == 4

    out = tmp_path / "out"
    _run(command, "export", f"run_dir={distilled}", f"out={out}")
    dense, merged = (
        load_file(out / "model.safetensors"),
        load_file(out / "sparse" / "model.safetensors"),
    )
    changed = {n for n in dense if not (dense[n] == merged[n]).all()}
    assert changed == {n for n in dense if "_proj" in n}
    assert (out / "sparse" / "adapter" / "adapter_config.json").is_file()


@pytest.mark.engine
@pytest.mark.ranks
def test_adapters_alone_are_trained_and_are_served_merged(command, small, tmp_path):
    run_dir, out = tmp_path / "run", tmp_path / "out"
    words = ("train", *small, *LORA, f"run_dir={run_dir}", "schedule=on_policy")
    _run(command, *words, "schedule.steps=3")
    found = rows(run_dir)
    assert len(found) == 3 and any(r["grad_norm"] > 0 for r in found)
    assert all(
        r["mismatch/abs_dlogp_mean"] < 1e-4 for r in found
    )  # the engine has what the learner differentiates
    _run(command, "export", f"run_dir={run_dir}", f"out={out}")
    adapter = json.loads((out / "adapter" / "adapter_config.json").read_text())
    start = load_file(Path(adapter["base_model_name_or_path"]) / "model.safetensors")
    merged = load_file(out / "model.safetensors")
    assert {n for n in start if not (start[n] == merged[n]).all()} == {
        n for n in start if "_proj" in n
    }


@pytest.mark.engine
@pytest.mark.ranks
@pytest.mark.slow
def test_an_adapter_sent_alone_is_what_is_sampled_from(command, small, tmp_path):
    """Over the disk and gloo, by an actor and its replacement, through a resume: the engine has
    what the learner differentiates."""
    run_dir = tmp_path / "run"
    words = ("train", *small, *LORA, f"run_dir={run_dir}", "schedule=on_policy")
    alone = ("learner.lora={publish:adapter}", "cluster.transport=disk")
    run = command(*words, *alone, "schedule.steps=1000", "cluster.heartbeat_s=1")
    run.wait_for(lambda: len(rows(run_dir)) >= 3, what="three steps")
    actors = [p for p in run.descendants() if "RolloutActor" in " ".join(p.cmdline())]
    actors[0].kill()
    at = len(rows(run_dir))
    run.wait_for(lambda: len(rows(run_dir)) >= at + 3, what="further steps")
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 130, run.text[-3000:]
    assert "bf16-0 is replaced" in run.text
    files = sorted((run_dir / "weights" / "policy").glob("weights-*.safetensors"))
    assert all(".lora_" in name for name in load_file(files[-1]))

    done = len(rows(run_dir))
    more = ("resume=auto", "cluster.transport=gloo", f"schedule.steps={done + 2}")
    _run(command, "train", f"run_dir={run_dir}", *more)
    found = rows(run_dir)
    assert len(found) == done + 2 and any(r["grad_norm"] > 0 for r in found[:at])
    assert all(r["mismatch/abs_dlogp_mean"] < 1e-4 for r in found)
    assert found[-1]["eval/policy_version"] == done + 2
    assert found[done - 1]["rollout/replacements"] == 1
    # and nothing was lost with the actor
    assert found[-1]["ledger/consumed"] == found[-1]["ledger/admitted"] == (done + 2) * 8


@pytest.mark.engine
@pytest.mark.ranks
@pytest.mark.slow
def test_distillsparse_sends_the_policy_once_and_the_adapter_beside_it(
    command, small, distilled, tmp_path
):
    alone = tmp_path / "alone"
    words = (*small, *SPARSE, *BEST, distilling("adapter"), "cluster.transport=disk")
    _run(command, "train", *words, f"run_dir={alone}", "schedule.steps=4")
    for run_dir in (distilled, alone):
        sets = {p.parent.name: set(load_file(p)) for p in (run_dir / "weights").glob("*/*0004*")}
        assert set(sets) == {"policy", "sparse"}
        assert sets["sparse"].isdisjoint(sets["policy"]) == (run_dir == alone)
    for one, other in zip(rows(distilled), rows(alone), strict=True):
        for key in ("mismatch/kl_k1", "distill/actor_abs_dlogp_mean", "loss/distill_kl"):
            assert one[key] == pytest.approx(other[key], abs=1e-4)


@pytest.mark.engine
@pytest.mark.ranks
@pytest.mark.slow
def test_a_frozen_draft_samples_and_the_policy_is_evaluated(command, small, tmp_path):
    run_dir = tmp_path / "run"
    _run(
        command,
        "train",
        *small[1:],
        "experiment=draft_frozen",
        *DRAFT,
        f"run_dir={run_dir}",
        "schedule.steps=3",
    )
    assert _kinds(run_dir) == {"draft"}
    found = rows(run_dir)
    assert found[-1]["eval/policy_version"] == 3 and "eval/digits/greedy" in found[-1]
    assert max(r["staleness/max"] for r in found) <= 1
    assert all(r["mismatch/abs_dlogp_mean"] > 1e-2 for r in found)


@pytest.mark.engine
@pytest.mark.ranks
def test_a_cotrained_draft_gets_its_own_weights(command, small, tmp_path):
    words = ("train", *small[1:], "experiment=draft_cotrain", *DRAFT, "schedule=on_policy")
    run_dir = tmp_path / "run"
    _run(command, *words, f"run_dir={run_dir}", "schedule.steps=2")
    _run(command, "train", f"run_dir={run_dir}", "resume=auto", "schedule.steps=4")
    found = rows(run_dir)
    assert len(found) == 4
    for row in found:  # the draft's learner knows what the draft sampled from, the policy does not
        assert row["draft/mismatch_abs_dlogp_mean"] < 1e-4
        assert row["mismatch/abs_dlogp_mean"] > 1e-2
        assert row["draft/grad_norm"] > 0 and row["draft/loss_kl"] > 0
    out = tmp_path / "out"
    _run(command, "export", f"run_dir={run_dir}", f"out={out}")
    policy, draft = (
        load_file(out / "model.safetensors"),
        load_file(out / "draft" / "model.safetensors"),
    )
    assert (
        draft["model.embed_tokens.weight"].shape[1]
        == 32
        != policy["model.embed_tokens.weight"].shape[1]
    )


@pytest.mark.engine
@pytest.mark.ranks
@pytest.mark.slow
def test_proposed_tokens_leave_a_run_on_policy(command, small, tmp_path):
    """Slow: engines that speculate are in tests/rollout/engines/test_speculation.py."""
    run_dir = tmp_path / "run"
    spec = FreshModelSpec(layers=1, vocab_size=64)  # the experiment's vocabulary
    proposing = build_fresh_model(tmp_path / "small", "0123456789=", spec, seed=3, max_len=128)
    _run(
        command,
        "train",
        *small,
        f"actor.bf16.speculate={{path: {proposing}, tokens: 2}}",
        f"run_dir={run_dir}",
        "schedule.steps=8",
        "cluster.heartbeat_s=0.1",
    )
    found = rows(run_dir)
    assert len(found) == 8 and max(row["staleness/max"] for row in found) == 1
    assert found[0]["mismatch/abs_dlogp_mean"] < 1e-5  # of the same version
    shares = [row["engine/bf16/accepted"] for row in found if "engine/bf16/accepted" in row]
    assert shares and all(0 <= share <= 1 for share in shares)


# Whole runs whose actors and learner agree to the bit.


WORDS = ("bitwise=true", "schedule=on_policy", "correction=none")
INT3 = ("actor=fp8", "actor.fp8.rounding=int3", "learner.round_as=fp8")


def _exact(command, run_dir, *words):
    skip_where_they_differ()
    run = command("train", *words, f"run_dir={run_dir}")
    assert run.wait() == 0, run.text[-3000:]
    found = rows(run_dir)
    for row in found:
        assert row["mismatch/abs_dlogp_mean"] == row["mismatch/kl_k3"] == 0.0, row["step"]
        assert row["mismatch/ess"] == 1.0
    return found


@pytest.mark.engine
@pytest.mark.ranks
@pytest.mark.parametrize("precision", [(), INT3], ids=["float32", "int3"])
def test_log_probs_of_a_run_are_equal_to_the_bit(command, small, tmp_path, precision):
    """Several steps a publication: p_ref is of the published weights."""
    more = ("schedule.steps=4", "schedule.steps_per_publish=2", "learner.micro_batch_tokens=300")
    found = _exact(command, tmp_path / "run", *small, *WORDS, *precision, *more)
    assert len(found) == 4 and found[0]["train/tokens"] > 50


@pytest.mark.engine
@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_log_probs_stay_equal_over_two_hundred_steps(command, small, tmp_path):
    more = ("schedule.steps=200", "evaluation.every=0", "checkpoint.every_s=3600")
    found = _exact(command, tmp_path / "run", *small, *WORDS, *more)
    assert len(found) == 200


# Runs with a teacher, of real actors and a real learner.


ON_POLICY = ("schedule=on_policy", "schedule.on_publish=finish", "algorithm=distill")
COMPARED = ("loss/teacher", "teacher/divergence", "teacher/top1_agreement", "grad_norm")


@pytest.fixture(scope="module")
def warmed_up(finished, small, tmp_path_factory):
    """Folder of a warmed-up model: the starting model of a run of one step."""
    root = tmp_path_factory.mktemp("teacher")
    finished("train", *small, "schedule.steps=1", f"run_dir={root / 'start'}")
    finished("export", f"run_dir={root / 'start'}", f"out={root / 'model'}")
    return root / "model"


def taught(small, folder, kind):
    """Words of a run in which a fresh model learns of a warmed-up one."""
    student = ("model.warmup=null", f"teacher={kind}", f"teacher.path={folder}", "learner.lr=2e-3")
    return ("train", *small, *ON_POLICY, *student, "rollout.samples_per_prompt=1")


def whole_and_resumed(finished, words, root):
    """Rows of a run of six steps, which one that was continued after four must equal."""
    whole, parts = root / "whole", root / "parts"
    finished(*words, f"run_dir={whole}", "schedule.steps=6")
    finished(*words, f"run_dir={parts}", "schedule.steps=4")
    finished("train", f"run_dir={parts}", "resume=auto", "schedule.steps=6")
    found = rows(whole)
    assert [without_times(r) for r in rows(parts)] == [without_times(r) for r in found]
    return found


@pytest.mark.engine
@pytest.mark.ranks
@pytest.mark.slow
def test_a_frozen_teacher_in_the_learner_and_one_in_an_engine(
    finished, small, warmed_up, tmp_path
) -> None:
    """Both resume exactly, and take the same steps but for the engine's rounding."""
    found = {}
    for kind in ("frozen", "engine"):
        words = taught(small, warmed_up, kind)
        found[kind] = whole_and_resumed(finished, words, tmp_path / kind)
        assert all(r["teacher/divergence"] > 0 and r["grad_norm"] > 0 for r in found[kind])
        last = found[kind][-1]
        assert last["loss/teacher"] == pytest.approx(last["teacher/divergence"], rel=1e-4)
        assert all(r["teacher/token_share"] == 1.0 for r in found[kind])
        assert all(r["teacher/unscored"] == 0 for r in found[kind])
    for mine, theirs in zip(found["engine"][:2], found["frozen"]):
        for name in COMPARED:
            assert mine[name] == pytest.approx(theirs[name], rel=1e-3), name
    assert all(r["time/teacher_engine_s"] > 0 for r in found["engine"])


@pytest.mark.engine
@pytest.mark.ranks
@pytest.mark.slow
def test_a_draft_that_samples_teaches_as_its_folder_does(
    finished, small, warmed_up, tmp_path
) -> None:
    """Two engines of the draft's model give the steps of one that has the folder by its path."""
    fleet = ("actor=[bf16,draft]", f"actor.draft.draft_path={warmed_up}", "schedule.steps=3")
    words = ("train", *small, *ON_POLICY, *fleet, "model.warmup=null", "teacher=engine")
    named, given = tmp_path / "named", tmp_path / "given"
    finished(*words, "teacher.actor=draft", "teacher.engine.count=2", f"run_dir={named}")
    finished(*words, f"teacher.path={warmed_up}", f"run_dir={given}")
    found = rows(named)
    assert [without_times(r) for r in found] == [without_times(r) for r in rows(given)]
    assert all(r["teacher/token_share"] == 1.0 and r["teacher/divergence"] > 0 for r in found)
    assert all(r["mismatch/kl_k3@draft"] > r["mismatch/kl_k3@bf16"] for r in found)


@pytest.mark.engine
@pytest.mark.ranks
@pytest.mark.slow
def test_self_distillation_beside_rewards_resumes_exactly(finished, small, tmp_path) -> None:
    """The previous policy reads a better answer, and is refreshed between both parts."""
    beside = ("algorithm=grpo", "teacher=previous", "teacher.refresh_steps=3", "teacher.weight=0.1")
    found = whole_and_resumed(finished, ("train", *small, *ON_POLICY[:2], *beside), tmp_path)
    assert any(0 < r["teacher/token_share"] < 1 for r in found)
    assert any(r["teacher/unscored"] > 0 for r in found)
    assert all(r["loss/policy"] != 0 or r["loss/teacher"] != 0 for r in found)


@pytest.mark.engine
@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_an_engine_that_dies_and_one_that_hangs_are_replaced(
    installed, small, warmed_up, tmp_path
) -> None:
    """Records are late meanwhile and have no distance; then each has one again."""
    engine = ("teacher=engine", f"teacher.path={warmed_up}", "teacher.engine.timeout_s=3")
    beside = ("algorithm=grpo", "cluster.num_cpus=3", "cluster.heartbeat_s=1")
    limits = ("cluster.hang_timeout_s=20", "schedule.steps=10000", "evaluation.every=1000")
    run = installed("train", *small, *engine, *beside, *limits, f"run_dir={tmp_path / 'run'}")

    def scored():
        return [r["teacher/unscored"] == 0 for r in rows(tmp_path / "run")]

    run.wait_for(lambda: all(scored()[-3:]) and len(scored()) >= 3, what="three scored steps")
    for sent in (signal.SIGKILL, signal.SIGSTOP):
        before = len(scored())
        (process,) = [p for p in run.descendants() if "TeacherActor" in " ".join(p.cmdline())]
        process.send_signal(sent)
        run.wait_for(lambda at=before: not all(scored()[at:]), what="records without a teacher")
        at = len(scored())
        run.wait_for(
            lambda at=at: len(scored()) >= at + 3 and all(scored()[-3:]), what="scores again"
        )
    family = run.descendants()
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 130, run.text[-3000:]
    assert not left_over(family)
