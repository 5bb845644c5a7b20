"""`rlcore compare` on two run directories."""

import json
from pathlib import Path

import pytest

from rlcore.cli import main
from rlcore.metrics.run_folder import Run
from rlcore.report.compare import ABSENT, Arm, differences, figures_of, unlike

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
    found = figures_of(arm([]), arm([{"step": 1, "reward/mean": 0.5}]), 95)
    assert found["reward/mean"].figures[0] is None and found["steps"].figures[1].last == 1
    assert found["reward/mean"].difference is None


def arm(*runs):
    return Arm("a", tuple(Run("a", Path("a"), rows, "") for rows in runs))


def seeds(tmp_path, name, lr, rewards):
    return [
        run(
            tmp_path / f"{name}{seed}",
            {"run_dir": f"{name}{seed}", "seed": seed, "learner": {"lr": lr}},
            {"reward/mean": reward},
        )
        for seed, reward in enumerate(rewards)
    ]


def test_seeds_are_means_with_t_and_welch_intervals(tmp_path, capsys):
    """Against scipy: `t.interval` and `ttest_ind(equal_var=False).confidence_interval`."""
    first = seeds(tmp_path, "a", 1e-3, [0.1, 0.2, 0.4])
    second = seeds(tmp_path, "b", 1e-4, [0.5, 0.9, 0.6, 0.7])
    assert main(["compare", *first, *second, "json=true", "ci=90"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["a"], found["b"]) == (first, second)
    assert [line["key"] for line in found["config"]] == ["learner.lr"]
    (reward,) = (line for line in found["metrics"] if line["name"] == "reward/mean")
    assert (reward["a"], reward["b"]) == pytest.approx((0.7 / 3, 0.675))
    assert reward["a_interval"] == pytest.approx([-0.0241857, 0.4908524], abs=1e-6)
    assert reward["b_interval"] == pytest.approx([0.4740433, 0.8759567], abs=1e-6)
    assert reward["difference"] == pytest.approx(0.675 - 0.7 / 3)
    assert reward["difference_interval"] == pytest.approx([0.1912003, 0.6921330], abs=1e-6)


def test_seeds_are_shown_with_their_number(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    first, second = seeds(tmp_path, "a", 1e-3, [0.1, 0.3]), seeds(tmp_path, "b", 1e-4, [0.5, 0.5])
    assert main(["compare", *second, *first]) == 0
    text = capsys.readouterr().out
    assert "intervals of 95 %" in text and "0.2 ± 1.27 (2)" in text and "0.5 ± 0 (2)" in text


def test_a_share_of_answers_is_never_certain(tmp_path, capsys, monkeypatch):
    """All answers right in every seed, and in a single run."""
    monkeypatch.setenv("COLUMNS", "150")
    row = {"eval/d/greedy": 1.0, "eval/d/effective_greedy": 20.0, "eval/policy_version": 1}
    arms = {
        name: [
            run(tmp_path / f"{name}{s}", {"run_dir": f"{name}{s}", "seed": s, "lr": lr}, row)
            for s in range(2)
        ]
        for name, lr in (("a", 0.1), ("b", 0.2))
    }
    assert main(["compare", *arms["a"], *arms["b"]]) == 0
    text = capsys.readouterr().out
    assert "1, 0.912 to 1 (2)" in text and "0, -0.0876 to 0.0876" in text
    assert main(["compare", arms["a"][0], arms["b"][0], "json=true"]) == 0
    (found,) = (
        line
        for line in json.loads(capsys.readouterr().out)["metrics"]
        if line["name"] == "eval d/greedy"
    )
    assert found["a"] == 1.0 and found["a_interval"] == pytest.approx([0.8388748, 1.0])
    assert found["difference_interval"] == pytest.approx([-0.1611252, 0.1611252])


def test_more_than_two_configurations_are_refused_by_name(tmp_path, capsys):
    folders = [f for i, name in enumerate("abc") for f in seeds(tmp_path, name, 10.0**-i, [0.5])]
    assert main(["compare", *folders]) == 2
    assert "these 3 runs are of 3 (a0, b0, c0)" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0", "100", "x"])
def test_an_interval_is_of_a_percentage(two, text, capsys):
    assert main(["compare", *two, f"ci={text}"]) == 2
    assert f"ci={text}" in capsys.readouterr().err


def test_unequal_staleness_and_length_are_warned_of(tmp_path, capsys):
    fresh = [{"step": 1, "staleness/mean": 1.0, "response_length/mean": 100.0}]
    old = [{"step": 1, "staleness/mean": 4.0, "response_length/mean": 105.0}]
    longer = [{"step": 1, "staleness/mean": 1.05, "response_length/mean": 150.0}]
    (sentence,) = unlike(arm(fresh), arm(old))
    assert "staleness was not the same, 1 and 4 steps" in sentence and "fixed_lag" in sentence
    (sentence,) = unlike(arm(fresh), arm(longer))
    assert "response length was not the same, 100 and 150 tokens" in sentence
    assert unlike(arm(fresh), arm(fresh)) == unlike(arm([]), arm(old)) == []
    config = {"seed": 0}
    folders = [run(tmp_path / n, config | {"run_dir": n}, r[0]) for n, r in zip("ab", (fresh, old))]
    assert main(["compare", *folders]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Warning: the staleness was not the same" in said
    assert main(["compare", *folders, "json=true"]) == 0
    assert len(json.loads(capsys.readouterr().out)["warnings"]) == 1


@pytest.mark.parametrize(
    "names, sentence",
    [
        (["/nowhere", "/nowhere"], "/nowhere is not a run directory"),
        (["/nowhere"], "/nowhere is not a run directory"),
        ([], "takes DIR, and 0 were given"),
    ],
)
def test_what_is_no_run_is_refused(names, sentence, capsys):
    assert main(["compare", *names]) == 2
    assert sentence in capsys.readouterr().err


def test_a_run_alone_is_compared_with_nothing(two, capsys):
    assert main(["compare", two[0]]) == 2
    assert "a is one run: name the run to compare it with" in capsys.readouterr().err


def test_folders_may_be_named_as_other_commands_name_theirs(two, capsys):
    assert main(["compare", *(f"run_dir={folder}" for folder in two), "json=true"]) == 0
    named = capsys.readouterr().out
    assert main(["compare", *two, "json=true"]) == 0
    assert capsys.readouterr().out == named
