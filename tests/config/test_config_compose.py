"""Composition: every option and experiment is valid, order and selection count, a saved
configuration resumes as itself."""

import json
import os
import re
import time
from importlib.util import find_spec
from pathlib import Path
from shutil import which

import pytest
from preset_files import given

from rlcore.commands.derived import idle_clip, with_stated_threads
from rlcore.config import compose
from rlcore.config.compose import load, to_yaml
from rlcore.config.groups import COMMAND_LINES, groups
from rlcore.config.schema import RunConfig
from rlcore.config.sentences import section
from rlcore.config.unread import unread
from rlcore.errors import UserError
from rlcore.tasks import make_task

# What a user must give for the options that have no default.
PROVEN = ("leetcode", "mbpp", "stdin_code")  # tasks that run each row's tests
MANDATORY = {
    "path": ["model.path=folder"],
    "gsm8k": ["task.args.train_path=train.jsonl"],
    "math": ["task.args.train_path=train.jsonl"],
    "leetcode": ["task.args.train_path=train.jsonl"],
    "lean": ["task.rewards.proof.lean.url=http://host:8000", "task.args.train_path=train.jsonl"],
    "metamath_file": ["task.args.train_path=theorems.mm"],
    "mbpp": ["task.args.train_path=train.jsonl"],
    "stdin_code": ["task.args.train_path=train.jsonl"],
    "file": ["task.args.train_path=train.jsonl", "task.args.grader=operator:eq"],
    "own": ["task.name=digits"],
    "ray": ["cluster.address=head:6379"],
    "draft": ["actor.draft.draft_path=folder"],
    "distill_quickstart": ["teacher.path=folder"],
    "math_fp8_gpu": ["model.path=folder", "task.args.train_path=train.jsonl"],
    "fp8_8xh100": ["model.path=folder", "task.args.train_path=train.jsonl"],
    "fp8_4nodes": ["model.path=folder", "task.args.train_path=train.jsonl"],
    "dense_32b_16gpus": ["model.path=folder", "task.args.train_path=train.jsonl"],
    "experts_64gpus": ["model.path=folder", "task.args.train_path=train.jsonl"],
    "long_context": ["model.path=folder", "task.args.train_path=train.jsonl"],
    "sparse_h200": ["model.path=folder", "task.args.train_path=train.jsonl"],
    "rapid_8gpus": ["model.path=folder", "task.args={train_path: f.jsonl, heldout_path: f.jsonl}"],
}
# the papers' settings at full scale: a reader fills in paths only
DATA = ["task.args.train_path=f.jsonl", "task.args.heldout_path=f.jsonl"]
PAPER_PATHS = ["model.path=folder", *DATA]
COMPANIONS = {
    "algorithm=ppo": ["critic=model"],
    "algorithm=distill": ["teacher=policy"],
    "teacher=frozen": ["teacher.path=folder"],
    "teacher=engine": ["teacher.path=folder"],
    "critic=model": ["algorithm=ppo"],
    "critic=value_head": ["algorithm=ppo"],
    "model=diffusion": [
        "actor.bf16.engine=diffusion",
        "rollout.logprobs_k=0",
        "schedule=on_policy",
    ],
    "environment=endpoint": ["model=smollm2"],
    "correction=rapid": ["algorithm=rapid"],
    "correction=dppo": ["algorithm=dppo"],
    "correction=opsm": ["correction.opsm.delta=0.1"],
    "correction=outliers": ["correction.outliers.threshold=0.1"],
}
OPTIONS = [(group, option) for group, options in groups().items() for option in options]


def run(*words, config_dir=None):
    return load(["run_dir=runs/x", *words], config_dir)


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_and_experiment_is_a_valid_run(group, option):
    word = f"{group}={option}"
    paths = given(option) if option.startswith("paper/") else MANDATORY.get(option, [])
    config = run(word, *paths, *COMPANIONS.get(word, []))
    assert config.run_dir == str(Path("runs/x").absolute())


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_says_what_it_is(group, option):
    lines = groups()[group][option].read_text().splitlines()
    assert any(line.startswith("# ") and not line.startswith("# @") for line in lines)


