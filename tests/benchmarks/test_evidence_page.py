"""What the page of a study shows: the figure, the arms beside each other, exports."""

import re
from dataclasses import replace

import pytest

from benchmarks.evidence import evidence_page, evidence_tables
from benchmarks.evidence.evidence_gates import Bound, Gate, mean
from benchmarks.evidence.evidence_held import held_rows, second_half
from benchmarks.evidence.evidence_programme import Hypothesis, Registered
from benchmarks.evidence.evidence_studies import Held, Study

STUDY = Study(
    experiment="evidence/jackpot",
    knob="H",
    matched=("1", ()),
    sizes={"2": (), "4": ()},
    arms={"tis": (), "ais": ()},
    figure=("matched", "tis"),
    contrasts=(("tis", "ais", "2"),),
    deviations=(("clip", "0.4", "0.2"),),
)


def line(arm, size, seed=0, final=0.5, **more):
    return {
        **{"arm": arm, "size": size, "seed": seed, "final": final, "best": final},
        **{"collapse": None, "sources": "now", "machine": "a machine"},
        **{"curve": [(1, 0.3), (32, final)], **more},
    }


def runs(arm, size, final=0.5, seeds=3, **more):
    return [line(arm, size, seed, final + seed / 100, **more) for seed in range(seeds)]


def drawn(tmp_path, monkeypatch, lines, study=STUDY):
    """The page and the texts of its figures, by file."""
    monkeypatch.setattr(evidence_page, "PAGES", tmp_path)
    (tmp_path / "a.md").write_text(f"before {evidence_page.BEGIN} {evidence_page.END} after")
    evidence_page.write_page("a", study, lines, "now")
    figures = {
        f.name: re.findall(r">([^<]+)</text>", f.read_text()) for f in tmp_path.glob("*.svg")
    }
    return (tmp_path / "a.md").read_text(), figures


def test_a_page_has_one_figure_and_says_what_its_differences_can_show(tmp_path, monkeypatch):
    lines = [*runs("matched", "1", 0.8), *runs("tis", "2"), *runs("ais", "2", 0.6)]
    lines += [line("late", "2"), {"chosen": "2"}]
    page, figures = drawn(tmp_path, monkeypatch, lines)
    assert set(figures) == {"a.svg"} and {"matched", "tis"} <= set(figures["a.svg"])
    assert not {"ais", "late"} & set(figures["a.svg"])
    assert "| tis | ais | 2 | **-0.100 [-0.100, -0.100]** |" in page
    assert "for the 3 differences of this page, which 3 are" in page
    assert "| clip | 0.4 | 0.2 |" in page and "| late |" not in page


def test_arms_are_compared_at_the_chosen_size_or_where_they_are_matched():
    lines = [*runs("matched", "1"), *runs("tis", "1"), *runs("tis", "2"), *runs("tis", "4")]
    assert evidence_page.compared_size(STUDY, [*lines, {"chosen": "2"}]) == "2"
    shown = evidence_page.compared(STUDY, lines, "2")
    assert [(arm, {r["size"] for r in own}) for arm, own in shown] == [
        ("matched", {"1"}),
        ("tis", {"2"}),
    ]
    single = [*runs("matched", "1"), line("tis", "2")]  # no single run beside means
    assert [arm for arm, _ in evidence_page.compared(STUDY, single, "2")] == ["matched"]


@pytest.mark.parametrize("made", [[], [{"chosen": None}]])
def test_without_a_chosen_size_the_figure_shows_the_named_or_the_largest(made):
    lines = [line("uncorrected", "2"), *made]
    assert evidence_page.compared_size(STUDY, lines) == "4"
    assert evidence_page.compared_size(replace(STUDY, shown="2"), lines) == "2"


def test_a_verdict_before_the_last_run_holds_so_far(tmp_path, monkeypatch):
    monkeypatch.setattr(evidence_page, "PAGES", tmp_path)
    blank = f"{evidence_page.BEGIN} {evidence_page.END}"
    study = replace(STUDY, sizes={"2": ()}, arms={"tis": ()}, swept=False, seeds=(0, 1, 2, 3))
    hypothesis = Hypothesis("tis", ("matched",), "2", at_least=0.1)
    gate = Gate("learns", (Bound(mean("tis", "2", lambda run: run["final"]), at_least=0.7),))
    registered = {"a": Registered("E0", study, (hypothesis,), gate)}
    unmet = {
        "a": replace(
            registered["a"], gate=replace(gate, bounds=(replace(gate.bounds[0], at_least=0.9),))
        )
    }
    for seeds, verdict in ((2, "not run"), (3, "supported so far"), (4, "supported")):
        (tmp_path / "programme.md").write_text(blank)
        lines = [*runs("matched", "1", 0.5, seeds), *runs("tis", "2", 0.8, seeds)]
        evidence_page.write_programme(registered, {"a": lines})
        assert f"| {2 * seeds} of 8 | {verdict} |" in (tmp_path / "programme.md").read_text()
    assert "| learns | yes |" in (tmp_path / "programme.md").read_text()
    evidence_page.write_programme(unmet, {"a": lines})
    said = (tmp_path / "programme.md").read_text()
    assert "| none, gate not met (else supported) |" in said and "| learns | no |" in said
    own = replace(unmet["a"], hypotheses=(replace(hypothesis, gate=gate),))
    evidence_page.write_programme({"a": own}, {"a": lines})
    assert "| 8 of 8 | supported |" in (tmp_path / "programme.md").read_text()


