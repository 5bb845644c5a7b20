"""Figures for a paper: `rlcore report DIR ... format=svg|pdf|csv`."""

import csv
import json
import re
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlcore.cli import main
from rlcore.metrics.intervals import (
    Interval,
    share_difference,
    share_interval,
    t_interval,
    t_quantile,
    welch,
    wilson,
)
from rlcore.report.curves import Curve, Point, merge, run_points, smoothed


def run(path, settings, rows):
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(json.dumps({"run_dir": str(path), **settings}))
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def rows_of(level, speed=1.0, steps=6):
    return [
        {
            "step": s,
            "reward/mean": level + 0.1 * s,
            "staleness/mean": 1.0,
            "time/total_s": speed * s,
            "train/tokens": 100.0,
            "mismatch/kl_k3": 0.01 * (s % 3),
            **({"eval/d/greedy": level, "eval/policy_version": s - 1} if s % 2 else {}),
        }
        for s in range(1, steps + 1)
    ]


@pytest.fixture
def six(tmp_path):
    return [
        run(tmp_path / f"{name}{seed}", {"seed": seed, "lr": lr}, rows_of(lr + seed / 10, 1 + seed))
        for name, lr in (("a", 0.0), ("b", 1.0))
        for seed in range(3)
    ]


def table(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_csv_has_every_point_with_its_interval(six, tmp_path, capsys):
    out = tmp_path / "f.csv"
    words = ["format=csv", "y=reward/mean", "labels=AIS,TIS", f"out={out}"]
    assert main(["report", *six, *words]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    lines = table(out)
    assert [line["configuration"] for line in lines] == ["AIS"] * 6 + ["TIS"] * 6
    first = lines[0]
    assert (first["step"], first["runs"], first["ci"]) == ("1", "3", "95")
    # 0.1, 0.2, 0.3 more than the slope: mean 0.2, t(0.975, 2) = 4.302653
    assert float(first["mean"]) == pytest.approx(0.2)
    assert float(first["high"]) == pytest.approx(0.2 + 4.302653 * 0.1 / 3**0.5, abs=1e-6)


def test_an_evaluation_is_at_the_step_whose_weights_were_evaluated(six, tmp_path):
    out = tmp_path / "f.csv"
    for x, places in (("step", [0, 2, 4]), ("tokens", [0, 200, 400])):
        words = ["format=csv", "y=eval/d/greedy", f"x={x}", f"out={out}"]
        assert main(["report", *six, *words]) == 0
        assert [float(line[x]) for line in table(out)] == places * 2


def test_wall_clocks_are_interpolated_over_what_all_runs_cover():
    fast, slow = [(s, 10.0 * s) for s in range(1, 7)], [(2 * s, 10.0 * s) for s in range(1, 7)]
    merged = merge([[(float(x), y) for x, y in points] for points in (fast, slow)], 95)
    assert [p.x for p in merged] == [2, 3, 4, 5, 6]
    assert [p.y.mean for p in merged] == [15, 22.5, 30, 37.5, 45]


def test_a_metric_that_goes_up_and_down_is_an_axis_by_step():
    runs = [[(1.0, 1.0), (3.0, 2.0), (2.0, 3.0)], [(3.0, 3.0), (5.0, 4.0), (4.0, 5.0)]]
    merged = merge(runs, 95)
    assert [(p.x, p.y.mean) for p in merged] == [(2, 2), (4, 3), (3, 4)]


def test_a_run_that_went_further_is_alone_there():
    merged = merge([[(1.0, 1.0), (2.0, 2.0)], [(1.0, 3.0), (2.0, 4.0), (3.0, 5.0)]], 95)
    assert [(p.x, p.y.n) for p in merged] == [(1, 2), (2, 2), (3, 1)]
    assert merged[2].y.low is None


@pytest.mark.parametrize("x", ["step", "seconds", "tokens", "mismatch/kl_k3"])
@pytest.mark.parametrize("form, begin", [("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_a_figure_is_a_file_of_its_format(six, tmp_path, x, form, begin):
    out = tmp_path / f"f.{form}"
    words = [f"format={form}", f"x={x}", f"out={out}", "labels=AIS,TIS"]
    assert main(["report", *six, *words]) == 0
    first = out.read_bytes()
    assert first.startswith(begin)
    if form == "svg":
        text = first.decode()
        for shown in ("AIS", "TIS", "d: accuracy, greedy", "mean reward", "mean staleness [steps]"):
            assert shown in text
        # a band for each arm and metric
        assert len(re.findall(r'id="FillBetweenPolyCollection_\d+"', text)) == 8
    assert main(["report", *six, *words]) == 0
    assert out.read_bytes() == first  # the same runs give the same bytes


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["format=csv", "y=reward/mea"], "y=reward/mea is not a metric of these runs: perhaps"),
        (["format=csv", "x=token"], "x=token is not a metric"),
        (["format=csv", "labels=A"], "labels=A names 1 configurations, and the runs are of 2"),
        (["format=svg", "ylabel=A,B"], "ylabel=A,B labels 2 axes, and 4 metrics are drawn"),
        (["width=90"], "width= is of figures"),
        (["format=png"], "format=png is not accepted"),
        (["x=tokens"], "x= is of figures: add format=svg, pdf or csv"),
        (["format=csv", "ci=100"], "ci=100 is not accepted"),
    ],
)
def test_what_cannot_be_drawn_is_refused(six, words, sentence, capsys):
    assert main(["report", *six, *words]) == 2
    assert sentence in capsys.readouterr().err


def test_axes_width_and_smoothing_are_the_readers(six, tmp_path):
    out = tmp_path / "f.svg"
    words = ["format=svg", "y=reward/mean,entropy", "ylabel=Reward,Nats", "width=127", "smooth=3"]
    six = [run(tmp_path / "c", {"lr": 3.0}, [{"step": 1, "entropy": 0.5}]), *six]
    assert main(["report", *six, *words, f"out={out}"]) == 0
    text = out.read_text()
    assert 'width="360pt"' in text and ">Reward<" in text and ">Nats<" in text
    assert ">c<" in text  # a configuration that the first panel lacks


def test_seeds_of_a_sweep_are_one_name_and_a_narrow_figure_has_it_whole(tmp_path):
    arms = {f"correction.tis.cap-{cap}_learner.lr-0.0001": cap for cap in (1, 2)}
    made = [
        run(tmp_path / f"seed-{seed}_{name}", {"seed": seed, "cap": cap}, rows_of(0.1 * seed))
        for name, cap in arms.items()
        for seed in range(3)
    ]
    out = tmp_path / "f.svg"
    assert main(["report", *made, "format=svg", "y=reward/mean", "width=86", f"out={out}"]) == 0
    text = out.read_text()
    assert all(f">{name}, 3 seeds<" in text for name in arms)
    legend = text[text.index('<g id="legend_') :]
    box = [float(x) for x in re.findall(r"[ML] ([\d.-]+) [\d.-]+ ", legend)]
    assert min(box) >= 0 and max(box) <= 86 / 25.4 * 72


def test_names_that_their_seeds_tell_apart_keep_them(tmp_path):
    made = [
        run(tmp_path / f"x-seed{seed}", {"seed": seed, "lr": seed // 2}, rows_of(0.1))
        for seed in range(4)
    ]
    out = tmp_path / "f.csv"
    assert main(["report", *made, "format=csv", f"out={out}"]) == 0
    names = {row["configuration"] for row in table(out)}
    assert names == {"x-seed0 and 1 more", "x-seed2 and 1 more"}


def test_a_running_mean_is_of_the_points_before():
    curve = Curve("a", "reward/mean", [Point(x, Interval(x, None, None, 1)) for x in (1, 2, 3, 6)])
    assert [point.y.mean for point in smoothed(curve, 2).points] == [1, 1.5, 2.5, 4.5]
    assert smoothed(curve, 1) is curve


def test_a_band_of_a_share_stays_within_what_a_share_can_be(tmp_path, monkeypatch):
    drawn = []

    def draw(panel, x, low, high, **style):
        drawn.append((low, high))

    monkeypatch.setattr("matplotlib.axes.Axes.fill_between", draw)
    runs = [
        run(tmp_path / str(seed), {"seed": seed, "lr": 1.0}, [{"step": 1, "mismatch/ess": ess}])
        for seed, ess in enumerate((0.2, 0.99, 1.0))
    ]
    words = ["format=svg", "y=mismatch/ess", f"out={tmp_path / 'f.svg'}"]
    assert main(["report", *runs, *words]) == 0
    ((low, high),) = drawn
    assert max(high) == 1.0 and min(low) >= 0.0


def test_a_sweep_s_folder_stands_for_its_runs(six, tmp_path, capsys):
    (tmp_path / "report.html").write_text("of the sweep")
    for words, out in (([str(tmp_path)], "a.csv"), (six, "b.csv")):
        assert main(["report", *words, "format=csv", f"out={tmp_path / out}"]) == 0
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()
    capsys.readouterr()
    assert main(["compare", str(tmp_path), "json=true"]) == 0
    of_folder = capsys.readouterr().out
    assert main(["compare", *six, "json=true"]) == 0
    assert of_folder == capsys.readouterr().out


def test_without_matplotlib_the_sentence_names_the_extra(six, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["report", *six, "format=svg"]) == 2
    assert "pip install 'rlcore[figures]', or use format=csv" in capsys.readouterr().err


def test_runs_without_a_step_are_refused(tmp_path, capsys):
    assert main(["report", run(tmp_path / "a", {}, []), "format=csv"]) == 2
    assert "until one has finished a step" in capsys.readouterr().err


def test_null_values_are_left_out():
    rows = [{"step": 1, "m": None}, {"step": 2, "m": 3.0, "time/total_s": None}]
    assert run_points(rows, "m", "step") == [(2, 3)]
    assert run_points(rows, "m", "seconds") == []


@settings(deadline=None, max_examples=25)
@given(st.floats(0.51, 0.9995), st.floats(1, 200))
def test_the_quantile_is_that_of_scipy(probability, freedom):
    scipy = pytest.importorskip("scipy.stats")
    assert t_quantile(probability, freedom) == pytest.approx(
        scipy.t.ppf(probability, freedom), rel=1e-7
    )


numbers = st.lists(st.floats(-100, 100), min_size=2, max_size=8)


@settings(deadline=None, max_examples=25)
@example([0.0, 0.0], [0.0, 4.4e-89], 0.0)  # its variance squared is 0
@given(numbers, numbers, st.floats(-10, 10))
def test_intervals_move_with_their_values(a, b, shift):
    here, there = t_interval(a, 90), t_interval([v + shift for v in a], 90)
    assert there.low == pytest.approx(here.low + shift, abs=1e-6)
    assert t_interval(a, 99).half >= here.half
    assert welch(a, b, 90).mean == pytest.approx(-welch(b, a, 90).mean)
    assert welch(a, b, 90).half == pytest.approx(welch(b, a, 90).half, abs=1e-6)


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 300), st.data(), st.sampled_from([80, 95, 99]))
def test_wilson_s_interval_is_that_of_the_score_test(n, data, ci):
    """Its ends are the shares whose own standard error puts the observed one z away."""
    right = data.draw(st.integers(0, n))
    found = wilson(right / n, n, ci)
    z = {80: 1.2815516, 95: 1.9599640, 99: 2.5758293}[ci]
    for end in (found.low, found.high):
        assert abs(right / n - end) == pytest.approx(z * (end * (1 - end) / n) ** 0.5, abs=1e-7)
    assert 0 <= found.low <= right / n <= found.high <= 1 and found.high > found.low


def test_equal_shares_of_seeds_are_not_certain():
    one = share_interval([1.0, 1.0, 1.0], [20.0] * 3, 95)
    assert (one.mean, one.low, one.high, one.n) == (1.0, wilson(1.0, 60).low, 1.0, 3)
    assert share_interval([1.0, 1.0], [None, 20.0], 95).low is None  # answers are not known
    seeds = share_interval([0.2, 0.9], [1e6, 1e6], 95)  # t over two seeds is wider than all
    assert (seeds.low, seeds.high) == (0.0, 1.0)
    single = share_interval([0.98], [20.0], 95)
    assert (single.low, single.high) == (wilson(0.98, 20).low, wilson(0.98, 20).high)
    assert share_interval([0.98], [None], 95).low is None


def test_the_difference_of_shares_is_newcombe_s():
    """Newcombe 1998, table II, example (a): 56/70 less 48/80, method 10: 0.0524 to 0.3339."""
    found = share_difference(([48 / 80], [80]), ([56 / 70], [70]), 95)
    assert (found.low, found.high) == pytest.approx((0.0524, 0.3339), abs=1e-4)
    equal = share_difference(([1.0, 1.0], [20, 20]), ([1.0, 1.0], [20, 20]), 95)
    assert equal.low < 0 < equal.high
    assert share_difference(([1.0], [None]), ([1.0], [20]), 95).low is None


def test_a_single_run_s_accuracies_have_the_interval_of_their_answers(tmp_path):
    rows = [
        {"step": s, "eval/d/greedy": 1.0, "eval/d/effective_greedy": 20.0, "eval/policy_version": s}
        for s in (2, 4)
    ]
    folder, out = run(tmp_path / "a", {"seed": 0}, rows), tmp_path / "f.csv"
    assert main(["report", folder, "format=csv", "y=eval/d/greedy", f"out={out}"]) == 0
    for line in table(out):
        assert float(line["low"]) == wilson(1.0, 20).low and float(line["high"]) == 1.0
