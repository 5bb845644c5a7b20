"""What `rlcore scale` asked for survives the attempts of one command."""

import pytest

from rlcore.cli import main
from rlcore.commands.scale import ScaleRequests, scale
from rlcore.config.compose import load


def _run(tmp_path, *words):
    (tmp_path / "config.yaml").write_text("")
    fleet = ("actor=[bf16,fp8]", "actor.bf16.count=2")
    return load([f"run_dir={tmp_path}", "experiment=quickstart", *fleet, *words])


def _counts(config):
    return {label: actor.count for label, actor in config.actor.items()}


def test_a_request_is_read_once_and_a_recovery_asks_for_the_fleet_s_size_again(tmp_path):
    config, requests = _run(tmp_path), ScaleRequests(tmp_path)
    assert requests.start_with(config) == config and requests() is None
    scale(tmp_path, {"bf16": 4})
    assert requests() == {"bf16": 4} and requests() is None
    requests.keep({"bf16": 4, "fp8": 1, "evaluation": 1})
    # Room for more is waited for while the run goes on.
    assert _counts(requests.start_with(config)) == {"bf16": 2, "fp8": 1}
    assert requests() == {"bf16": 4} and requests() is None


def test_a_fleet_that_had_shrunk_starts_small(tmp_path):
    config, requests = _run(tmp_path), ScaleRequests(tmp_path)
    requests.keep({"bf16": 1, "fp8": 0})
    assert _counts(requests.start_with(config)) == {"bf16": 1, "fp8": 1}
    assert requests() == {"fp8": 0}  # a label that the fleet never had cannot grow again


def test_a_newer_request_takes_precedence_over_one_that_is_repeated(tmp_path):
    config, requests = _run(tmp_path), ScaleRequests(tmp_path)
    requests.keep({"bf16": 5, "fp8": 3})
    requests.start_with(config)
    scale(tmp_path, {"fp8": 2})
    assert requests() == {"bf16": 5, "fp8": 2} and requests() is None


@pytest.mark.parametrize(
    "words",
    [
        "",
        "run_dir=nowhere actor.bf16.count=2",
        "run_dir=. learner.ranks=2",
        "run_dir=. actor.bf16.count=x",
    ],
)
def test_scale_refuses_what_it_does_not_know(words, capsys):
    assert main(["scale", *words.split()]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
