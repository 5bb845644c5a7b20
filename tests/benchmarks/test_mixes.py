"""The page of forecast and measured mixes."""

import pytest

from benchmarks.evidence import mixes


def line(fleet, **tokens):
    kinds = {
        kind: {
            "tokens": pace,
            "effective": 0.5 if kind == "fp8" else 1.0,
            "below": 0.0,
            "length": 8,
        }
        for kind, pace in tokens.items()
    }
    return {"fleet": fleet, "seed": 0, "kinds": kinds, "load": [1.0, 2.0], "machine": "a machine"}


def test_a_forecast_is_judged_with_and_without_the_speed_of_the_machine():
    alone = [line("bf16", bf16=100.0), line("fp8", fp8=100.0)]
    text = mixes.page([*alone, line("0.5", bf16=200.0, fp8=200.0)])
    # half of the tokens count for one half: 75 of 100, on a machine twice as fast 150 of 200
    row = "| 0.5 | 0 | runs of one kind | 150 | 75 (-50%) | 0.75 | 0.75 (+0%) |"
    assert row in text
    assert "tokens/s: 0 of 1 forecasts are within 15%" in text
    assert "bf16's pace: 1 of 1 forecasts are within 15%" in text


def test_the_half_half_run_forecasts_the_others():
    runs = [line("bf16", bf16=100.0), line("fp8", fp8=100.0)]
    runs += [line("0.5", bf16=100.0, fp8=50.0), line("0.75", bf16=100.0, fp8=100.0)]
    text = mixes.page(runs)
    measured = 0.625 / (0.25 / 100 + 0.75 / 100)
    said = 0.625 / (0.25 / 100 + 0.75 / 50)
    assert (
        f"| the half-half run | {measured:.4g} | {said:.4g} ({said / measured - 1:+.0%}) |" in text
    )
    assert mixes.sentence([0.1, -0.2]).startswith("1 of 2 forecasts are within 15%")
    assert mixes.absolute(mixes.read_kinds(runs[3]), 0.75) == pytest.approx(measured)
