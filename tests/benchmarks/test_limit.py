"""The page on the limit of a step, from runs that are there."""

import json

import pytest
import torch

from benchmarks.speed import limit


def test_a_run_s_share_is_at_the_speed_that_was_measured(monkeypatch, tmp_path):
    job = {"load": "short and even", "model": "m"}
    facts = {"gflops": 1.0, "pass_gflop": 2.0, "trained_gflop": 6.0, "samples": 8}
    counts = {"train/tokens": 80, "train/sequence_positions": 160, "time/step_s": 10.0}

    def run(self, job, steps, place, *, on_policy):
        assert on_policy and steps == 8
        run_dir = place.with_name(f"{place.name}-{limit.os.getpid()}")
        run_dir.mkdir()
        (run_dir / "about.json").write_text(json.dumps({"limit": facts}))
        rows = [{"step": i + 1, "time/total_s": float(i), **counts} for i in range(8)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (run_dir / "metrics.jsonl").write_text(text)
        return {"step_s": [10.0] * 7}

    monkeypatch.setattr(limit.Rlcore, "run", run)
    found = limit.measure(job, 8, tmp_path, f"{limit.ON_POLICY}-0", 200.0)
    assert found["limit_s"] == pytest.approx(5.7) and found["limit / step"] == pytest.approx(0.57)
    rows = [{"load": "short", "who": "rlcore", **found}]
    assert "0.57" in limit.page(rows, 0.1) and "do not count" not in limit.page(rows, 0.1)
    assert "do not count" in limit.page(rows, 1.0)


def test_both_libraries_are_timed(monkeypatch):
    monkeypatch.setattr(limit, "TRIED_S", 0.001)
    monkeypatch.setattr(limit, "cores", torch.get_num_threads)
    speeds = limit.products([(16, 8), (8, 16)])
    assert set(speeds) == {"MKL", "oneDNN"} and min(speeds.values()) > 0
    assert limit.shown({"MKL": 180.4}).startswith("MKL 180 GFLOP/s on ")
