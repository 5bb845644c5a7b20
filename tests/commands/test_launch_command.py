"""`rlcore launch`: the command around the launchers."""

import pytest

from rlcore.cli import main

WORDS = ["launch", "experiment=quickstart", "run_dir=runs/there"]


def test_a_dry_run_prints_what_would_be_started_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = [
        "cluster=slurm",
        "cluster.launch.nodes=3",
        "cluster.launch.learner_nodes=1",
        "dry_run=true",
    ]
    assert main([*WORDS, *words]) == 0
    printed = capsys.readouterr().out
    assert (
        "#SBATCH --nodes=3" in printed
        and "rlcore train experiment=quickstart run_dir=runs/there" in printed
    )
    assert "dry_run=" not in printed and "rlcore_learner" in printed
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words",
    [["dry_run=perhaps"], ["cluster=slurm", "cluster.launch.learner_nodes=1", "dry_run=true"]],
)
def test_what_cannot_be_launched_is_refused_in_a_sentence(words, capsys):
    assert main([*WORDS, *words]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
