"""What `rlcore scale` asked for outlives the attempts of one command."""

from rlcore.config.compose import load
from rlcore.runtime.scale import Wanted, ask


def _run(tmp_path, *words):
    (tmp_path / "config.yaml").write_text("")
    return load([f"run_dir={tmp_path}", "experiment=quickstart", "actor=[bf16,fp8]", "actor.bf16.count=2", *words])


def _counts(config):
    return {label: actor.count for label, actor in config.actor.items()}


def test_a_request_is_read_once_and_a_recovery_asks_for_the_fleet_s_size_again(tmp_path):
    config, wanted = _run(tmp_path), Wanted(tmp_path)
    assert wanted.start_with(config) == config and wanted() is None
    ask(tmp_path, {"bf16": 4})
    assert wanted() == {"bf16": 4} and wanted() is None
    wanted.keep({"bf16": 4, "fp8": 1, "evaluation": 1})
    assert _counts(wanted.start_with(config)) == {"bf16": 2, "fp8": 1}  # room for more is waited for beside the run
    assert wanted() == {"bf16": 4} and wanted() is None


def test_a_fleet_that_had_shrunk_starts_small(tmp_path):
    config, wanted = _run(tmp_path), Wanted(tmp_path)
    wanted.keep({"bf16": 1, "fp8": 0})
    assert _counts(wanted.start_with(config)) == {"bf16": 1, "fp8": 1}
    assert wanted() == {"fp8": 0}  # a label that the fleet has never had cannot grow again


def test_a_newer_request_wins_over_what_is_asked_for_again(tmp_path):
    config, wanted = _run(tmp_path), Wanted(tmp_path)
    wanted.keep({"bf16": 5, "fp8": 3})
    wanted.start_with(config)
    ask(tmp_path, {"fp8": 2})
    assert wanted() == {"bf16": 5, "fp8": 2} and wanted() is None
