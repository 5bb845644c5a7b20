"""report.html, read back as a browser would."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rlcore.errors import UserError
from rlcore.metrics.health import RunVerdict
from rlcore.metrics.logger import open_logger
from rlcore.metrics.metric import Metric
from rlcore.metrics.names import declared, split_kind
from rlcore.metrics.rows import sanitize
from rlcore.metrics.run_folder import MAX_POINTS, Run, thin
from rlcore.metrics.specs import LoggingSpec
from rlcore.report.answers import samples, shown
from rlcore.report.figures import swimlanes
from rlcore.report.page import write_report

EVIL = "</script><script>alert(1)</script>&<b>"


def make_run(folder, steps=6, slope=0.1):
    quiet = LoggingSpec(console="off", wandb="disabled")
    with open_logger(folder, quiet, config={}, total_steps=steps) as logger:
        for step in range(1, steps + 1):
            evaluated = (
                {"eval/digits/greedy": step * slope, "eval/policy_version": step - 1}
                if step % 2
                else {}
            )
            logger.log(
                {
                    "step": step,
                    "policy_version": step,
                    "reward/mean": slope * step,
                    "mismatch/kl_k3": float("nan") if step == 3 else 1e-3 * step,
                    "correction/tis/truncated_share": 0.01 * step,
                    "time/step_s": 2.0,
                    "time/wait_data_s": 0.5,
                    "time/learn_s": 1.0,
                    "time/publish_s": 0.1,
                    "ledger/consumed": step,
                    "weird/thing": 3.0,
                    **evaluated,
                }
            )
            sample = {
                "prompt_id": "digits/train/1",
                "prompt": EVIL,
                "response": f"answer {step}",
                "reward": 1.0,
            }
            logger.samples(f"step_{step:06d}", [sample])
        logger.finish({"steps": steps})
    (folder / "config.yaml").write_text(f"seed: 1\nmodel: {EVIL}\n")
    return folder


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.sources, self.ids, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.sources += [found[a] for a in ("src", "href") if a in found]
        self.ids += [found["id"]] if "id" in found else []

    def handle_data(self, data):
        self.text += data


def figures(text):
    data = re.search(r'<script id="figures" type="application/json">(.*?)</script>', text, re.S)[1]
    return {f["title"]: f["curves"] for f in json.loads(data) if "curves" in f}


def notes(text):
    data = re.search(r'<script id="figures" type="application/json">(.*?)</script>', text, re.S)[1]
    return {f["title"]: f["notes"] for f in json.loads(data)}


def records(text):
    data = re.search(r'<script id="records" type="application/json">(.*?)</script>', text, re.S)[1]
    return json.loads(data)


def test_the_page_is_self_contained_and_holds_the_curves(tmp_path):
    target = write_report(make_run(tmp_path / "run"))
    assert target == tmp_path / "run" / "report.html"
    assert target.stat().st_size < 200_000
    text = target.read_text()
    page = Page(text)
    assert [s for s in page.sources if not s.startswith("#")] == ["data:,"]  # nothing is fetched
    shown = figures(text)
    drawn = [i for i, curves in enumerate(shown.values()) if curves]
    assert [i for i in page.ids if i.startswith("chart")] == [f"chart{i}" for i in drawn]
    reward = shown["Reward"][0]
    assert reward["x"] == [1, 2, 3, 4, 5, 6] and reward["y"] == pytest.approx(
        [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    )
    evals = shown["Held-out accuracy"][0]
    assert evals["x"] == [0, 2, 4]  # at the version that was evaluated
    assert shown["KL(p_inf || p_ref)"][0]["x"] == [1, 2, 4, 5, 6]  # NaN is a gap
    parts = {t["name"]: t["y"][0] for t in shown["Time of a step"]}
    assert parts == {
        "time/wait_data_s": 0.5,
        "time/learn_s": 1.0,
        "time/publish_s": 0.1,
        "rest_s": pytest.approx(0.4),
    }
    assert {"Corrections: their own figures", "Ledger", "Also logged: weird"} <= set(shown)
    assert notes(text)["Also logged: weird"] == ["weird/thing = 3 throughout"]
    assert 'aria-label="Reward in reward, steps 1 to 6. reward/mean from 0.1 to 0.6' in text


def test_what_repeats_an_earlier_chart_is_a_note_there(tmp_path):
    quiet = LoggingSpec(console="off", wandb="disabled")
    with open_logger(tmp_path, quiet, config={}, total_steps=3) as logger:
        for step in (1, 2, 3):
            row = {"step": step, "policy_version": step, "reward/mean": 0.1 * step}
            row |= {"reward/selected_mean": 0.1 * step, "reward_parts/correct": 0.1 * step}
            logger.log({**row, "mismatch/ess": 1.0, "entropy": 1.0 / step})
    text = write_report(tmp_path).read_text()
    shown = figures(text)
    (reward,) = shown["Reward"]
    assert reward["also"] == ["reward/selected_mean"]
    assert "Parts of the reward" not in shown and shown["Entropy"]
    assert notes(text)["Reward"] == [
        "Parts of the reward would show the same: reward_parts/correct is reward/mean."
    ]
    assert shown["Effective sample size"] == []
    assert notes(text)["Effective sample size"] == ["mismatch/ess = 1 throughout"]


def test_answers_before_and_after_show_changed_ones_first(tmp_path):
    folder = make_run(tmp_path / "run")
    told = {0: ["1", "2", "3", "4"], 4: ["1", "20", "30", "4"], 8: ["10", "2", "30", "4", "5"]}
    for version, answers in told.items():
        lines = [
            {"prompt_id": f"p{i}", "sample": 0, "prompt": EVIL, "response": a,
             "reward": {"30": 1.0, "10": 0.5}.get(a, 0.5)}
            for i, a in enumerate(answers)
        ]  # fmt: skip
        file = folder / "samples" / f"eval_{version:06d}_digits_greedy.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = write_report(folder).read_text()
    assert "<script>alert(1)" not in text
    (found,) = json.loads(
        re.search(r'<script id="changes" type="application/json">(.*?)</script>', text, re.S)[1]
    )
    assert (found["label"], found["from"], found["to"]) == ("digits_greedy", 0, 8)
    assert [(i["prompt_id"], i["change"]) for i in found["items"]] == [
        ("p2", "turned right"),
        ("p0", "other answer"),
        ("p1", "same"),
        ("p3", "same"),
    ]
    assert found["counts"] == {
        "turned right": 1, "turned wrong": 0, "other answer": 1, "same": 2
    }  # fmt: skip
    (first, *_) = found["items"]
    assert (first["before"]["text"], first["after"]["text"]) == ("3", "30")


def test_a_group_stays_together_within_the_budget():
    def sample(group, ratio):
        return {"response": "x" * 200, "group_id": group, "log_ratio": [ratio], "source": "step 1"}

    made = [sample(1, 0.1), sample(2, -2.0), sample(1, 0.2), sample(2, 0.0)]
    run = Run("a", Path("a"), [], "", samples=made)
    assert [s["group_id"] for s in samples([run], 10_000)] == [2, 2, 1, 1]
    assert [s["group_id"] for s in samples([run], 1_000)] == [2, 2]


def test_a_healthy_run_says_in_words_what_it_held(tmp_path):
    folder = make_run(tmp_path / "run", steps=6)
    well = RunVerdict("well", "Healthy: nothing to warn of in 6 steps.", kept=["samples spoke"])
    page = Page(write_report(folder, judge=lambda folder, rows: well).read_text()).text
    assert "Healthy: nothing to warn of in 6 steps." in page
    assert "The 1 things that were watched" in page and "samples spoke" in page
    few = RunVerdict("unsure", "Too few steps to judge: nothing to warn of in 6 steps.")
    page = Page(write_report(folder, judge=lambda folder, rows: few).read_text()).text
    assert "Too few steps to judge" in page and "were watched" not in page


def test_texts_are_escaped_and_the_newest_samples_and_the_configuration_are_there(tmp_path):
    text = write_report(make_run(tmp_path / "run")).read_text()
    assert "<script>alert(1)" not in text
    assert EVIL in Page(text).text and "seed: 1" in Page(text).text
    found = records(text)
    assert {s["response"] for s in found} == {f"answer {step}" for step in range(1, 7)}
    assert {s["prompt"] for s in found} == {EVIL}


def test_warnings_of_each_run_stand_above_the_curves(tmp_path):
    runs = [make_run(tmp_path / name) for name in ("well", "ill")]

    def judge(folder, rows):
        if folder.name == "well":
            return RunVerdict("well", "Healthy: nothing to warn of in 6 steps.")
        return RunVerdict("ill", "1 warning in 6 steps:", [f"<b>ESS</b> of {len(rows)} rows"])

    text = write_report(runs, tmp_path / "both.html", judge).read_text()
    page = Page(text).text
    assert "<b>ESS" not in text and page.count("<b>ESS</b> of 6 rows") == 1
    assert page.index("Healthy") < page.index("1 warning in 6 steps")
    assert text.index("1 warning in 6 steps") < text.index('id="chart0"')
    assert "6 steps, without a verdict on warnings" in write_report(runs[0]).read_text()


def test_samples_of_several_turns_are_shown_by_turn(tmp_path):
    folder = make_run(tmp_path / "run", steps=1)
    said = [("", "5", 0.5), (EVIL, "7", -1.25)]
    names = ("part", "observed", "said", "reward")
    turns = [dict(zip(names, (i, *turn))) for i, turn in enumerate(said)]
    sample = {"prompt_id": "a/train/1", "response": "all of it", "turns": turns}
    (file,) = (folder / "samples").iterdir()
    file.write_text(json.dumps(sample) + "\n")
    text = write_report(folder).read_text()
    assert "<script>alert(1)" not in text
    (found,) = records(text)
    assert found["turns"] == turns and "response" not in found


def test_a_run_that_is_still_written(tmp_path):
    folder = make_run(tmp_path / "run", steps=3)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "reward/me')
    assert figures(write_report(folder).read_text())["Reward"][0]["x"] == [1, 2, 3]
    started = tmp_path / "started"
    started.mkdir()
    (started / "config.yaml").write_text("seed: 2\n")
    assert "No learner step is finished yet" in write_report(started).read_text()


def test_several_runs_are_overlaid(tmp_path, monkeypatch):
    a, b = make_run(tmp_path / "a" / "run", slope=0.1), make_run(tmp_path / "b" / "run", slope=0.2)
    (b / "config.yaml").write_text("seed: 1\nlearner: {lr: 0.2}\n")
    text = write_report([a, b], tmp_path / "both.html").read_text()
    reward = figures(text)["Reward"]
    assert [t["y"][-1] for t in reward] == pytest.approx([0.6, 1.2])
    assert len({t["name"] for t in reward}) == 2  # same folder name, told apart
    monkeypatch.chdir(tmp_path)
    assert write_report([a, b]).resolve() == tmp_path / "report.html"
    assert (tmp_path / "report.html").read_text() == text
    assert not (a / "report.html").exists()


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="not a run directory"):
        write_report(tmp_path)


def test_long_runs_are_thinned_by_each_metrics_reduction():
    count = 4 * MAX_POINTS
    rows = thin(
        [
            sanitize({"step": s, "staleness/max": s % 4, "time/step_s": 1.0})
            for s in range(1, count + 1)
        ],
        stride=4,
    )
    assert len(rows) == MAX_POINTS
    assert rows[0]["step"] == 4 and rows[-1]["step"] == count
    assert {r["staleness/max"] for r in rows} == {3} and {r["time/step_s"] for r in rows} == {4.0}


def test_a_run_with_several_tasks_has_a_table_and_charts_of_them(tmp_path):
    quiet = LoggingSpec(console="off", wandb="disabled")
    by_task = {
        "task/short/reward_mean": 0.25,
        "task/short/groups": 6,
        "task/<b>/groups": 2,
        "task/short/reward_parts/correct": 0.125,
    }
    with open_logger(tmp_path, quiet, config={}, total_steps=2) as logger:
        logger.log({"step": 1, "policy_version": 1, **by_task, "task/<b>/reward_mean": 0.75})
        logger.log({"step": 2, "policy_version": 2, **by_task})
    text = write_report(tmp_path).read_text()
    table = re.search(r"<h3>Tasks</h3><div[^>]*><table>(.*?)</table>", text).group(1)
    assert "<td>short</td><td>0.25</td><td>6</td><td>0.125</td>" in table
    assert "<td>&lt;b&gt;</td><td>0.75</td><td>2</td>" in table  # the newest of each figure
    assert {"task/short/reward_mean", "task/<b>/reward_mean"} == {
        curve["name"] for curve in figures(text)["Reward by task"]
    }
    assert "<h3>Tasks</h3>" not in write_report(make_run(tmp_path / "one")).read_text()


def test_kinds_of_actors_are_overlaid_on_the_pooled_curve(tmp_path):
    quiet = LoggingSpec(console="off", wandb="disabled")
    kinds = {"mismatch/kl_k3": 0.02, "mismatch/kl_k3@bf16": 0.01, "mismatch/kl_k3@int3": 0.03}
    ages = {"staleness/share_0": 1.0, "staleness/share_0@int3": 1.0}
    with open_logger(tmp_path, quiet, config={}, total_steps=2) as logger:
        logger.log({"step": 1, "policy_version": 1, **kinds, **ages})
    shown = figures(write_report(tmp_path).read_text())
    curves = {curve["name"]: curve for curve in shown["KL(p_inf || p_ref)"]}
    assert set(curves) == set(kinds)
    assert len({curve["color"] for curve in curves.values()}) == 1
    assert len({curve["dash"] for curve in curves.values()}) == 3
    assert [curve["name"] for curve in shown["Age of trained tokens"]] == ["staleness/share_0"]


def test_a_name_is_looked_up_once_however_many_steps_have_it(tmp_path, monkeypatch):
    looked, covers = [], Metric.covers
    monkeypatch.setattr(Metric, "covers", lambda m, name: looked.append(name) or covers(m, name))
    counts = []
    for steps in (4, 16):
        run = make_run(tmp_path / str(steps), steps)
        declared.cache_clear()
        split_kind.cache_clear()
        looked.clear()
        write_report(run)
        counts.append(len(looked))
    assert counts[1] < 1.5 * counts[0]


def test_runs_that_differ_by_their_seed_are_a_band_around_their_mean(tmp_path):
    runs = [make_run(tmp_path / f"seed{i}", slope=0.1 * (i + 1)) for i in range(3)]
    for i, run in enumerate(runs):
        (run / "config.yaml").write_text(f"seed: {i}\nrun_dir: {run}\nlearner: {{lr: 0.1}}\n")
    reward = figures(write_report(runs, tmp_path / "r.html").read_text())["Reward"]
    (mean,) = reward
    steps, low, high = mean["band"]
    assert (low[-1], mean["y"][-1], high[-1]) == pytest.approx((0.6, 1.2, 1.8))
    assert steps == mean["x"] and mean["name"] == "reward/mean"
    (runs[2] / "config.yaml").write_text("seed: 0\nlearner: {lr: 0.2}\n")
    reward = figures(write_report(runs, tmp_path / "r.html").read_text())["Reward"]
    assert [t["name"] for t in reward] == [
        "seed0 and 1 more: reward/mean",
        "seed2: reward/mean",
    ]


def test_the_head_says_what_was_run_and_with_what(tmp_path):
    folder = make_run(tmp_path / "run")
    config = {
        "model": {"path": "models/some-1b"},
        "task": {"name": "digits"},
        "actor": {"cheap": {"kind": "fp8_emulated", "count": 2, "dtype": "auto"}},
        "correction": {"tis": {"cap": 2.0}},
        "schedule": {"max_staleness": 3, "steps": 9, "groups_per_step": 4, "steps_per_publish": 2},
    }
    (folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    about = {"machine": {"cores": 2, "gpus": []}, "commit": "abc+", "versions": {"torch": "2.0"}}
    (folder / "about.json").write_text(json.dumps(about))
    page = Page(write_report(folder).read_text()).text
    for said in (
        "models/some-1b",
        "2 x cheap (fp8_emulated), auto",
        "tis (cap 2.0)",
        "asynchronous, max_staleness 3, 9 steps of 4 groups, a publication every 2 steps",
        "2 cores, no GPU",
        "abc+",
        "torch 2.0",
    ):
        assert said in page, said
    (folder / "status.json").write_text('{"phase": "failed", "step": 6}')
    assert "The run failed after step 6." in write_report(folder).read_text()


def test_the_samples_with_the_worst_mismatch_are_kept_within_the_budget():
    made = [
        {"response": "x" * 100, "log_ratio": [0.0, r, None], "at": i}
        for i, r in enumerate((0.1, -3.0, 0.5))
    ]
    run = Run("a", Path("a"), [], "", samples=made)
    assert [s["worst"] for s in samples([run], 10_000)] == [-3.0, 0.5, 0.1]
    assert [s["worst"] for s in samples([run], 500)] == [-3.0, 0.5]
    long = {"pieces": [["a"] * 800, ["b"] * 800], "at": 1, "response": "c" * 20_000}
    cut = shown(long, "a", several=False)
    assert [len(turn) for turn in cut["pieces"]] == [800, 200] and cut["worst"] is None
    assert len(cut["response"]) < 13_000


def test_the_timeline_has_a_lane_for_each_and_says_where_the_time_went():
    spans = [
        ["learner", "waiting for a batch", 0.0, 3.0, 1.0],
        ["learner", "optimizer step 7", 3.0, 4.0, 1.0],
        ["publications", "version 7", 3.5, 4.0, 1.0],
        ["bf16-0", "decode", 0.0, 4.0, 0.75],
    ]
    run = Run("a", Path("a"), [], "", timeline=[{"step": 7, "spans": spans}])
    made = swimlanes(run)
    assert made["lanes"] == ["learner", "publications", "bf16-0"]
    assert made["bars"][0] == [0, 1, "waiting for a batch, 3.00 s", 0.0, 3.0, 1.0]
    assert made["notes"] == [
        "learner: waiting for a batch 75%, training 25%",
        "publications: publication 12%",
        "bf16-0: decoding 75%, idle 25%",
    ]
    assert swimlanes(Run("a", Path("a"), [], "")) is None
