"""report.html, read back as a browser would."""

import json
import re
from html.parser import HTMLParser

import pytest

from rlcore.errors import UserError
from rlcore.metrics.logger import open_logger
from rlcore.metrics.report import write_report
from rlcore.metrics.rows import sanitize
from rlcore.metrics.run_folder import MAX_POINTS, thin
from rlcore.metrics.specs import LoggingSpec

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
                    "mismatch/kl_k3": float("nan") if step == 3 else 1e-3,
                    "correction/tis/truncated_share": 0.01,
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
    return {f["layout"]["title"]["text"]: f["data"] for f in json.loads(data)}


def test_the_page_is_self_contained_and_holds_the_curves(tmp_path):
    target = write_report(make_run(tmp_path / "run"))
    assert target == tmp_path / "run" / "report.html"
    assert target.stat().st_size < 6_000_000
    text = target.read_text()
    page = Page(text)
    assert page.sources == []  # nothing is fetched
    shown = figures(text)
    assert [i for i in page.ids if i.startswith("chart")] == [
        f"chart{i}" for i in range(len(shown))
    ]
    reward = shown["Reward"][0]
    assert reward["x"] == [1, 2, 3, 4, 5, 6] and reward["y"] == pytest.approx(
        [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    )
    evals = shown["Held-out accuracy"][0]
    assert evals["x"] == [0, 2, 4]  # at the version that was evaluated
    assert shown["Mismatch: KL(p_inf || p_ref)"][0]["x"] == [1, 2, 4, 5, 6]  # NaN is a gap
    parts = {t["name"]: t["y"][0] for t in shown["Time of a step"]}
    assert parts == {
        "time/wait_data_s": 0.5,
        "time/learn_s": 1.0,
        "time/publish_s": 0.1,
        "rest_s": pytest.approx(0.4),
    }
    assert {"Corrections: their own figures", "Ledger", "Also logged: weird"} <= set(shown)


def test_texts_are_escaped_and_the_newest_samples_and_the_configuration_are_there(tmp_path):
    text = write_report(make_run(tmp_path / "run")).read_text()
    assert "<script>alert(1)" not in text
    page = Page(text)
    assert EVIL in page.text and "answer 6" in page.text and "answer 5" not in page.text
    assert "seed: 1" in page.text


def test_warnings_of_each_run_stand_above_the_curves(tmp_path):
    runs = [make_run(tmp_path / name) for name in ("well", "ill")]

    def judge(folder, rows):
        return [f"<b>ESS</b> of {len(rows)} rows"] if folder.name == "ill" else []

    text = write_report(runs, tmp_path / "both.html", judge).read_text()
    page = Page(text).text
    assert "<b>ESS" not in text and page.count("<b>ESS</b> of 6 rows") == 1
    assert page.index("Warnings: ill") > page.index("None by the bounds of logging.warnings")
    assert text.index("Warnings: ill") < text.index('id="chart0"')
    assert "Warnings" not in write_report(runs[0]).read_text()  # nobody judged


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
    page = Page(text)
    assert "turn 1, reward 0.5" in page.text and "turn 2, part 2, reward -1.25" in page.text
    assert EVIL in page.text and "all of it" not in page.text


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
        ]
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
    table = re.search(r"<h3>Tasks</h3><table>(.*?)</table>", text).group(1)
    assert "<td>short</td><td>0.25</td><td>6</td><td>0.125</td>" in table
    assert "<td>&lt;b&gt;</td><td>0.75</td><td>2</td>" in table  # the newest of each figure
    assert {"task/short/reward_mean", "task/<b>/reward_mean"} == {
        curve["name"] for curve in figures(text)["Reward by task"]
    }
    assert "<h3>Tasks</h3>" not in write_report(make_run(tmp_path / "one")).read_text()
