"""The study of the step bound: its runs, its verdicts, and the ages of its samples."""

import json
from dataclasses import replace
from functools import partial
from statistics import fmean

import numpy as np
import pytest

from benchmarks.evidence import late_learner
from benchmarks.evidence import step_bound_study as study
from benchmarks.evidence.evidence import lines
from benchmarks.evidence.late_learner import Problem, Sampled

TOP = np.zeros((2, 0))


def line(cell, final):
    kept = {"final": final, "mean": final, "curve": [[0, 0.6]], "kl": 0.1, "held": 0}
    return json.loads(json.dumps({**vars(cell), **kept, "start": "a", "sources": ""}))


def ended(**finals):
    """Lines of every cell; `finals` by arm and size, else 0.7."""
    return [
        line(c, finals.get(f"{c.arm} {c.times:g}", 0.7) + 0.001 * c.seed) for c in study.cells()
    ]


def verdicts(lines):
    return {row["statement"]: row["final"] for row in study.hypotheses(lines)}


def test_every_run_is_planned_once_and_the_border_before_the_rest():
    cells = list(study.cells())
    assert len({c.key for c in cells}) == len(cells) == 237
    assert {(c.age, c.seed) for c in cells[:16]} == {(0, 0), (4, 0)}
    assert {c.times for c in cells if c.arm == "dppo"} == {1.0, 2.0, 4.0}


def test_nothing_is_judged_before_three_seeds_of_all_rates():
    lines = [r for r in ended() if (r["seed"], r["lr"], r["age"]) != (2, study.RATES[0], 0)]
    said = verdicts(lines)
    assert said["bound + tis at least -0.03 above on policy, age 4, 2x"] == "not judged"
    assert said["step_bound at least -0.03 above none, age 4, 0.25x"].startswith("supported")


def test_a_statement_needs_its_gate():
    said = "bound + tis at least -0.03 above on policy, age 4, 2x"
    assert verdicts(ended())[said].startswith("none, gate not met (else supported")
    assert verdicts(ended(**{"tis 2": 0.5}))[said].startswith("supported: +0.000")
    low = {"tis 2": 0.5, "step_bound + tis 2": 0.6}
    assert verdicts(ended(**low))[said].startswith("refuted: -0.100")


def test_the_page_counts_the_runs_of_one_start():
    lines = ended()[:5]
    lines[0]["start"] = "b"
    assert "**4 of 237 runs are there.**" in study.STUDY.block(lines)
    assert "1 lines are not counted" in study.STUDY.block(lines)
    assert "**0 of 237 runs are there.**" in study.STUDY.block([])


def test_a_reward_is_the_share_of_characters_at_their_places():
    assert late_learner.reward("1224", "1234") == 0.75
    assert late_learner.reward("", "12") == 0.0
    assert late_learner.reward("1234", "12") == 0.5


@pytest.mark.parametrize(("lag", "phase"), [(0, 1), (1, 1), (4, 1), (16, 1), (1, 4), (4, 4)])
def test_samples_have_the_age_that_is_asked_for(monkeypatch, lag, phase):
    """From the first phase on whose samples can be so old; before, they are of version 0."""

    class Rank:
        class engine:
            class policy:
                lm = None

        def begin_phase(self, groups):
            self.versions = [own[0].admitted_version for own in groups]

        def train_step(self, step):
            begun = step - step % phase
            return {"age": begun - self.versions[step % phase], "begun": begun}

    monkeypatch.setattr(
        late_learner,
        "sample",
        lambda lm, asked, *_: [Sampled([4, 1], [0.0, 0.0], 0.5, TOP, TOP)] * len(asked),
    )
    rows = [
        row
        for _, _, row in late_learner.late_steps(
            Rank(), 24, lag, phase, partial(late_learner.batch, None, 0)
        )
    ]
    assert [r["age"] for r in rows] == [min(lag, r["begun"]) for r in rows]
    assert len(rows) == 24


def test_problems_of_a_batch_depend_on_the_seed_and_its_number_alone():
    first = late_learner.problems(1, "problems", 3, 4)
    assert first == late_learner.problems(1, "problems", 3, 4)
    assert first != late_learner.problems(2, "problems", 3, 4)
    assert isinstance(first[0], Problem) and 8 <= fmean(len(p.answer) for p in first) <= 16


def test_a_seed_is_whole_from_one_start_and_made_anew_otherwise(monkeypatch, tmp_path):
    lines = [r for r in ended() if r["seed"] == 0 or r["lr"] == study.RATES[0]]
    file = tmp_path / "lines.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in lines))
    own = replace(study.STUDY, file=file)
    assert {key[-1] for key in own._done("b")} == {0}
    assert {key[-1] for key in own._done("a")} == {0, 1, 2}
    anew = [r | {"start": "b"} for r in ended() if r["seed"] == 1]
    said = own.block(lines + anew)
    assert "**159 of 237 runs are there.**" in said and "1 lines are not counted" in said


def test_the_advice_has_the_figures_of_the_lines():
    found = study.STUDY._counted(lines(study.STUDY.file))

    def ends(arm, age):
        return fmean(r["final"] for r in study.found_at(found, arm, age=age, times=2.0))

    best = fmean(r["final"] for r in study.best_on_policy(found, "final"))
    bounded = {age: ends("step_bound + tis", age) for age in study.BORDER}
    above = [end - ends("tis", age) for age, end in bounded.items()]
    below = [best - end for end in bounded.values()]
    said = " ".join((study.ROOT / "docs" / "evidence.md").read_text().split())
    assert f"{min(above):.2f} to {max(above):.2f} above tis alone" in said
    assert f"{min(below):.2f} to {max(below):.2f} below the best rate on policy" in said
