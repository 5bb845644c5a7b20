"""Nothing unsafe by default: what the package's own source may not do."""

import ast
from pathlib import Path

import pytest

from rlcore.config.compose import load
from rlcore.errors import UserError

PACKAGE = Path(__file__).resolve().parents[2] / "rlcore"
FORBIDDEN_MODULES = {"pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
# Runs the programs that models write, in its own confinement; compiled code goes from a confined
# process to another.
SANDBOX = Path("graders/sandbox")
CONFINED = {("marshal", SANDBOX / "script.py")}
FORBIDDEN_CALLS = {
    "torch.load",
    "torch.save",
    "np.load",
    "numpy.load",
    "yaml.load",
    "os.system",
    "eval",
    "exec",
}


def _nodes():
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            yield path.relative_to(PACKAGE), node


def test_nothing_is_unpickled_or_evaluated():
    bad = []
    for path, node in _nodes():
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        bad += [
            f"{path}:{node.lineno} imports {n}"
            for n in names
            if n.split(".")[0] in FORBIDDEN_MODULES and (n, path) not in CONFINED
        ]
        if (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in FORBIDDEN_CALLS
            and SANDBOX not in path.parents
        ):
            bad.append(f"{path}:{node.lineno} calls {ast.unparse(node.func)}")
    assert not bad


def test_no_code_of_a_model_folder_and_no_shell_is_ever_run():
    for path, node in _nodes():
        if isinstance(node, ast.keyword) and node.arg in (
            "trust_remote_code",
            "shell",
            "allow_pickle",
        ):
            assert isinstance(node.value, ast.Constant) and node.value.value is False, (
                f"{path}: {ast.unparse(node)}"
            )
    with pytest.raises(UserError, match="trust_remote_code"):
        load(["experiment=quickstart", "run_dir=x", "model.trust_remote_code=true"])


def test_the_clock_of_the_wall_decides_nothing():
    """Deadlines and durations are monotonic: a clock that jumps changes nothing."""
    calls = [
        f"{path}:{node.lineno}"
        for path, node in _nodes()
        if isinstance(node, ast.Call)
        and ast.unparse(node.func)
        in ("time.time", "datetime.now", "datetime.datetime.now", "time.perf_counter")
    ]
    # the hour beside a note, the date of an entry of log.jsonl, the Unix times that Prometheus is
    # given, for how long a watched run has done what it does, and when a job was submitted
    metrics = ("console.py", "log.py", "prometheus.py", "sinks.py")
    shown = (*(f"metrics/{name}" for name in metrics), "launch/job.py")
    assert all(c.startswith(shown) for c in calls), calls