@pytest.mark.parametrize("option", sorted(MANDATORY))
def test_a_missing_mandatory_value_is_named(option):
    group = next(g for g, o in OPTIONS if o == option)
    first, *others = MANDATORY[option]
    with pytest.raises(UserError, match=rf"^{first.split('=')[0]}"):
        config = run(f"{group}={option}", *others)
        # the files of a task are asked for as it is made: `eval` needs none to train on
        make_task(config.task.name, config.task.args)


def test_an_environment_of_one_s_own_is_named_as_an_option_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = run("environment=own/games.py:Game", "environment.max_turns=3")
    assert config.environment.name == f"{tmp_path}/own/games.py:Game"
    assert config.environment.max_turns == 3
    assert run("environment=package.games:Game").environment.name == "package.games:Game"
    assert not run().environment.played and run("environment=higher_lower").environment.played


def test_a_task_of_one_s_own_is_named_as_an_option_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    task = run("task=own/tasks.py:Task", "task.args.level=3").task
    assert (task.name, task.args) == (f"{tmp_path}/own/tasks.py:Task", {"level": 3})
    assert run("task=package.tasks:Task").task.name == "package.tasks:Task"


PAPERS = sorted(option for group, option in OPTIONS if option.startswith("paper/"))


@pytest.mark.parametrize("option", PAPERS)
def test_a_paper_s_preset_names_its_source_and_asks_for_the_model(option):
    text = groups()["experiment"][option].read_text()
    assert "papers/" in text or "paper/" in text  # its source, or the preset that it varies
    found = given(option)
    assert {"model.path=/f", "task.args.heldout_path=/f"} <= {*found}
    # `eval` needs no file to train on; the preflight of `train` asks for it
    config = load(["run_dir=x", f"experiment={option}", *found])
    assert all(task.args["train_path"] is None for task in config.tasks.values())


def test_corrections_keep_the_order_of_selection_also_through_yaml(tmp_path):
    for names in (["dvp", "mis", "veto"], ["veto", "dvp", "mis"], ["mis", "veto", "dvp"]):
        config = _started(tmp_path, f"correction=[{','.join(names)}]")
        assert list(config.correction.chosen()) == names
        again = load([f"run_dir={tmp_path}", "resume=auto"])
        assert list(again.correction.chosen()) == names
        assert again == config.model_copy(update={"resume": "auto"})


def test_correction_none_and_the_empty_list_choose_nothing():
    assert run("correction=none").correction.chosen() == {}
    assert run("correction=[]").correction.chosen() == {}
    assert run("correction=none").correction.names == ("none",)


def test_one_actor_or_a_fleet():
    assert list(run("actor=fp8").actor) == ["fp8"]
    fleet = run("actor=[fp8,bf16]", "actor.bf16.count=2").actor
    assert list(fleet) == ["fp8", "bf16"]
    assert (fleet["bf16"].count, fleet["fp8"].count) == (2, 1)
    assert run("+actor.cheap.rounding=int4").actor["cheap"].rounding == "int4"


def test_an_experiment_does_not_bring_back_what_the_user_deselected():
    config = run("experiment=large_batch_jackpot", "correction=tis", "actor=fp8")
    assert list(config.correction.chosen()) == ["tis"]
    assert list(config.actor) == ["fp8"]


def test_words_win_over_an_experiment_and_an_experiment_over_its_base():
    config = run("experiment=rapid", "schedule.groups_per_step=8", "task=arithmetic")
    assert config.schedule.max_staleness == 0
    assert config.schedule.groups_per_step == 8
    assert config.task.name == "arithmetic"
    assert config.learner.lr == run("experiment=quickstart").learner.lr


@pytest.mark.parametrize("name", sorted(groups()["experiment"]))
def test_a_shipped_experiment_is_not_warned_of_its_own_settings(name):
    paths = given(name) if name.startswith("paper/") else MANDATORY.get(name, [])
    config = run(f"experiment={name}", *paths)
    assert idle_clip(config) is None and unread(config) == []


