"""The commands as Python functions, for scripts and notebooks:

    import rlcore
    run = rlcore.train("quickstart", ["schedule.steps=20"], callbacks=[Mine()])
    run.metrics["reward/mean"].plot()

`import rlcore` loads none of the libraries that a run needs; the first call does."""

from __future__ import annotations

import asyncio
import json
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rlcore import cli
from rlcore.api_inputs import Inputs, as_words
from rlcore.errors import UserError
from rlcore.interfaces import Callback

if TYPE_CHECKING:
    from pandas import DataFrame

    from rlcore.config.schema import RunConfig

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RunResult:
    """A run folder, of a run that has ended or goes on. Example: load_run("runs/a").rows[-1]"""

    folder: Path

    def _repr_html_(self) -> str:
        """The curves of rewards and evaluations, as a notebook shows them; before the first step,
        the folder."""
        from rlcore.report.curves import Asked, write_curves

        names = {name for row in self.rows for name in row}
        y = [n for n in ("reward/mean", *sorted(self.evaluation)) if n in names][:4]
        if not y:
            return f"<p>run {self.folder}: no step yet</p>"
        with tempfile.TemporaryDirectory() as scratch:
            asked = Asked("step", tuple(y), 95.0, ())
            out = write_curves([str(self.folder)], "svg", asked, str(Path(scratch) / "run.svg"))
            return Path(out).read_text(encoding="utf-8")

    @property
    def rows(self) -> list[dict[str, Any]]:
        """metrics.jsonl and details.jsonl: one dictionary a step, by metric."""
        from rlcore.metrics.rows import run_rows

        return run_rows(self.folder)

    @property
    def metrics(self) -> DataFrame:
        """The rows as a pandas DataFrame with the step as its index. Raises UserError without
        pandas."""
        try:
            import pandas
        except ImportError as error:
            raise UserError(
                "run.metrics is a DataFrame of pandas, which is not installed: pip install pandas, "
                "or use run.rows, a list of dictionaries."
            ) from error
        return pandas.DataFrame(self.rows).set_index("step")

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Decoded samples of training and evaluations, in the order of their files; `source` is the
        file's name, such as step_000012."""
        from rlcore.metrics.run_folder import records

        files = sorted((self.folder / "samples").glob("*.jsonl"))
        return [{**record, "source": file.stem} for file in files for record in records(file)]

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration, as nested dictionaries."""
        from rlcore.metrics.run_folder import read_run

        return read_run(self.folder).settings

    @property
    def evaluation(self) -> dict[str, float]:
        """The newest results of each held-out task by metric, such as eval/digits/greedy."""
        return {n: v for row in self.rows for n, v in row.items() if n.startswith("eval/")}


def train(
    experiment: str | None = None,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    *,
    model: str | Path | None = None,
    data: str | Path | DataFrame | Sequence[Mapping[str, Any]] | None = None,
    reward: str | Callable[..., Any] | None = None,
    run_dir: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    config_dir: str | None = None,
) -> RunResult:
    """`rlcore train`: run to the end of the schedule, or until a callback returns False.

    `overrides`: words as of the command line, or settings by key, nested or not. `model`, `data`,
    `reward`: as `rlcore train model= data= reward=`; data may also be rows or a DataFrame, and the
    reward a callable, which are kept in run_dir/inputs. `run_dir`: default
    runs/<experiment>-<time>. Raises UserError before anything is started, StageError or
    DeadlineExceeded if the run fails.
    """
    named = [] if experiment is None else [f"experiment={experiment}"]
    given = Inputs(model, data, reward)
    if run_dir is None and given.objects:
        run_dir = Path("runs") / f"train-{time.strftime('%Y%m%d-%H%M%S')}"
    words = [*named, *given.words(run_dir), *as_words(overrides)]
    config = _config("train", words, run_dir, config_dir)
    from rlcore.commands.train import StopSignals
    from rlcore.commands.train import train as command

    stop = StopSignals()
    _apart(lambda: command(config, callbacks, stop), stop.ask)
    return RunResult(Path(config.run_dir))


def evaluate(
    run_dir: str | Path | None = None,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    *,
    checkpoint: str | None = None,
    config_dir: str | None = None,
) -> dict[str, float]:
    """`rlcore eval`: results on the held-out prompts by metric, of a run's newest checkpoint or of
    the model that `overrides` name with model or model.path. Raises as `train`."""
    words = as_words(overrides)
    config = _config("eval", words, run_dir, config_dir)
    from rlcore.commands.evaluate import evaluate as command

    model_named = cli.read(["eval", *words]).setting("model.path") is not None
    _apart(lambda: command(config, checkpoint, model_named=model_named))
    found: dict[str, float] = json.loads((Path(config.run_dir) / "eval.json").read_text())
    return found


def export(
    run_dir: str | Path,
    out: str | Path,
    *,
    checkpoint: str | None = None,
    optimizer: bool = False,
    form: str = "trained",
    dtype: str | None = None,
) -> Path:
    """`rlcore export`: write a checkpoint's model to a new folder, and return it. `form`: trained,
    rounded or compressed-tensors; `dtype`: float32, bfloat16, float16, or None for the dtype of the
    starting model's folder. Raises as `train`."""
    config = _config("export", [], run_dir, None)
    from rlcore.commands.evaluate import export as command

    _apart(
        lambda: command(config, checkpoint, str(out), optimizer=optimizer, form=form, dtype=dtype)
    )
    return Path(out)


