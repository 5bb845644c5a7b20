"""What the page of a study shows: the figure over time, the arms beside each other, exports."""

import re
from dataclasses import replace

import evidence_page
import evidence_tables
import pytest
from evidence_studies import Study

STUDY = Study(
    experiment="evidence/jackpot",
    knob="H",
    matched=("1", ()),
    sizes={"2": (), "4": ()},
    arms={"tis": (), "late": ()},
    watched=("mismatch/kl_k3", "entropy"),
)


def line(arm, size, seed=0, final=0.5, **more):
    return {
        **{"arm": arm, "size": size, "seed": seed, "final": final, "best": final},
        **{"collapse": None, "sources": "now", "machine": "a machine"},
        **{"curve": [(1, 0.3), (32, final)], **more},
    }


def drawn(tmp_path, monkeypatch, lines, study=STUDY):
    """The page and the texts of its figures, by file."""
    monkeypatch.setattr(evidence_page, "PAGES", tmp_path)
    (tmp_path / "a.md").write_text(f"before {evidence_page.BEGIN} {evidence_page.END} after")
    evidence_page.write_page("a", study, lines, "now")
    figures = {
        f.name: re.findall(r">([^<]+)</text>", f.read_text()) for f in tmp_path.glob("*.svg")
    }
    return (tmp_path / "a.md").read_text(), figures


def test_metrics_over_time_are_drawn_of_the_arms_that_have_them(tmp_path, monkeypatch):
    lines = [
        line("matched", "1"),
        line("tis", "2", watched={"mismatch/kl_k3": [0.0, 0.1], "entropy": [None, None]}),
        line("late", "4", watched={"mismatch/kl_k3": [0.0, 0.2], "entropy": [1.0, 0.5]}),
        line("old", "2"),
        line("younger", "2", watched={"entropy": [1.0, 0.5]}),
        {"chosen": "2"},
    ]
    shown = evidence_page.shown_over_time(STUDY, lines[:2], "2")
    assert shown == ["mismatch/kl_k3"]
    page, figures = drawn(tmp_path, monkeypatch, lines)
    assert "(a_over_time.svg)" in page
    texts = figures["a_over_time.svg"]
    assert {"mismatch/kl_k3", "entropy", "tis", "younger"} <= set(texts)
    assert not {"matched", "late", "old"} & set(texts)


def test_a_page_without_metrics_over_time_has_no_figure_of_them(tmp_path, monkeypatch):
    page, figures = drawn(tmp_path, monkeypatch, [line("matched", "1"), {"chosen": "2"}])
    assert set(figures) == {"a.svg"} and "over_time" not in page


def test_arms_are_compared_at_the_chosen_size_or_where_they_are_matched():
    lines = [line("matched", "1"), line("tis", "1", final=0.9), line("tis", "2"), line("late", "4")]
    assert evidence_page.compared_size(STUDY, [*lines, {"chosen": "2"}]) == "2"
    shown = evidence_page.compared(STUDY, lines, "2")
    assert [(arm, [r["size"] for r in own]) for arm, _, own in shown] == [
        ("matched", ["1"]),
        ("tis", ["2"]),
    ]


@pytest.mark.parametrize("made", [[], [{"chosen": None}]])
def test_without_a_chosen_size_the_figure_shows_the_named_or_the_largest(made):
    lines = [line("uncorrected", "2"), *made]
    assert evidence_page.compared_size(STUDY, lines) == "4"
    assert evidence_page.compared_size(replace(STUDY, shown="2"), lines) == "2"


def test_a_size_with_a_figure_of_its_own_shows_accuracy_and_metrics(tmp_path, monkeypatch):
    study = replace(STUDY, drawn=("2, off; 2",))
    watched = {"mismatch/kl_k3": [0.0, 0.1], "entropy": [None, None]}
    lines = [line("matched", "1"), line("tis", "2"), {"chosen": "2"}]
    page, figures = drawn(tmp_path, monkeypatch, lines, study)
    assert set(figures) == {"a.svg"}  # no run has that size yet
    lines.append(line("late", "2, off; 2", watched=watched))
    page, figures = drawn(tmp_path, monkeypatch, lines, study)
    assert set(figures) == {"a.svg", "a_at_2_off_2.svg"} and "(a_at_2_off_2.svg)" in page
    texts = set(figures["a_at_2_off_2.svg"])
    assert {"H = 2, off; 2", "mismatch/kl_k3", "matched", "late"} <= texts
    assert not {"tis", "entropy"} & texts


def test_accuracies_of_exported_models_are_columns():
    lines = [line("tis", "2", seed, deployed={"policy": 0.4}) for seed in (0, 1)]
    lines.append(line("late", "2", deployed={"policy": 0.5, "policy/sparse": 0.7}))
    tis, late = evidence_tables.rows(lines, ("matched", "uncorrected"), "now", timed=False)
    assert tis["policy on the actors"] == "0.400" and tis["policy/sparse on the actors"] == ""
    assert late["policy/sparse on the actors"] == "0.700"


@pytest.mark.parametrize(
    ("further", "said"),
    [({}, "no method was compared."), ({"4": {"tis": ()}}, "declared before: at 4.")],
)
def test_a_sweep_that_chooses_no_size_says_where_methods_run(further, said):
    study = replace(STUDY, further=further)
    assert evidence_page.choice(study, [{"chosen": None}]).endswith(said)
