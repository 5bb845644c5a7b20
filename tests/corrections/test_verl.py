"""The module of docs/plug-ins.md inside verl, which is installed into a folder of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from test_trl import block
from timing import deadline

from rlcore.dumps.diagnose import diagnose

# what verl imports and our environment lacks
PACKAGES = (
    *("verl==0.9.1", "tensordict==0.15.3", "pyvers==0.2.3", "orjson==3.13.0"),
    "codetiming==1.4.0",
)


@pytest.fixture
def verl() -> str:
    """A folder that holds verl, kept between runs of the tests."""
    folder = Path(tempfile.gettempdir()) / f"rlcore-{PACKAGES[0].replace('==', '-')}"
    if not (folder / "verl" / "protocol.py").is_file():
        words = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target"]
        done = subprocess.run(
            [*words, str(folder), *PACKAGES], capture_output=True, text=True, timeout=deadline(600)
        )
        if done.returncode:
            pytest.skip(f"verl cannot be installed here: {done.stderr.strip().splitlines()[-1]}")
    return str(folder)


@pytest.mark.slow
@pytest.mark.processes
def test_verl_takes_its_weights_and_mask_from_the_pages_module(verl: str, tmp_path: Path) -> None:
    (tmp_path / "my_corrections.py").write_text(
        block("plug-ins.md", r"rlcore\.corrections\.plug_in import Corrector, in_verl"),
        encoding="utf-8",
    )
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", ""), verl]),
        "VERL_USE_EXTERNAL_MODULES": "my_corrections",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("verl_run.py"))],
        capture_output=True,
        text=True,
        timeout=deadline(300),
        env=env,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.rpartition("RESULT")[2])
    assert found["mask"] and found["page"] < 1e-6
    assert "rollout_corr/correction/veto/vetoed_share" in found["metrics"]
    for name in ("tis", "icepop"):  # verl's own formulas at the same thresholds
        assert found[name] < 1e-6 < 0.1 < found[name + " moved"]
    assert found["ais"] > 0.01
    rows = diagnose(tmp_path / "rows.jsonl")  # as docs/diagnose.md has verl write them
    assert rows.rows == 6 and rows.figures[""].figures["tokens"] == 20
