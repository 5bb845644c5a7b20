"""What was run where: records replace one another, and the places are those of docs/status.md."""

import json

import pytest
import status
from status import FILE, PARTS, PLACES, ROOT, lines, measured, record


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


def test_every_record_names_what_exists():
    for line in lines(FILE):
        assert line["where"] in (*PLACES, "nowhere")
        assert not line["page"] or (status.RESULTS / line["page"]).exists()
        if line["by"].startswith(("tests/", "benchmarks/")):
            assert (ROOT / line["by"].split()[0]).exists(), line["by"]
