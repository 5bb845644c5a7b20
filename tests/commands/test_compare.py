"""`rlcore compare` on two run directories."""

import json

import pytest

from rlcore.cli import main
from rlcore.commands.compare import ABSENT, differences, side_by_side

ROW = {"reward/mean": 0.5, "time/step_s": 2.0, "time/wait_data_s": 0.5}


def run(path, config, *rows):
    path.mkdir()
    (path / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    lines = [json.dumps({"step": i, **ROW, **row}) + "\n" for i, row in enumerate(rows, 1)]
    (path / "metrics.jsonl").write_text("".join(lines))
    return str(path)


@pytest.fixture
def two(tmp_path):
    first = {"run_dir": "a", "seed": 0, "learner": {"lr": 1e-3, "ranks": 1}, "correction": {}}
    second = {
        "run_dir": "b",
        "seed": 0,
        "learner": {"lr": 1e-4, "ranks": 1},
        "correction": {"tis": {"cap": 2.0}},
    }
    return (
        run(tmp_path / "a", first, {}, {"reward/mean": 0.75, "eval/digits/greedy": 0.5}),
        run(tmp_path / "b", second, {"reward/mean": 0.25}),
    )


def test_text_has_what_differs_and_nothing_else(two, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    assert main(["compare", *two]) == 0
    text = capsys.readouterr().out
    lines = [[cell.strip() for cell in line.split("│")] for line in text.splitlines()]
    for line in (
        ["learner.lr", "0.001", "0.0001"],
        ["correction.tis.cap", "(no such key)", "2.0"],
        ["reward/mean", "0.75", "0.25"],
        ["eval digits/greedy", "0.5", ""],
        ["learner waits, mean of the last steps", "25%", "25%"],
        ["steps", "2", "1"],
    ):
        assert line in lines
    assert "seed" not in text and "run_dir" not in text


def test_json_has_numbers_and_omits_what_a_run_lacks(two, capsys):
    assert main(["compare", *two, "json=true"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["a"], found["b"]) == two
    assert {"key": "learner.lr", "a": 1e-3, "b": 1e-4} in found["config"]
    assert {"key": "correction.tis.cap", "b": 2.0} in found["config"]
    assert {"name": "eval digits/greedy", "a": 0.5} in found["metrics"]
    assert {"name": "learner waits", "a": 0.25, "b": 0.25} in found["metrics"]


def test_equal_configurations_and_runs_without_steps_say_so(tmp_path, capsys):
    folders = [run(tmp_path / name, {"run_dir": name, "seed": 1}) for name in "ab"]
    assert main(["compare", *folders]) == 0
    text = capsys.readouterr().out
    assert "The configurations are the same." in text
    assert "Neither run has finished a learner step." in text


def test_a_null_differs_from_a_key_that_is_absent():
    assert differences({"a": None}, {}) == {"a": (None, ABSENT)}
    assert differences({"a": None, "run_dir": "x"}, {"a": None, "run_dir": "y"}) == {}


def test_a_run_without_rows_has_no_figures():
    figures = side_by_side([], [{"step": 1, "reward/mean": 0.5}])
    assert figures["reward/mean"][0] is None and figures["steps"][1].last == 1


@pytest.mark.parametrize(
    "names, sentence",
    [
        (["/nowhere", "/nowhere"], "/nowhere is not a run directory"),
        (["/nowhere"], "takes DIR DIR, and 1 was given"),
        ([], "takes DIR DIR, and 0 were given"),
    ],
)
def test_what_is_no_run_is_refused(names, sentence, capsys):
    assert main(["compare", *names]) == 2
    assert sentence in capsys.readouterr().err


def test_folders_may_be_named_as_other_commands_name_theirs(two, capsys):
    assert main(["compare", *(f"run_dir={folder}" for folder in two), "json=true"]) == 0
    named = capsys.readouterr().out
    assert main(["compare", *two, "json=true"]) == 0
    assert capsys.readouterr().out == named