def test_refused_pairs_and_old_lines_are_said(tmp_path, monkeypatch):
    other = [(1, 0.4), (32, 0.5)]
    lines = [
        *runs("matched", "1", sources="before"),
        *runs("tis", "2", curve=other),
        {"chosen": "2"},
    ]
    page, _ = drawn(tmp_path, monkeypatch, lines, replace(STUDY, contrasts=()))
    assert "3 pairs that began from different models were refused" in page
    assert "3 of them are older than today's sources" in page


def test_accuracies_of_exported_models_are_columns():
    lines = runs("tis", "2", deployed={"policy": 0.4})
    lines += runs("ais", "2", deployed={"policy": 0.5, "policy/sparse": 0.7})
    references = ("matched", "uncorrected")
    tis, ais = evidence_tables.rows(lines, references, "now", {}, timed=False)
    assert tis["policy on the actors"] == "0.400 ± 0.000"
    assert tis["policy/sparse on the actors"] == ""
    assert ais["policy/sparse on the actors"] == "0.700 ± 0.000"


def test_policies_on_the_actors_are_compared_by_their_own_accuracies():
    lines = runs("matched", "1", deployed={"policy": 0.8})
    lines += runs("tis", "2", deployed={"policy": 0.5})
    lines += runs("ais", "2")
    references = ("matched", "uncorrected")
    found = evidence_tables.family(lines, references, of=evidence_tables.on_actors)
    assert found["tis", "matched", "2"].values == pytest.approx((-0.3, -0.3, -0.3))
    assert found["ais", "matched", "2"].values == ()
    assert "Policies on the actors" in evidence_page.results(
        "tiny", replace(STUDY, contrasts=(), deployed=("policy",)), lines, "now"
    )


@pytest.mark.parametrize(
    ("further", "said"),
    [({}, "no method was compared."), ({"4": {"tis": ()}}, "declared before: at 4.")],
)
def test_a_sweep_that_chooses_no_size_says_where_methods_run(further, said):
    study = replace(STUDY, further=further)
    assert evidence_page.choice(study, [{"chosen": None}]).endswith(said)


HELD = Held(
    "p05", 0.86, 0.02, {"64 to 95": "a", "96 on": "b"}, {"64 to 95": "pages"}, "pages", "tis"
)


def followed(arm, seed, a, b, pages=None):
    watched = {"a": a, "b": b, "pages": pages or [None] * 3}
    curve = [(1, 0.3), (6, 0.4), (12, 0.5)]
    return line(arm, "sparse", seed, watched=watched) | {"curve": curve}


def test_a_held_statistic_is_told_by_stretch_over_the_second_half():
    one = followed("set-point", 0, [0.1, 0.2, 0.85], [0.1, 0.2, 0.9], [4, 5, 6])
    other = followed("set-point", 1, [0.1, 0.2, 0.87], [0.1, 0.2, 0.8], [4, 4, 4])
    assert second_half(one, "a") == 0.85 and second_half(one, "missing") is None
    found = held_rows(HELD, [("set-point", [one, other]), ("matched", [line("matched", "1")])])
    assert found == [
        {
            "arm": "set-point",
            "size": "sparse",
            "seeds": 2,
            "statistic, 64 to 95": "0.860 (0.850 to 0.870)",
            "statistic, 96 on": "0.850 (0.800 to 0.900)",
            "pages, 64 to 95": "4.71",  # (4 + 5 * 5 + 6 * 6)/12 is 5.42, and 4
        }
    ]


def test_the_figure_of_a_held_statistic_has_it_over_training_and_by_stretch(tmp_path, monkeypatch):
    study = replace(STUDY, sizes={"sparse": ()}, held=HELD, figure=("matched", "tis"))
    lines = runs("matched", "1")
    lines += [followed("tis", seed, [0.4, 0.7, 0.86], [0.3, 0.6, 0.85]) for seed in range(3)]
    for made in lines[:3]:
        made["curve"] = [(1, 0.3), (6, 0.4), (12, 0.5)]
    page, figures = drawn(tmp_path, monkeypatch, lines, study)
    assert "| tis | sparse | 3 | 0.860 (0.860 to 0.860) | 0.850 (0.850 to 0.850) |" in page
    texts = figures["a.svg"]
    assert {"64 to 95", "96 on", "second half of training", "positions"} <= set(texts)
