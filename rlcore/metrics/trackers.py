"""Sinks of trackers that are separate packages: TensorBoard, MLflow, Trackio. None of the
packages is needed by rlcore; each sink is an entry of `logging.sinks`."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlcore.errors import UserError
from rlcore.metrics.rows import Row
from rlcore.metrics.sinks import Sink


def _package(module: str, name: str) -> Any:
    """Import a tracker. Raises UserError, with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"logging.sinks={name} needs the package {name}, which is not installed: "
            f"pip install {name}, or leave it out."
        ) from error


def _installed(name: str) -> None:
    """Raise UserError for a tracker that is not installed, without importing it."""
    try:
        importlib.metadata.version(name)  # not find_spec: a run folder has such folders, too
    except importlib.metadata.PackageNotFoundError as error:
        raise UserError(
            f"logging.sinks={name} needs the package {name}, which is not installed: "
            f"pip install {name}, or leave it out."
        ) from error


def _numbers(row: Row) -> dict[str, float]:
    return {name: float(value) for name, value in row.items() if value is not None}


class TensorboardSink(Sink):
    """Scalars into RUN_DIR/tensorboard; `tensorboard --logdir runs` shows them."""

    title = "TensorBoard (logging.sinks)"

    @classmethod
    def _require(cls) -> None:
        _installed("tensorboard")

    def __init__(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        _package("tensorboard", "tensorboard")
        writer = _package("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self._writer = writer(str(run_dir / "tensorboard"))

    def log(self, row: Row) -> None:
        for name, value in _numbers(row).items():
            self._writer.add_scalar(name, value, int(row["step"] or 0))

    def close(self) -> None:
        self._writer.close()


class MlflowSink(Sink):
    """A run of the experiment `logging.project`, at MLFLOW_TRACKING_URI. MLflow's names have no @:
    eval/digits/mean@4 is eval/digits/mean_at_4 there."""

    title = "MLflow (logging.sinks)"
    in_folder = False

    @classmethod
    def _require(cls) -> None:
        _installed("mlflow")

    def __init__(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        self._mlflow = _package("mlflow", "mlflow")
        self._mlflow.set_experiment(config["logging"]["project"])
        self._mlflow.start_run(run_name=run_dir.name)
        self._mlflow.log_dict(dict(config), "config.json")
        self._status: str | None = "FAILED"

    def log(self, row: Row) -> None:
        values = {name.replace("@", "_at_"): value for name, value in _numbers(row).items()}
        self._mlflow.log_metrics(values, step=int(row["step"] or 0))

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._status = "FINISHED"

    def close(self) -> None:
        if self._status is not None:
            self._mlflow.end_run(self._status)
            self._status = None


class TrackioSink(Sink):
    """A run of the project `logging.project`; `trackio show` shows it, without an account."""

    title = "Trackio (logging.sinks)"
    in_folder = False

    @classmethod
    def _require(cls) -> None:
        _installed("trackio")

    def __init__(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        self._trackio = _package("trackio", "trackio")
        project = config["logging"]["project"]
        self._trackio.init(project=project, name=run_dir.name, config=dict(config))
        self._open = True

    def log(self, row: Row) -> None:
        self._trackio.log(_numbers(row), step=int(row["step"] or 0))

    def close(self) -> None:
        if self._open:
            self._open = False
            self._trackio.finish()
