"""`import rlcore`: the commands as functions, and callbacks that a run calls."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import rlcore
from rlcore.advisor.simulate.clock import run_simulated
from rlcore.advisor.simulate.loop import Scenario, Simulation
from rlcore.commands.train import StopSignals
from rlcore.errors import UserError
from rlcore.loop.specs import CheckpointSpec, EvaluationSpec, ScheduleSpec
from rlcore.metrics.logger import MetricsLogger, RunReporter
from rlcore.metrics.sinks import CallbackSink, JsonlSink, SamplesSink, unguarded

HEAVY = ("torch", "ray", "vllm", "transformers", "deepspeed", "hydra", "numpy", "pandas")


def test_importing_it_loads_nothing_else():
    code = f"import sys, rlcore; print([m for m in {HEAVY} if m in sys.modules]); rlcore.train"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert set(rlcore.__all__) == {n for n in rlcore.__all__ if hasattr(rlcore, n)}
    with pytest.raises(AttributeError, match="no attribute trian"):
        rlcore.trian  # noqa: B018


class Recorder(rlcore.Callback):
    """Ends the run after `last` steps."""

    def __init__(self, last):
        self.last = last
        self.called = []

    def on_step(self, step, metrics):
        self.called.append(("step", step))
        assert json.dumps(dict(metrics)) and metrics["step"] == step
        return step < self.last

    def on_evaluation(self, step, results):
        self.called.append(("evaluation", step, sorted(results)))

    def on_checkpoint(self, step, folder):
        self.called.append(("checkpoint", step, Path(folder).name))

    def on_end(self, summary):
        self.called.append(("end", summary))


def simulated(folder, *callbacks):
    """A run in simulated time with these callbacks, to its end."""
    made = []

    async def main(logger):
        schedule = ScheduleSpec(steps=9, groups_per_step=4, max_staleness=1)
        scenario = Scenario(
            schedule,
            evaluation=EvaluationSpec(every=2, at_start=False, prompts=2),
            checkpoint=CheckpointSpec(every=2, every_s=0),
        )
        made.append(Simulation(scenario, folder / "checkpoints", beside=RunReporter(logger)))
        return await made[0].run()

    sink = CallbackSink(folder, callbacks, lambda: made[0].controller.request_stop())
    rows = JsonlSink(folder, unguarded, print)
    with MetricsLogger([rows, SamplesSink(folder), sink]) as logger:
        run_simulated(main(logger))
        logger.samples("step_000001", [{"prompt": "1+1=", "response": "2", "reward": 1.0}])
        logger.finish({"steps": made[0].progress.step})
    return made[0]


def test_callbacks_see_a_run_and_end_it(tmp_path):
    recorder = Recorder(last=4)
    simulation = simulated(tmp_path, recorder)
    assert simulation.progress.step == 4 and simulation.controller.stop_requested
    called = recorder.called
    assert [c[1] for c in called if c[0] == "step"] == [1, 2, 3, 4]
    assert called[-1] == ("end", {"steps": 4})
    assert ("checkpoint", 2, "step_000002") in called and ("checkpoint", 4, "step_000004") in called
    evaluated = [c for c in called if c[0] == "evaluation"]
    assert evaluated and all(n.startswith("eval/") for c in evaluated for n in c[2])


def test_an_error_in_a_callback_ends_the_run_and_reaches_on_end(tmp_path):
    class Broken(Recorder):
        def on_step(self, step, metrics):
            raise KeyError("mine")

    broken = Broken(last=9)
    with pytest.raises(KeyError, match="mine"):
        simulated(tmp_path, broken)
    assert broken.called[-1] == ("end", {"error": "'mine'"})


def test_a_run_is_loaded_with_its_rows_and_samples(tmp_path, monkeypatch):
    simulated(tmp_path, Recorder(last=3))
    run = rlcore.load_run(tmp_path)
    assert [row["step"] for row in run.rows] == [1, 2, 3]
    assert set(run.evaluation) == {n for r in run.rows for n in r if n.startswith("eval/")}
    (sample,) = run.samples
    assert sample["response"] == "2" and sample["source"] == "step_000001"
    (tmp_path / "config.yaml").write_text("seed: 3\n")
    assert run.config == {"seed": 3}
    made = SimpleNamespace(set_index=lambda name: ("frame", name))
    frames = SimpleNamespace(DataFrame=lambda rows: made if rows == run.rows else None)
    monkeypatch.setitem(sys.modules, "pandas", frames)
    assert run.metrics == ("frame", "step")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match=r"pip install pandas, or use run\.rows"):
        _ = run.metrics
    with pytest.raises(UserError, match="is not a run directory"):
        rlcore.load_run(tmp_path / "nothing")


def test_a_wrong_word_is_refused_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"schedule\.stpes"):
        rlcore.train("quickstart", ["schedule.stpes=3"])
    with pytest.raises(UserError, match="holds no valid checkpoint"):
        (tmp_path / "run").mkdir()
        rlcore.export("run", "out")
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda words: rlcore.train("quickstart", words), "dry_run=true"),
        (lambda words: rlcore.evaluate("run", words), "checkpoint=step_000001"),
    ],
)
def test_a_word_that_the_command_alone_reads_is_refused(call, word, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"{word} is read by the command rlcore .* alone: leave it"):
        call([word])
    assert not list(tmp_path.iterdir())


def test_a_stop_that_is_asked_for_early_is_kept_for_the_controller():
    asked = []

    async def run(stop):
        stop.listen(SimpleNamespace(request_stop=lambda: asked.append(True)), print)

    stop = StopSignals()
    stop.ask()
    asyncio.run(run(stop))
    assert asked == [True] and stop.requested
    stop.ask()
    assert asked == [True, True]


SCRIPT = """
import asyncio, sys
import rlcore

class Stop(rlcore.Callback):
    def on_step(self, step, metrics):
        return step < 2

async def cell():  # a notebook's event loop
    return rlcore.train("quickstart", sys.argv[2:], run_dir=sys.argv[1], callbacks=[Stop()])

if __name__ == "__main__":
    run = asyncio.run(cell())
    print("steps", len(run.rows), "of", run.config["schedule"]["steps"])
    print("exported", rlcore.export(sys.argv[1], sys.argv[1] + "-model"))
"""


@pytest.mark.slow
@pytest.mark.cluster
def test_a_script_trains_stops_and_exports(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    words = ["model.fresh.hidden_size=64", "model.fresh.layers=2", "model.warmup.steps=20"]
    words += ["schedule.steps=5", "schedule.groups_per_step=8", "evaluation.at_start=false"]
    words += ["evaluation.every=0", "evaluation.prompts=8", "logging.wandb=disabled"]
    words += ["cluster.object_store_mib=128", "model.fresh.intermediate_size=192"]
    command = [sys.executable, "script.py", str(tmp_path / "run"), *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "steps 2 of 5" in done.stdout
    assert (tmp_path / "run-model" / "config.json").is_file()
    assert "2 optimizer steps" in (tmp_path / "run-model" / "README.md").read_text()
