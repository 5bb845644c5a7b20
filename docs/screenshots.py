"""Pictures of the report, the console and the dashboard of a run, for docs/monitoring.md.

    python docs/screenshots.py RUN_DIR     write docs/images/{report,console,dashboard}.png

Chromium takes them (`CHROMIUM` names another program). The dashboard is drawn from the panels of
launchers/grafana-dashboard.json and the run's rows, without Grafana: panels of actors' own gauges,
which rows do not have, are left out. `docs/images/screenshots.json` has a digest of the sources of
each picture; `make lint` says which pictures are older than theirs (`stale`).
"""

from __future__ import annotations

import hashlib
import html
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
IMAGES = ROOT / "docs" / "images"
DIGESTS = IMAGES / "screenshots.json"
DASHBOARD = ROOT / "launchers" / "grafana-dashboard.json"
SOURCES = {  # picture -> what it is made from
    "report": ("rlcore/report/page.py", "rlcore/report/figures.py", "rlcore/report/assets/*"),
    "console": ("rlcore/commands/watch.py", "rlcore/metrics/console.py"),
    "dashboard": ("launchers/grafana-dashboard.json",),
}
SIZES = {"report": (1100, 900), "console": (640, 310), "dashboard": (1100, 520)}
COLOURS = 64  # of a picture's palette
DEADLINE_S = 120


def digest(picture: str) -> str:
    """A digest of a picture's sources."""
    found = hashlib.blake2b(digest_size=12)
    for pattern in SOURCES[picture]:
        for file in sorted(ROOT.glob(pattern)):
            found.update(file.read_bytes())
    return found.hexdigest()


def stale() -> list[str]:
    """Pictures whose sources are newer than they are."""
    known = json.loads(DIGESTS.read_text()) if DIGESTS.exists() else {}
    return [name for name in SOURCES if known.get(name) != digest(name)]


def photograph(page: Path, picture: str) -> None:
    """Write docs/images/PICTURE.png of an HTML file, with a palette, so that it stays small."""
    from PIL import Image

    width, height = SIZES[picture]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        shot = Path(folder) / "shot.png"
        words = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        words += ["--disable-dev-shm-usage", f"--user-data-dir={folder}/profile"]
        words += ["--virtual-time-budget=10000", f"--window-size={width},{height}"]
        chromium = os.environ.get("CHROMIUM", "chromium")
        subprocess.run(
            [chromium, *words, f"--screenshot={shot}", f"file://{page}"],
            check=True,
            timeout=DEADLINE_S,
            capture_output=True,
        )
        with Image.open(shot) as image:
            small = image.convert("RGB").quantize(COLOURS)
            small.save(IMAGES / f"{picture}.png", optimize=True)


def console_page(run_dir: str) -> str:
    """The console of `rlcore watch once=true`, as HTML."""
    from rich.console import Console
    from rich.terminal_theme import DIMMED_MONOKAI

    from rlcore.commands.watch import watch
    from rlcore.config.compose import load

    console = Console(record=True, width=110, file=io.StringIO(), force_terminal=True)
    watch(load([f"run_dir={run_dir}", "resume=auto"]), once=True, console=console)
    page = console.export_html(theme=DIMMED_MONOKAI)
    whole, shown = str(Path(run_dir).resolve()), f"runs/{Path(run_dir).name}"
    return page.replace(f" {whole} ", f" {shown} " + "─" * (len(whole) - len(shown)))


def dashboard_page(rows: Sequence[dict[str, Any]]) -> str:
    """The panels of the Grafana dashboard, drawn from a run's rows."""
    panels = (panel for panel in json.loads(DASHBOARD.read_text())["panels"])
    shown = (figure for panel in panels if (figure := _panel(panel, rows)))
    style = (
        "body{margin:8px;background:#111217;color:#ccccdc;font:13px sans-serif;display:grid;"
        "grid-template-columns:1fr 1fr;gap:8px}figure{margin:0;padding:8px;background:#181b1f;"
        "border:1px solid #2c3235}svg{width:100%;height:110px}"
    )
    return f"<meta charset=utf-8><style>{style}</style>{''.join(shown)}"


def _panel(panel: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """A panel with a curve for each metric that rows have; "" without one."""
    colours = ("#73bf69", "#f2cc0c", "#5794f2")
    curves = [c for t in panel["targets"] for c in _curves(t["expr"], rows)]
    if not curves:
        return ""
    lines, names = [], []
    for colour, (name, values) in zip(colours, curves):
        low, high = min(values), max(values)
        scaled = [(v - low) / (high - low) if high > low else 0.5 for v in values]
        step = 400 / (len(values) - 1)
        points = (f"{i * step:.0f},{96 - 90 * s:.0f}" for i, s in enumerate(scaled))
        lines.append(f'<polyline fill=none stroke="{colour}" points="{" ".join(points)}"/>')
        names.append(f'<span style="color:{colour}">{html.escape(name)} {values[-1]:.3g}</span>')
    picture = f'<svg viewBox="0 0 400 100" preserveAspectRatio=none>{"".join(lines)}</svg>'
    return f"<figure><b>{html.escape(panel['title'])}</b>{picture}<br>{' · '.join(names)}</figure>"


def _curves(expression: str, rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, list[float]]]:
    from rlcore.metrics.prometheus import exported_name

    pattern = re.search(r"rlcore_[\w.*]+", expression)
    wanted = re.compile(pattern[0].removesuffix("_total")) if pattern else None
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] for row in rows if isinstance(row.get(name), (int, float))]
        if wanted and len(values) > 1 and wanted.fullmatch(exported_name(name)):
            yield name, values


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    run_dir = sys.argv[1]
    if not (Path(run_dir) / "metrics.jsonl").is_file():
        sys.exit(f"{run_dir} holds no run: give the folder of one that has ended.")
    rows = [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]
    with tempfile.TemporaryDirectory() as folder:
        pages = {name: Path(folder) / f"{name}.html" for name in SOURCES}
        report = ["-m", "rlcore.cli", "report", run_dir, f"out={pages['report']}"]
        subprocess.run([sys.executable, *report], check=True, timeout=DEADLINE_S)
        pages["console"].write_text(console_page(run_dir), encoding="utf-8")
        pages["dashboard"].write_text(dashboard_page(rows), encoding="utf-8")
        for name, page in pages.items():
            photograph(page, name)
    DIGESTS.write_text(json.dumps({name: digest(name) for name in SOURCES}, indent=2) + "\n")


if __name__ == "__main__":
    main()
