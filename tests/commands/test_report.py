"""`rlcore report` judges runs by their own bounds."""

import json

import pytest

from rlcore.cli import main
from rlcore.config.compose import load, to_yaml


@pytest.mark.parametrize("ess, warned", [(0.5, True), (0.1, False)])
def test_a_report_lists_the_warnings_of_its_run(ess, warned, tmp_path):
    words = [f"run_dir={tmp_path}", "logging.warnings.window=2", f"logging.warnings.ess={ess}"]
    (tmp_path / "config.yaml").write_text(to_yaml(load(words)))
    rows = [{"step": step, "mismatch/ess": 0.2} for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["report", str(tmp_path)]) == 0
    text = (tmp_path / "report.html").read_text()
    assert ("mismatch/ess is 0.2 (steps 1 to 3" in text) == warned
    assert ("Too few steps to judge" in text) != warned


@pytest.mark.parametrize(
    "config, sentence",
    [
        (None, "not judged, since the folder holds no config.yaml"),
        ("seed: many", "not judged: "),
    ],
)
def test_a_run_that_cannot_be_judged_has_a_report_that_says_so(config, sentence, tmp_path):
    if config is not None:
        (tmp_path / "config.yaml").write_text(config)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "mismatch/ess": 0.2}\n')
    assert main(["report", str(tmp_path)]) == 0
    assert sentence in (tmp_path / "report.html").read_text()
