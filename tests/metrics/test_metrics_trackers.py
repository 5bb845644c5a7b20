"""Sinks of trackers: each is called in its own form, and refused in a sentence where missing."""

import sys
from types import ModuleType

import pytest

from rlcore.errors import UserError
from rlcore.metrics.logger import SINKS, open_logger
from rlcore.metrics.specs import LoggingSpec

CONFIG = {"logging": {"project": "mine"}, "seed": 1}
ROWS = ({"step": 1, "reward/mean": 0.5, "eval/digits/mean@4": None}, {"step": 2, "a/mean@4": 1})


def module(name, calls, *functions):
    """A package that records how it is called."""

    def recorder(function):
        return lambda *values, **named: calls.append((function, values, named))

    made = ModuleType(name)
    for function in functions:
        setattr(made, function, recorder(function))
    return made


class Writer:
    def __init__(self, folder):
        self.calls = Writer.calls = [("open", folder)]

    def add_scalar(self, name, value, step):
        self.calls.append((name, value, step))

    def close(self):
        self.calls.append("closed")


def logged(tmp_path, name):
    spec = LoggingSpec(console="off", wandb="disabled", sinks=(name,))
    with open_logger(tmp_path, spec, config=CONFIG, total_steps=2) as logger:
        for row in ROWS:
            logger.log(row)
        logger.finish({"steps": 2})


def test_trackio(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setitem(sys.modules, "trackio", module("trackio", calls, "init", "log", "finish"))
    logged(tmp_path, "trackio")
    named = {"project": "mine", "name": tmp_path.name, "config": CONFIG}
    assert calls[0] == ("init", (), named)
    assert calls[1] == (
        "log",
        ({"step": 1.0, "reward/mean": 0.5, "metrics/nonfinite": 0.0},),
        {"step": 1},
    )
    assert [call[0] for call in calls] == ["init", "log", "log", "finish"]


def test_mlflow(tmp_path, monkeypatch):
    calls = []
    functions = ("set_experiment", "start_run", "log_dict", "log_metrics", "end_run")
    monkeypatch.setitem(sys.modules, "mlflow", module("mlflow", calls, *functions))
    logged(tmp_path, "mlflow")
    assert calls[0][1] == ("mine",) and calls[1][2] == {"run_name": tmp_path.name}
    assert (
        "log_metrics",
        ({"step": 2.0, "a/mean_at_4": 1.0, "metrics/nonfinite": 0.0},),
        {"step": 2},
    ) in calls
    assert [call[0] for call in calls].count("end_run") == 1
    assert calls[-1] == ("end_run", ("FINISHED",), {})


def test_tensorboard(tmp_path, monkeypatch):
    fake = ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "tensorboard", ModuleType("tensorboard"))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    logged(tmp_path, "tensorboard")
    assert Writer.calls[0] == ("open", str(tmp_path / "tensorboard"))
    assert ("reward/mean", 0.5, 1) in Writer.calls and Writer.calls[-1] == "closed"


@pytest.mark.parametrize("name", SINKS)
def test_a_tracker_that_is_not_installed_is_refused_in_a_sentence(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=rf"logging\.sinks={name} needs .*pip install {name}"):
        logged(tmp_path, name)
