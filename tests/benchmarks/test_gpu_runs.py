"""Whole runs of the GPU programme: what its page asks for passes every check as if there were a
GPU, and rows say what the steps' rows say."""

import re
import shlex
from pathlib import Path

import beside_trl
import check
import learns
import pytest
import random_model

from rlcore.cli import main
from rlcore.cluster import ray_cluster
from rlcore.models.fresh import build_fresh_model
from rlcore.models.specs import FreshModelSpec

README = (Path(check.__file__).parent / "README.md").read_text()
# the commands of the page's table: script, words, seconds
TABLE = [
    (script, shlex.split(words), float(seconds))
    for script, words, seconds in re.findall(
        r"^\|.*?\| `(\w+)\.py ([^`]*)`.*\| (\d+) \|$", README, re.M
    )
]


def of(script):
    return [words for name, words, _ in TABLE if name == script]


DRY = ["--work", "x", "--device", "cpu"]
ARMS = [(words, name) for words in of("learns") for name in learns.options(words).arms.split(",")]
ARMS += [(DRY, name) for name in ("onpolicy", "centre", "fp8_centre", "draft")]
RUNS = [
    (words, who)
    for words in of("beside_trl")
    for who in beside_trl.options(words).order.split(",")
    if who != "trl"
]
RUNS += [(DRY, who) for who in ("async", "turns")]


@pytest.fixture
def one_gpu(monkeypatch):
    """This machine shows one GPU to the checks that precede a start."""
    monkeypatch.setattr(ray_cluster, "local_gpus", lambda: 1)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with a small model in place of the one that a warm-up would make, and GSM8K rows."""
    folder = tmp_path_factory.mktemp("work")
    small = FreshModelSpec(hidden_size=64, layers=2, heads=2, kv_heads=2, head_dim=32)
    build_fresh_model(folder / "model", "0123456789 >", small, seed=0, max_len=1 << 15)
    row = '{"question": "1 + 1 =", "answer": "#### 2"}\n'
    for name in ("train.jsonl", "test.jsonl"):
        (folder / name).write_text(row * 64)
    return folder


def refusal(words, capsys):
    """What a dry run of these words says against them, or nothing."""
    code = main([*words, "dry_run=true"])
    said = capsys.readouterr().err
    return said[-700:] if code else ""


@pytest.mark.parametrize("words, name", ARMS, ids=lambda v: v if isinstance(v, str) else "")
def test_every_arm_passes_the_checks_of_a_start(words, name, work, one_gpu, capsys):
    args = learns.options(words)
    args.work, args.model, args.rows = work, work / "model", work
    if not learns.warmed(args).exists():
        learns.warmed(args).symlink_to(args.model)
    assert not refusal(learns.arm(args, name), capsys)


@pytest.mark.parametrize("words, who", RUNS, ids=lambda v: v if isinstance(v, str) else "")
def test_what_runs_beside_trl_passes_the_checks_of_a_start(words, who, tmp_path, one_gpu, capsys):
    args = beside_trl.options(words)
    args.work = tmp_path
    model = random_model.random_model(random_model.SHAPES["tiny"], "cpu")
    model.save_pretrained(beside_trl.model(args))
    random_model.tokenizer(beside_trl.model(args), 512)
    beside_trl.prepare(args)
    assert not refusal(beside_trl.words(args, who, tmp_path / "run"), capsys)


def test_the_pages_commands_can_be_asked_for_and_name_their_own_seconds():
    assert {name for _, name in ARMS} == {*learns.ARMS} and len(TABLE) >= 8
    for script, words, seconds in TABLE:
        if script == "check":
            asked = check.chosen(check.parser().parse_args(words))
            assert asked.budget_s == seconds
        elif script in ("learns", "beside_trl"):
            options = {"learns": learns, "beside_trl": beside_trl}[script].options
            assert options(words).budget == seconds


def test_answers_of_the_random_model_end_as_often_as_was_asked_for():
    model = random_model.random_model(random_model.SHAPES["tiny"], "cpu")
    assert random_model.end_once_in(model, 20.0) == pytest.approx(1 / 20, rel=1e-3)


def test_rates_are_medians_of_runs_of_one_shape_and_multiples_of_trls():
    def row(who, step_s, shape="0.6b"):
        return {"shape": shape, "who": who, "step s": step_s, "tokens": 100.0}

    found = [row("trl", 2.0), row("async", 1.0), row("async", 0.5), row("trl", 9.0, "1.7b")]
    found.append({"shape": "0.6b", "who": "turns", "counted": 0})
    rows = {r["of"]: r for r in beside_trl.rates(found, "0.6b")}
    assert set(rows) == {"trl", "async"} and rows["async"]["runs"] == 2
    assert rows["async"]["tokens/s"] == 150.0 and rows["async"]["times TRL"] == 3.0
    (alone,) = beside_trl.rates(found[1:2], "0.6b")
    assert alone["times TRL"] is None


def test_trl_searches_its_micro_batch_once():
    args = beside_trl.options(["--work", "x", "--device", "cpu"])
    first, later = beside_trl.job(args, None), beside_trl.job(args, {"rows": 8, "liger": False})
    assert len(first["trials"]) == len(beside_trl.TRIALS) and not later["trials"]
    assert first["groups"] * first["samples"] % first["trials"][0]["rows"] == 0


def test_an_arms_row_says_what_was_learned_and_when_the_policy_was_lost():
    args = learns.options(["--work", "x"])
    rows = [
        {"step": n, "reward/mean": r, "mismatch/ess": e, "time/step_s": 2.0}
        for n, (r, e) in enumerate([(0.4, 1.0), (0.3, 0.5), (0.1, 0.05), (0.3, 0.9)], start=1)
    ]
    rows[0]["eval/digits/sampled_reward"], rows[-1]["eval/digits/sampled_reward"] = 0.42, 0.3
    row = learns.summary(args, "async", rows)
    assert (row["held-out start"], row["held-out end"]) == (0.42, 0.3)
    assert row["lost at step"] == 3 and row["lowest ESS"] == 0.05 and row["step s"] == 2.0
    best = {"part": "learns", "arm": "onpolicy", "held-out end": 0.69}
    (found,) = learns.compared([row], [best])
    assert found["below on policy"] == pytest.approx(0.39)
    (alone,) = learns.compared([learns.summary(args, "async", [])], [])
    assert alone["below on policy"] is None and alone["lost at step"] == "never"
