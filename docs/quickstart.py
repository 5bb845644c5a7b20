"""Draws README's picture, docs/quickstart.svg, from the curves of a quickstart's run.

    python docs/quickstart.py [RUN_DIR]

With a run its curves are written to docs/data/quickstart.json first. The picture names what it was
made of; tests/test_readme.py fails when that is newer.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from pathlib import Path

from rlcore.metrics.rows import run_rows
from rlcore.report.curves import Asked, write_curves

DOCS = Path(__file__).resolve().parent
DATA, PICTURE = DOCS / "data" / "quickstart.json", DOCS / "quickstart.svg"
EXPERIMENT = DOCS.parent / "configs" / "experiment" / "quickstart.yaml"
DRAWN = (Path(__file__), DATA)
METRICS = {
    "reward/mean": "mean reward",
    "eval/digits/greedy": "held-out accuracy",
    "mismatch/kl_k3": "mismatch: KL a token (nats)",
}


def digest(*files: Path) -> str:
    """A digest of files' contents."""
    return hashlib.blake2b(b"".join(map(Path.read_bytes, files)), digest_size=8).hexdigest()


def store(run_dir: Path) -> None:
    """Keep the curves of a run, and which experiment it was."""
    rows = [{n: row[n] for n in ("step", *METRICS) if n in row} for row in run_rows(run_dir)]
    lines = ",\n".join(json.dumps(row) for row in rows)
    DATA.write_text(f'{{"experiment": "{digest(EXPERIMENT)}", "rows": [\n{lines}\n]}}\n')


def draw() -> None:
    """Draw the kept curves, with a digest of all that the picture depends on."""
    rows = json.loads(DATA.read_text())["rows"]
    with tempfile.TemporaryDirectory() as made:
        Path(made, "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        asked = Asked(y=tuple(METRICS), ylabel=tuple(METRICS.values()), width_mm=260)
        write_curves([made], "svg", asked, str(PICTURE))
    PICTURE.write_text(f"{PICTURE.read_text()}<!-- {digest(*DRAWN)} -->\n")


if __name__ == "__main__":
    if sys.argv[1:]:
        store(Path(sys.argv[1]))
    draw()