def draw(
    run_dirs: Sequence[str | Path],
    out: str | Path,
    *,
    x: str = "step",
    y: Sequence[str] = (),
    ci: float = 95,
    labels: Sequence[str] = (),
) -> Path:
    """`rlcore report format=svg|pdf|csv`, by the suffix of `out`: curves of runs, those that differ
    by their seed alone merged, with t intervals of `ci` percent. Raises UserError."""
    from rlcore.config.verbs import FORMATS
    from rlcore.report.curves import Asked, write_curves

    suffix = Path(out).suffix.removeprefix(".")
    form = next((known for known in FORMATS if known == suffix), None)
    if form is None:
        raise UserError.choice("out", out, [f"a name that ends in .{known}" for known in FORMATS])
    asked = Asked(x, tuple(y), ci, tuple(labels))
    return write_curves([str(folder) for folder in run_dirs], form, asked, str(out))


def load_run(run_dir: str | Path) -> RunResult:
    """A run folder. Raises UserError if it holds no run."""
    from rlcore.metrics.run_folder import require_run

    require_run(Path(run_dir))
    return RunResult(Path(run_dir))


def _config(
    verb: str, words: Sequence[str], run_dir: str | Path | None, config_dir: str | None
) -> RunConfig:
    places = {"run_dir": run_dir, "config_dir": config_dir}
    further = [f"{key}={place}" for key, place in places.items() if place is not None]
    needed = ["out=."] if verb == "export" else []  # its own key, which is not read here
    given = cli.read([verb, *words, *further, *needed])
    for key in sorted(given.own.keys() - {"config_dir", "data", "out", "reward"}):
        raise UserError(
            f"{key}={given.own[key]} is read by the command rlcore {verb} alone: leave it out of "
            "the overrides, or use the command."
        )
    return cli.config_of(given)


def _apart(work: Callable[[], T], stop: Callable[[], None] | None = None) -> T:
    """Run `work`, in its own thread where this one has an event loop, as in a notebook. There,
    the first interrupt calls `stop`, and a second one is raised."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # raised to the caller, as without a thread
            future.set_exception(error)

    threading.Thread(target=run, name="rlcore", daemon=True).start()
    try:
        return future.result()
    except KeyboardInterrupt:
        if stop is None:
            raise
        stop()
        return future.result()