@pytest.mark.parametrize("name", COMMAND_LINES)
def test_a_command_line_in_place_of_an_experiment_composes_and_is_named(name):
    words, _ = COMMAND_LINES[name]
    assert run(*words.split(), *(PAPER_PATHS if name.startswith("paper/") else []))
    with pytest.raises(
        UserError, match=rf"experiment={name} is not .*: write {re.escape(words)}\.$"
    ):
        run(f"experiment={name}")


def test_keys_the_schema_knows_need_no_plus():
    config = run("learner.betas=[0.5,0.6]", "model.system_prompt='be brief: 1'")
    assert config.learner.betas == (0.5, 0.6)
    assert config.model.system_prompt == "be brief: 1"


def test_a_group_may_be_put_elsewhere():
    config = run(
        "task@evaluation.tasks.words=gsm8k", "evaluation.tasks.words.args.train_path=held.jsonl"
    )
    assert config.evaluation.tasks["words"].name == "gsm8k"
    assert config.task.name == "digits"


def test_a_users_own_folder_adds_options(tmp_path):
    (tmp_path / "experiment").mkdir()
    defaults = "defaults: [quickstart, {override /correction: [mis]}, _self_]"
    mine = f"# @package _global_\n# Mine.\n{defaults}\nseed: 7\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(mine)
    config = run("experiment=mine", config_dir=tmp_path)
    assert config.seed == 7 and list(config.correction.chosen()) == ["mis"]
    with pytest.raises(UserError, match="experiment=mine"):
        run("experiment=mine")


def _own_option(folder, text, age_s=60):
    """An option of the group experiment, last written `age_s` ago."""
    file = folder / "experiment" / "mine.yaml"
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"# @package _global_\n{text}\n")
    stamp = time.time() - age_s
    os.utime(file, (stamp, stamp))
    return file


def test_a_file_that_changes_is_composed_anew(tmp_path):
    def seed():
        return run("experiment=mine", config_dir=tmp_path).seed

    file = _own_option(tmp_path, "seed: 7")
    assert (seed(), seed()) == (7, 7)
    _own_option(tmp_path, "seed: 8", age_s=30)
    assert seed() == 8
    file.unlink()
    with pytest.raises(UserError, match="experiment=mine"):
        seed()


def test_two_changes_of_a_file_within_a_tick_of_its_clock_are_both_seen(tmp_path):
    now = time.time_ns() + 10**12  # never long ago, however slow this test
    for seed in (7, 8, 9):
        _own_option(tmp_path, f"seed: {seed}", age_s=0)
        os.utime(tmp_path / "experiment" / "mine.yaml", ns=(now, now))
        assert run("experiment=mine", config_dir=tmp_path).seed == seed


def test_who_changes_a_loaded_configuration_changes_no_other(tmp_path):
    first = run("experiment=quickstart", "learner.lr=1e-3", "task.args.min_digits=5")
    second = run("experiment=quickstart")
    assert second.learner.lr != first.learner.lr
    assert second.task.args["min_digits"] != 5
    second.task.args["min_digits"] = 77
    assert run("experiment=quickstart").task.args["min_digits"] != 77


def test_the_same_selections_are_composed_once(monkeypatch, tmp_path):
    _own_option(tmp_path, "seed: 7")
    first = run("experiment=mine", config_dir=tmp_path)
    monkeypatch.setattr(compose, "hydra_compose", None)
    assert run("experiment=mine", "seed=9", config_dir=tmp_path).seed == 9
    assert run("experiment=mine", config_dir=tmp_path) == first


def _started(folder, *words):
    """The configuration of a run directory, as `rlcore train` leaves it there."""
    config = with_stated_threads(load([f"run_dir={folder}", *words]))
    (folder / "config.yaml").write_text(to_yaml(config))
    return config


def test_resume_starts_from_the_saved_configuration(tmp_path):
    started = _started(
        tmp_path,
        "experiment=dvp_mis_veto",
        "learner.lr=3e-5",
        "model.system_prompt='a ${b} c'".replace("${", "\\${"),
    )
    resumed = load([f"run_dir={tmp_path}", "resume=auto", "schedule.steps=99", "logging=quiet"])
    assert (
        resumed.resume == "auto"
        and resumed.schedule.steps == 99
        and resumed.logging.wandb == "disabled"
    )
    untouched = {"schedule", "logging", "resume"}
    assert resumed.model_dump(exclude=untouched) == started.model_dump(exclude=untouched)
    assert started.model.system_prompt == "a ${b} c"


