"""Settings that name an implementation: shipped ones by name, a user's own by path."""

import shutil

import pytest

from rlcore.cli import main
from rlcore.config import groups as groups_of
from rlcore.config.compose import load
from rlcore.config.names import ENTRIES, REGISTRIES, load_own, registered
from rlcore.corrections.specs import CORRECTIONS
from rlcore.errors import UserError

MINE = '''
from rlcore.objectives.advantages import Grpo
from rlcore.objectives.losses import Reinforce
from rlcore.rollout.request_book import BookedEngine
from tabular import TabularEngine


class Mine(Reinforce):
    """A loss of a user's own."""


class Compared(Grpo):
    """An advantage of a user's own, which compares the samples of a group."""


class Trainer(TabularEngine):
    """A learner engine of a user's own."""


class Engine(BookedEngine):
    """A rollout engine of a user's own."""

    def running(self): return 0
    def update_weights(self, version, weights, on_publish): return None
    def checksums(self, names): return {}
    def close(self): return None
'''


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return f"{tmp_path}/mine.py"


def run(*words):
    return load(["run_dir=x", *words])


def test_shipped_names_are_listed():
    assert set(registered("algorithm.loss")) == {
        *("ppo", "gspo", "gmpo", "sapo", "cispo", "reinforce")
    }
    assert registered("actor.LABEL.engine") == ("vllm", "diffusion")
    assert registered("learner.lr") == ()
    assert all(REGISTRIES.values())


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("algorithm.loss", "Mine"),
        ("algorithm.advantage", "Compared"),
        ("learner.engine", "Trainer"),
        ("actor.bf16.engine", "Engine"),
    ],
)
def test_a_users_own_is_named_by_its_file(mine, key, name):
    config = run(f"{key}='mine.py:{name}'", "learner.step_bound=null")
    value = config
    for part in key.split("."):
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    assert value == f"{mine}:{name}"  # other processes have other working directories
    load_own(config)


def test_its_traits_count_as_those_of_a_shipped_one(mine):
    with pytest.raises(UserError, match=r"correction\.tis\.adjusted=true .*algorithm\.loss=mine"):
        run("algorithm.loss='mine.py:Mine'", "correction.tis.adjusted=true")
    with pytest.raises(UserError, match=r"algorithm\.advantage=mine\.py:Compared compares"):
        run("algorithm.advantage='mine.py:Compared'", "rollout.samples_per_prompt=1")
    run("algorithm.loss='mine.py:Mine'", "correction=rapid", "algorithm.advantage=group_mean")


@pytest.mark.parametrize("key", ["learner.engine", "actor.bf16.engine"])
def test_a_wrong_path_is_refused_before_anything_starts(mine, key):
    with pytest.raises(UserError, match=rf"^{key}=.*mine\.py:None_such .*has no None_such"):
        run(f"{key}='mine.py:None_such'")


@pytest.fixture
def configs(tmp_path, monkeypatch):
    """A copy of the shipped groups, in their place."""
    folder = tmp_path / "configs"
    shutil.copytree(groups_of.SHIPPED, folder)
    monkeypatch.setattr(groups_of, "SHIPPED", folder)
    return folder


@pytest.mark.parametrize("group", ENTRIES)
def test_an_entry_without_a_file_is_refused_with_the_files_name(group, configs, capsys):
    file = next(f for f in sorted((configs / group).iterdir()) if f.stem in ENTRIES[group][1])
    file.unlink()
    assert main(["train", "experiment=quickstart", "run_dir=x", "dry_run=true"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"rlcore: {file} is missing: ") and said.count("\n") == 1
    assert ENTRIES[group][0] in said


@pytest.mark.parametrize("group", ENTRIES)
def test_a_file_without_an_entry_is_refused_with_the_registrys_name(group, configs, capsys):
    (configs / group / "mine.yaml").write_text("# Mine.\n")
    assert main(["train", "experiment=quickstart", "run_dir=x", "dry_run=true"]) == 2
    said = capsys.readouterr().err
    assert f"{group}/mine.yaml has no entry: add mine to {ENTRIES[group][0]}" in said


def test_a_correction_that_is_registered_alone_asks_for_its_file(monkeypatch):
    monkeypatch.setitem(CORRECTIONS, "mine", "rlcore.corrections.tis:TisSpec")
    with pytest.raises(UserError, match=r"correction/mine\.yaml is missing: CORRECTIONS of"):
        run()


def test_a_folder_of_no_section_is_refused(configs):
    (configs / "optimiser").mkdir()
    (configs / "optimiser" / "adam.yaml").write_text("# Adam.\n")
    with pytest.raises(UserError, match="optimiser is the folder of no section"):
        run()


def test_a_users_own_folder_has_options_of_any_name(tmp_path):
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "mine.yaml").write_text("# Mine.\nname: digits\nargs: {}\n")
    assert load(["run_dir=x", "task=mine"], tmp_path).task.name == "digits"
