"""`rlcore scale`: what is asked of a run is checked, answered, and survives the attempts of one
command."""

import json

import pytest

from rlcore.cli import main
from rlcore.commands.owner import own
from rlcore.commands.scale import CONTROL, MOST, ScaleRequests, scale
from rlcore.config.compose import load, to_yaml
from rlcore.errors import DeadlineExceeded, UserError


def _run(tmp_path, *words):
    fleet = ("actor=[bf16,fp8]", "actor.bf16.count=2")
    config = load([f"run_dir={tmp_path}", "experiment=quickstart", *fleet, *words])
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    return config


def _counts(config):
    return {label: actor.count for label, actor in config.actor.items()}


def _ask(tmp_path, counts):
    (tmp_path / CONTROL).parent.mkdir(exist_ok=True)
    (tmp_path / CONTROL).write_text(json.dumps({"request": "r", "counts": counts}))


def test_a_request_is_read_once_and_a_recovery_asks_for_the_fleet_s_size_again(tmp_path):
    config, requests = _run(tmp_path), ScaleRequests(tmp_path)
    assert requests.start_with(config) == config and requests() is None
    _ask(tmp_path, {"bf16": 4})
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
    _ask(tmp_path, {"fp8": 2})
    assert requests() == {"bf16": 5, "fp8": 2} and requests() is None


@pytest.mark.parametrize(
    "words",
    [
        "",
        "run_dir=nowhere actor.bf16.count=2",
        "run_dir=. learner.ranks=2",
        "run_dir=. actor.bf16.count=x",
        "run_dir=. actor.bf16.count=-1",
        "run_dir=. actor.bf16.count=1.5",
        "run_dir=. actor.bf16.count=\N{SUPERSCRIPT TWO}",
    ],
)
def test_scale_refuses_what_it_does_not_know(words, capsys):
    assert main(["scale", *words.split()]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("actor.bf16.count=0", f"from 1 to {MOST}"),
        ("actor.bf16.count=100000000", f"from 1 to {MOST}"),
        (f"actor.bf16.count={'9' * 5000}", f"from 1 to {MOST}"),
        ("actor.bf61.count=2", "choose one of: bf16, fp8"),
    ],
)
def test_scale_refuses_counts_and_labels_that_no_run_could_have(tmp_path, word, why, capsys):
    _run(tmp_path)
    with own(tmp_path, "rlcore train"):
        before = {p.name for p in tmp_path.rglob("*")}
        assert main(["scale", f"run_dir={tmp_path}", word]) == 2
        assert why in capsys.readouterr().err
        assert {p.name for p in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("command", [None, "rlcore report"])
def test_scale_refuses_a_folder_in_which_no_run_is_going_on(tmp_path, command, capsys):
    _run(tmp_path)
    owner = own(tmp_path, command) if command else None
    assert main(["scale", f"run_dir={tmp_path}", "actor.bf16.count=3"]) == 2
    assert "no run is going on there" in capsys.readouterr().err
    assert not (tmp_path / CONTROL).exists()
    if owner:
        owner.release()


@pytest.mark.parametrize("refused", ["", "schedule.colocated=true ties every actor to a GPU."])
def test_scale_waits_for_the_run_s_answer(tmp_path, refused):
    _run(tmp_path)
    requests, read = ScaleRequests(tmp_path), []

    def a_heartbeat(seconds):
        if counts := requests():
            read.append(counts)
            requests.answer(refused)

    with own(tmp_path, "rlcore train"):
        if refused:
            with pytest.raises(UserError, match="colocated"):
                scale(tmp_path, {"bf16": 3}, sleep=a_heartbeat)
        else:
            assert scale(tmp_path, {"bf16": 3}, sleep=a_heartbeat) == 0
        assert read == [{"bf16": 3}]


def test_a_request_that_no_run_reads_is_withdrawn(tmp_path):
    _run(tmp_path)
    with own(tmp_path, "rlcore train"):
        with pytest.raises(DeadlineExceeded, match=r"withdrawn.*heartbeat_s.*log\.jsonl"):
            scale(tmp_path, {"bf16": 3}, timeout_s=0.0)
        assert ScaleRequests(tmp_path)() is None


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "7",
        '{"counts": []}',
        '{"counts": {"bf16": "two"}}',
        '{"counts": {"bf16": true}}',
        '{"counts": {"bf16": -1}}',
        '{"counts": {"bf16": 1e300}}',
        "[" * 100_000,
        b"\xff\xfe",
    ],
)
def test_a_control_file_that_is_no_request_is_refused_in_a_sentence(tmp_path, text):
    requests = ScaleRequests(tmp_path)
    path = tmp_path / CONTROL
    path.parent.mkdir()
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=r"control/actors\.json"):
        requests()
    assert requests() is None
    _ask(tmp_path, {"bf16": 4})
    assert requests() == {"bf16": 4}


def test_a_control_file_that_cannot_be_read_is_said_once(tmp_path):
    requests = ScaleRequests(tmp_path)
    (tmp_path / CONTROL).mkdir(parents=True)
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        requests()
    assert requests() is None
