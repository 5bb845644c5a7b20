"""A code block of docs/plug-ins.md inside TRL's GRPOTrainer. TRL is not among our dependencies:
it is installed into a folder of its own."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from timing import deadline

from rlcore.dumps.diagnose import diagnose
from rlcore.models.fresh import build_fresh_model
from rlcore.models.specs import FreshModelSpec

DOCS = Path(__file__).parents[2] / "docs"
# what TRL imports and our environment lacks; versions are those that the page was run with
PACKAGES = (
    "trl==1.16.0",
    "datasets==5.2.0",
    "pandas==3.1.1",
    "multiprocess==0.70.19",
    "httpx==0.28.1",
    "python-dateutil==4.0.0",
    "six==1.17.0",
    "pytz==2026.6",
    "tzdata==2026.6",
)


def block(page: str, imports: str) -> str:
    """The page's only code block in Python that imports `imports`."""
    text = (DOCS / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (found,) = [own for own in blocks if re.search(rf"^(from|import) {imports}\b", own, re.M)]
    return found


@pytest.fixture
def trl() -> str:
    """A folder that holds TRL, kept between runs of the tests."""
    folder = Path(tempfile.gettempdir()) / f"rlcore-{PACKAGES[0].replace('==', '-')}"
    if not (folder / "trl/trainer/grpo_trainer.py").is_file():
        words = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target"]
        done = subprocess.run(
            [*words, str(folder), *PACKAGES], capture_output=True, text=True, timeout=deadline(600)
        )
        if done.returncode:
            pytest.skip(f"TRL cannot be installed here: {done.stderr.strip().splitlines()[-1]}")
    return str(folder)


@pytest.mark.slow
@pytest.mark.processes
def test_the_pages_blocks_train_in_trl(trl: str, tmp_path: Path) -> None:
    """With an actor that matches, alpha is 0 and the run is TRL's own; with one that does not, the
    weights change it."""
    model = build_fresh_model(
        tmp_path / "model",
        "0123456789=+",
        FreshModelSpec(hidden_size=32, layers=1, heads=2, kv_heads=1, head_dim=16),
        seed=3,
        max_len=64,
    )
    (tmp_path / "block.py").write_text(block("plug-ins.md", "trl"), encoding="utf-8")
    (tmp_path / "writing.py").write_text(block("diagnose.md", "trl"), encoding="utf-8")
    words = [sys.executable, str(Path(__file__).parent / "trl_run.py"), str(model), str(tmp_path)]
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", ""), trl])
    env = os.environ | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=deadline(600), env=env, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.rpartition("RESULT")[2])
    assert found["matched"]["correction/ais/alpha"] == 0.0 and found["from_trl"] < 1e-6
    assert 0.0 < found["mismatched"]["correction/ais/alpha"] <= 1.0
    assert found["moved"] > 1e-4 and found["steps"] == 4
    # every other token is 0.3 nats off
    figures = diagnose(tmp_path / "rows.jsonl").figures[""].figures
    off = figures["abs_dlogp_mean"] / 0.3
    assert 0.2 < off <= 0.5 and figures["answers"] % 4 == 0
    assert figures["kl_k3"] == pytest.approx(off * (math.expm1(0.3) - 0.3), rel=1e-3)