@pytest.mark.parametrize("more", [(), ("learner.max_threads=2",)])
@pytest.mark.parametrize("experiment", ["dvp_mis_veto", "quickstart"])  # in turns, asynchronous
def test_a_requeued_command_resumes_and_a_different_one_is_refused(experiment, more, tmp_path):
    words = [f"experiment={experiment}", "learner.lr=3e-5", *more, "resume=auto"]
    first = _started(tmp_path, *words)  # nothing to resume: composed anew
    assert first.learner.max_threads != "auto"
    assert load([f"run_dir={tmp_path}", *words]) == first
    with pytest.raises(UserError, match=r"learner\.lr=.*3e-05"):
        load([f"run_dir={tmp_path}", f"experiment={experiment}", "resume=auto"])


def test_without_resume_a_saved_configuration_does_not_count(tmp_path):
    _started(tmp_path, "learner.lr=3e-5")
    assert load([f"run_dir={tmp_path}"]).learner.lr != 3e-5


@pytest.mark.processes
def test_the_shipped_tasks_take_the_arguments_that_they_are_given(tmp_path):
    from rlcore.tasks import TASKS, make_task

    code = {
        "text": "?",
        "code": "def f():\n    return 1",
        "solutions": "def f():\n    return 1\n\n\nprint(1)",
        "input_output": {"inputs": [""], "outputs": ["1"]},
        "test_list": ["assert f() == 1"],
        "formal_statement": "theorem t : 1 = 1 := by",
        "tests": {"functional": "assert f() == 1"},
    }
    rows = [
        {"question": f"{i}?", "problem": f"{i}?", "answer": f"so #### {i}", **code}
        for i in range(64)
    ]
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "mine.py").write_text("def grade(item, response):\n    return 1.0\n")
    values = {"train_path": data, "grader": f"{tmp_path}/mine.py:grade", "name": "digits"}
    values["url"] = "http://host:8000"
    assert set(groups()["task"]) == {*TASKS, "own"}
    for option in groups()["task"]:
        keys = [word.partition("=")[0] for word in MANDATORY.get(option, [])]
        words = [f"{key}={values[key.rpartition('.')[2]]}" for key in keys]
        spec = run(f"task={option}", *words).task
        if option == "reasoning_gym" and find_spec(option) is None:  # an extra
            continue
        if option == "metamath_file":  # not of rows
            continue
        if option == "metamath" and which(option) is None:  # Debian's package
            continue
        own = {"proof_cache": str(tmp_path)} if option in PROVEN else {}
        assert make_task(spec.name, {**spec.args, **own}).item("train", 0).question


def _undescribed(model, prefix=""):
    for name, info in model.model_fields.items():
        inner, _ = section(info.annotation)
        if inner is not None:
            yield from _undescribed(inner, f"{prefix}{name}.")
        elif not info.description:
            yield f"{prefix}{name}"


def test_every_key_says_what_it_is():
    assert list(_undescribed(RunConfig)) == []


def test_paths_are_absolute_since_other_nodes_have_other_working_directories(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [
        "task=file",
        "model.path=m",
        "task.args.train_path=t.jsonl",
        "task.args.heldout_path=h.jsonl",
    ]
    config = load(["run_dir=runs/x", *words, "task.args.grader=g.py:grade"])
    assert (config.run_dir, config.model.path) == (f"{tmp_path}/runs/x", f"{tmp_path}/m")
    assert config.task.args["train_path"] == f"{tmp_path}/t.jsonl"
    assert config.task.args["grader"] == f"{tmp_path}/g.py:grade" and config.task.name == "file"
    warmed = load(["run_dir=x", "experiment=quickstart"]).model.warmup
    assert warmed.cache_dir == f"{tmp_path}/cache/warmup"
