"""What was run where: records replace one another, and the places are those of docs/status.md."""

import json
import sys
from datetime import date
from types import SimpleNamespace

import pytest
from tier_plugin import _Status

from benchmarks import status
from benchmarks.status import FILE, PARTS, PLACES, ROOT, lines, measured, record, run_and_record


def test_a_record_replaces_that_of_its_place_and_that_of_none(tmp_path):
    file = tmp_path / "status.jsonl"
    record("a", "nowhere", "a test", file=file)
    record("b", "cpu", "make demo", file=file)
    record("a", "h100", "check.py", "gpu.md", file=file)
    record("b", "cpu", "make quickstart", file=file)
    found = [(line["what"], line["where"], line["by"]) for line in lines(file)]
    assert found == [("a", "h100", "check.py"), ("b", "cpu", "make quickstart")]
    with pytest.raises(ValueError, match="where='moon'"):
        record("a", "moon", "", file=file)


def test_parts_of_a_check_count_where_they_have_figures(tmp_path):
    rows = [{"part": "head", "s": 1}, {"part": "fp8", "what": "no vLLM"}, {"part": "machine"}]
    file = tmp_path / "gpu_check_a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert measured([file]) == [PARTS["head"]]


def test_a_benchmark_records_how_it_ended(tmp_path):
    file = tmp_path / "status.jsonl"

    def ends(main):
        with pytest.raises((SystemExit, OSError)):
            run_and_record(main, "benchmarks/faults/soak.py", file)
        return lines(file)[0]["outcome"] if file.exists() else None

    def raises():
        raise OSError("full")

    assert ends(lambda: sys.exit(0)) is None  # --help
    assert ends(lambda: None) == "passed"
    (line,) = lines(file)
    assert line["by"] == "benchmarks/faults/soak.py" and line["versions"]["torch"]
    assert date.fromisoformat(line["date"])
    assert [ends(lambda: 1), ends(raises)] == ["failed", "failed: OSError"]
    assert ends(lambda: sys.exit("wrong")) == "failed"


def test_slow_tests_record_how_their_files_ended(tmp_path):
    file = tmp_path / "status.jsonl"
    for name in ("a", "b", "c"):
        record(name, "cpu", f"tests/test_{name}.py", file=file)
    told = _Status(file)
    for name, outcome in (("a", "passed"), ("b", "passed"), ("b", "failed"), ("b", "passed")):
        report = SimpleNamespace(
            nodeid=f"tests/test_{name}.py::test_x",
            when="call",
            failed=outcome == "failed",
            passed=outcome == "passed",
        )
        told.pytest_runtest_logreport(report)
    told.pytest_sessionfinish()
    assert [line.get("outcome") for line in lines(file)] == ["passed", "failed", None]


def test_every_benchmark_of_the_page_records_itself():
    for name, (what, page) in status.SHOWS.items():
        (script,) = (ROOT / "benchmarks").glob(f"*/{name}.py")
        text = script.read_text()
        assert "run_and_record(main, __file__)" in text, name
        assert (what, "cpu") in {(line["what"], line["where"]) for line in lines(FILE)}
        assert (status.RESULTS / page).exists()


def test_every_record_names_what_exists():
    for line in lines(FILE):
        assert line["where"] in (*PLACES, "nowhere")
        assert not line["page"] or (status.RESULTS / line["page"]).exists()
        if line["by"].startswith(("tests/", "benchmarks/")):
            assert (ROOT / line["by"].split()[0]).exists(), line["by"]
