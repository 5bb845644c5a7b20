"""The studies of `evidence.py`: which runs are due, how a size is chosen, what a page says."""

import itertools
import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from benchmarks.evidence import (
    evidence,
    evidence_gates,
    evidence_page,
    evidence_tables,
    evidence_trl,
)
from benchmarks.evidence.evidence_programme import PROGRAMME, Hypothesis
from benchmarks.evidence.evidence_studies import MOVED, STUDIES, Held, Study
from rlcore.commands.derived import evaluation_actor
from rlcore.commands.preflight import make_tasks
from rlcore.config.compose import load

TINY = Study(
    experiment="evidence/jackpot",
    knob="H",
    matched=("1", ("a=1",)),
    sizes={"2": ("a=2",), "4": ("a=4",)},
    arms={"tis": ("b=tis",)},
    further={"4": {"tis": ("b=tis",)}},
    seeds=(0, 1),
)


def line(arm, size, seed, final, collapse=None, sources="now"):
    return {
        "arm": arm,
        "size": size,
        "seed": seed,
        "final": final,
        "best": final,
        "collapse": collapse,
        "sources": sources,
        "machine": "a machine",
        "curve": [(1, 0.3), (32, final)],
    }


def table_rows(found, *, timed=False, against="p_ref", references=("matched", "uncorrected")):
    members = evidence_tables.family(found, references)
    return evidence_tables.rows(found, references, "now", members, timed=timed, against=against)


def swept(uncorrected):
    """A whole sweep: the matched arm ends at 0.8, the uncorrected one at the given accuracies."""
    return [
        made
        for seed in TINY.seeds
        for made in (
            line("matched", "1", seed, 0.8),
            *(line("uncorrected", size, seed, final) for size, final in uncorrected.items()),
        )
    ]


def test_methods_run_only_after_the_sweep_has_chosen_a_size():
    first = list(evidence.missing(TINY, []))
    assert {job.arm for job in first} == {"matched", "uncorrected"} and len(first) == 6
    found = swept({"2": 0.6, "4": 0.5})
    assert list(evidence.missing(TINY, found)) == []
    jobs = list(evidence.missing(TINY, [*found, {"chosen": "2"}]))
    assert [(job.arm, job.size, job.seed) for job in jobs] == [
        ("tis", "2", 0),
        ("tis", "2", 1),
        ("tis", "4", 0),
        ("tis", "4", 1),
    ]
    assert jobs[0].words == ("a=2", "b=tis")


def test_without_a_chosen_size_only_the_further_arms_run():
    found = [*swept({"2": 0.6, "4": 0.6}), {"chosen": None}]
    assert {(job.size, job.arm) for job in evidence.missing(TINY, found)} == {("4", "tis")}


def test_a_stopped_study_goes_on_with_what_is_missing(tmp_path, monkeypatch):
    ran = []

    def run(study, job):
        ran.append((job.arm, job.size, job.seed))
        return line(job.arm, job.size, job.seed, 0.8 if job.arm == "matched" else 0.5)

    monkeypatch.setitem(evidence.STUDIES, "jackpot", replace(TINY, seeds=(0, 1, 2)))
    monkeypatch.setattr(evidence, "run", run)
    monkeypatch.setattr(evidence, "RESULTS", tmp_path)
    monkeypatch.setattr(evidence, "CLAIMS", tmp_path / "claims")
    monkeypatch.setattr(evidence_page, "PAGES", tmp_path)
    page = f"text\n{evidence_page.BEGIN}\nold\n{evidence_page.END}\nmore\n"
    (tmp_path / "jackpot.md").write_text(page)
    (tmp_path / "jackpot.jsonl").write_text(json.dumps(line("matched", "1", 0, 0.8)) + "\n")
    monkeypatch.setattr("sys.argv", ["evidence.py", "jackpot"])
    evidence.main()
    evidence.main()
    assert len(ran) == len(set(ran)) == 8 + 3 + 3 and ("matched", "1", 0) not in ran
    written = (tmp_path / "jackpot.md").read_text()
    assert "Chosen by the sweep: H = 2." in written and "old\n" not in written
    assert written.startswith("text\n") and written.endswith("more\n")
    assert (tmp_path / "jackpot.svg").read_text().count("<svg") == 1


def test_a_study_without_a_sweep_runs_all_arms_of_a_seed_together():
    study = replace(TINY, sizes={"same": ()}, arms={"TRL": ()}, further={}, swept=False)
    jobs = [(job.arm, job.seed) for job in evidence.missing(study, [])]
    assert jobs == [("matched", 0), ("TRL", 0), ("matched", 1), ("TRL", 1)]
    study = replace(TINY, further={"4": {"other": ("c=1",)}}, seeds=(0,), swept=False)
    jobs = [(job.arm, job.size, job.words) for job in evidence.missing(study, [])]
    assert jobs == [
        ("matched", "1", ("a=1",)),
        ("tis", "2", ("a=2", "b=tis")),
        ("tis", "4", ("a=4", "b=tis")),
        ("other", "4", ("a=4", "c=1")),
    ]


def test_metrics_over_time_are_means_between_evaluations():
    rows = [{"step": s, "kl": float(s)} for s in (1, 2, 3)] + [{"step": 4}]
    assert evidence.means_between(rows, "kl", [1, 3, 4]) == [1.0, 2.5, None]


def test_times_are_compared_with_the_matched_run_of_a_seed():
    found = [{**line("matched", "1", s, 0.8), "clock": [0.0, 40.0 + s]} for s in range(3)]
    found += [{**line("tis", "2", s, 0.8), "clock": [0.0, 20.0 + s / 2]} for s in range(3)]
    matched, tis = table_rows(found, timed=True)
    assert tis["training seconds"].endswith("(-50% [-50, -50])")
    assert "%" not in matched["training seconds"]
    assert not any("seconds" in name for row in table_rows(found) for name in row)


def test_the_job_of_trl_is_what_the_experiment_says(tmp_path, monkeypatch):
    monkeypatch.setattr(evidence_trl, "kept_model", lambda _: "a folder")
    words = ["experiment=evidence/trl", "seed=3", f"run_dir={tmp_path}"]
    config = load(words)
    job = evidence_trl.job_of(config)
    assert job["rows"] == job["groups"] * job["samples"] == 128
    assert len(job["problems"]) == 16 * 192 and len(job["heldout"]) == config.evaluation.prompts
    assert not {p["prompt"] for p in job["heldout"]} & {p["prompt"] for p in job["problems"]}
    assert (job["lr"], job["lr_schedule"], config.learner.lr_final) == (1e-4, "linear", 0.0)
    monkeypatch.setattr(evidence_trl, "kept_model", lambda _: None)
    with pytest.raises(RuntimeError, match="warmed-up model is missing"):
        evidence_trl.job_of(config)


@pytest.mark.parametrize(
    ("uncorrected", "chosen"),
    [({"2": 0.75, "4": 0.70}, "4"), ({"2": 0.6, "4": 0.5}, "2"), ({"2": 0.79, "4": 0.75}, None)],
)
def test_the_smallest_size_that_costs_ten_points_is_chosen(uncorrected, chosen):
    found = swept(uncorrected)
    assert evidence_tables.choose(found, ["2", "4"], "matched", "uncorrected") == chosen


def test_a_size_at_which_most_seeds_collapse_is_chosen():
    found = [line("matched", "1", s, 0.5) for s in range(3)]
    found += [line("uncorrected", "2", s, 0.5, collapse=64 if s else None) for s in range(3)]
    assert evidence_tables.choose(found, ["2"], "matched", "uncorrected") == "2"
    found = [{**made, "collapse": None} for made in found]
    assert evidence_tables.choose(found, ["2"], "matched", "uncorrected") is None


def test_a_collapse_is_a_fall_below_half_of_the_best_so_far():
    assert evidence_tables.collapse_step([(1, 0.2), (32, 0.6), (64, 0.25)]) == 64
    assert evidence_tables.collapse_step([(1, 0.2), (32, 0.6), (64, 0.5), (96, 0.9)]) is None


@given(st.lists(st.floats(0, 1), min_size=2, max_size=8))
def test_an_interval_is_students(values):
    mean, low, high = evidence_tables.interval(values)
    assert low <= mean <= high and mean - low == pytest.approx(high - mean)
    if np.std(values) > 1e-6:
        wanted = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
        assert (low, high) == pytest.approx((wanted.low, wanted.high))


def test_differences_are_paired_by_seed():
    found = [line("tis", "2", s, 0.5 + s / 10) for s in (0, 1, 2)]
    found += [line("uncorrected", "2", s, 0.4 + s / 10) for s in (2, 1)]
    pairs = evidence_tables.paired(found, "tis", "uncorrected", "2")
    assert pairs.values == pytest.approx((0.1, 0.1)) and pairs.refused == 0


def test_only_the_matched_arm_is_compared_at_sizes_where_it_has_no_runs():
    found = [line(arm, "2", s, 0.5) for arm in ("tis", "uncorrected") for s in (0, 1)]
    found += [line("uncorrected", "4", s, 0.4) for s in (0, 1)]
    found += [line("matched", "1", s, 0.6) for s in (0, 1)]
    assert evidence_tables.paired(found, "tis", "uncorrected", "4").values == ()
    assert evidence_tables.paired(found, "uncorrected", "tis", "4").values == ()
    for size in ("2", "4"):
        values = evidence_tables.paired(found, "matched", "uncorrected", size).values
        assert len(values) == 2


@pytest.mark.parametrize(
    ("own", "other", "refused"),
    [
        ({"start": "a"}, {"start": "a", "curve": [(1, 0.4), (32, 0.8)]}, False),
        ({"start": "a"}, {"start": "b"}, True),
        ({"start": "a"}, {}, False),  # an older line has no digest: its first accuracy decides
        ({}, {"curve": [(1, 0.4), (32, 0.8)]}, True),
        ({}, {"curve": [(2, 0.4), (32, 0.8)]}, False),
    ],
)
def test_pairs_of_different_starts_are_refused(own, other, refused):
    found = [{**line("tis", "1", 0, 0.8), **own}, {**line("matched", "1", 0, 0.7), **other}]
    pairs = evidence_tables.paired(found, "tis", "matched", "1")
    assert (pairs.refused, len(pairs.values)) == (int(refused), int(not refused))


def test_the_start_is_the_digest_of_the_models_weights(tmp_path):
    words = ["experiment=evidence/jackpot", f"model.path={tmp_path}", "model.fresh=null"]
    words.append("model.warmup=null")
    digests = []
    for content in (b"a", b"a", b"b"):
        (tmp_path / "model.safetensors").write_bytes(content)
        digests.append(evidence.start_digest(words))
    assert digests[0] == digests[1] != digests[2]


def test_holm_corrects_for_the_differences_of_a_page():
    """Of three equal effects with p of 0.02 none is shown, of one alone it is."""
    wide = (0.1, 0.12, 0.3, 0.2, 0.08)
    members = {(arm, "other", "1"): evidence_tables.Difference(wide) for arm in "abc"}
    p = members["a", "other", "1"].p
    assert evidence_tables.holm(members) == pytest.approx(dict.fromkeys(members, 3 * p))
    mixed = {
        **members,
        ("d", "other", "1"): evidence_tables.Difference((0.1, 0.101, 0.102)),
        ("e", "other", "1"): evidence_tables.Difference((0.1,)),  # says nothing
    }
    adjusted = evidence_tables.holm(mixed)
    assert adjusted["d", "other", "1"] == pytest.approx(4 * mixed["d", "other", "1"].p)
    assert ("e", "other", "1") not in adjusted
    assert evidence_tables.resolution(members) == pytest.approx(
        evidence_tables.interval(wide)[2] - np.mean(wide)
    )


def test_the_table_counts_lines_of_other_sources_where_some_are_of_todays():
    found = [line("matched", "1", s, 0.8, sources="before" if s else "now") for s in range(3)]
    (row,) = table_rows(found)
    assert row["seeds"] == "3 (2 old)" and row["final accuracy"] == "0.800 ± 0.000"
    (row,) = table_rows([*found[1:], line("matched", "1", 4, 0.8, sources="before")])
    assert row["seeds"] == "3"


def test_arms_of_one_or_two_seeds_are_not_shown():
    found = [line("matched", "1", s, 0.8) for s in range(3)] + [line("tis", "2", 0, 0.7)]
    assert [row["arm"] for row in table_rows(found)] == ["matched"]


def test_the_matched_arm_is_not_compared_with_uncorrected_ones_of_other_sizes():
    found = [line("matched", "1", s, 0.8 + s / 100) for s in range(3)]
    for size, final in (("2", 0.6), ("4", 0.5)):
        found += [line("uncorrected", size, s, final) for s in range(3)]
    rows = table_rows(found)
    assert [row.get("against matched", "").strip("*")[:6] for row in rows] == [
        "",
        "-0.210",
        "-0.310",
    ]
    assert not any(row.get("against uncorrected") for row in rows)


def test_where_the_phase_is_long_distances_are_to_p_new():
    words = ("correction.jackpot.target=new",)
    watched = {"correction/jackpot/acceptance": [None, 0.9, 0.8]}
    found = [
        {**line("jackpot new", "64", s, 0.8), "kl": 1e-13, "watched": watched, "words": words}
        for s in range(3)
    ]
    (row,) = table_rows(found, against="p_new")
    assert row["acceptance by p_new"] == "0.85" and not any("p_ref" in name for name in row)


@pytest.mark.parametrize(
    ("source", "same"),
    [
        ("# why\ndef f():\n    return 'one'\n", True),
        ('"""Of f."""\ndef f():\n    """One."""\n    return "one"\n', True),
        ("def f():\n    return 'two'\n", False),
    ],
)
def test_only_what_runs_changes_the_digest_of_sources(source, same, tmp_path):
    (tmp_path / "a.py").write_text("def f():\n    return 'one'\n")
    before = evidence_tables.source_digest(tmp_path, ["a.py"])
    (tmp_path / "a.py").write_text(source)
    assert (evidence_tables.source_digest(tmp_path, ["a.py"]) == before) is same


def test_a_size_that_switches_resumes_its_run_with_each_part(monkeypatch, tmp_path):
    parts = (("p=1",), ("p=2",), ("p=3",))
    study = replace(TINY, further={"1, 2, 1": {"tis": ("b=tis",)}}, switching={"1, 2, 1": parts})
    jobs = list(evidence.missing(study, [*swept({"2": 0.6, "4": 0.5}), {"chosen": "2"}]))
    job = next(job for job in jobs if job.size == "1, 2, 1")
    assert job.words == ("b=tis",) and job.parts == parts
    commands = []

    def rlcore(*words, run_dir, every_s):
        commands.append(words)
        return SimpleNamespace(seconds=2.0)

    monkeypatch.setattr(evidence, "rlcore", rlcore)
    words = ["experiment=evidence/ais", "schedule.steps=200"]
    assert evidence.train(words, parts, tmp_path) == 6.0
    assert [[w for w in c if w.startswith(("p=", "resume"))] for c in commands] == [
        ["p=1"],
        ["p=2", "resume=auto"],
        ["p=3", "resume=auto"],
    ]
    ends = [[w for w in c if w.startswith("schedule.steps=")][-1] for c in commands]
    assert ends == [f"schedule.steps={n}" for n in (66, 133, 200)]


def test_exported_models_are_evaluated_on_the_actors_where_they_exist(monkeypatch, tmp_path):
    study = replace(TINY, metric="accuracy", deployed=("policy", "policy/sparse"))

    def rlcore(command, *words, run_dir, every_s):
        given = dict(word.split("=", 1) for word in words)
        if command == "export":
            Path(given["out"]).mkdir()
        else:
            assert given["evaluation.dense_actor"] == "false" and given["actor"] == "[sparse]"
            models.append(given["model.path"])
            run_dir.mkdir(parents=True)
            (run_dir / "eval.json").write_text('{"accuracy": 0.4, "length": 7.0}')

    models = []
    monkeypatch.setattr(evidence, "rlcore", rlcore)
    assert evidence.deploy(study, ["actor=[sparse]"], tmp_path / "run") == {"policy": 0.4}
    assert models == [str(tmp_path / "policy")]


# its page says that runs were evaluated by all of their actors
BY_ITS_ACTORS = {"strata"}


def samples_the_policy(actor):
    drawn = (actor.rounding, actor.sparse, actor.logit_noise, actor.probability_floor)
    return actor.kind != "draft" and drawn == ("none", None, 0, 0) and actor.temperature_scale == 1


@pytest.mark.parametrize("name", list(evidence.STUDIES))
def test_every_run_of_a_study_composes_and_has_a_page(name, tmp_path):
    study = evidence.STUDIES[name]
    sizes = itertools.product(study.sizes.items(), [("uncorrected", ()), *study.arms.items()])
    combined = [(*size, *arm) for (_, size), (_, arm) in sizes]
    combined += [
        (*part, *words)
        for size, arms in study.further.items()
        for words in arms.values()
        for part in study.switching.get(size, (study.sizes.get(size, ()),))
    ]
    for words in [study.matched[1], *combined]:
        given = [word.replace(MOVED, "4") for word in words]
        run = load([f"experiment={study.experiment}", *given, f"run_dir={tmp_path}"])
        assert make_tasks(run)
        plain = evaluation_actor(run) or all(map(samples_the_policy, run.actor.values()))
        assert plain or name in BY_ITS_ACTORS
    own = evidence_page.PAGES / f"{name}.md"
    registered = name not in STUDIES and not own.exists()
    page = (evidence_page.PAGES / "programme.md" if registered else own).read_text()
    assert page.count(evidence_page.BEGIN) == page.count(evidence_page.END) == 1
    assert evidence_tables.source_digest(evidence.ROOT, study.sources)
    arms = {study.reference, "uncorrected", *study.arms, *study.replaced}
    arms |= {arm for own in study.further.values() for arm in own}
    assert len(study.figure) <= 4 and set(study.figure) <= arms
    assert set(study.figure) <= set(evidence_page.COLOURS)
    assert len({evidence_page.COLOURS[arm] for arm in study.figure}) == len(study.figure)
    assert {arm for a, b, _ in study.contrasts for arm in (a, b)} <= arms


@pytest.mark.parametrize(
    ("hypothesis", "differences", "verdict"),
    [
        ({"at_least": 0.1}, (0.15, 0.16, 0.14), "supported"),
        ({"at_least": 0.1}, (0.05, 0.04, 0.06), "refuted"),
        ({"at_least": 0.1}, (0.3, -0.1, 0.2), "open"),
        ({"at_least": -0.03}, (0.0, -0.01, 0.01), "supported"),
        ({"within": 0.05}, (0.01, -0.01, 0.0), "supported"),
        ({"within": 0.05}, (0.2, 0.21, 0.19), "refuted"),
        ({"within": 0.05}, (0.1, -0.1, 0.0), "open"),
        ({"within": 0.05}, (0.0, 0.0), "not run"),
    ],
)
def test_a_registered_hypothesis_is_judged_by_its_margin(hypothesis, differences, verdict):
    found = [line("a", "1", s, 0.5 + d) for s, d in enumerate(differences)]
    found += [line("b", "1", s, 0.5) for s in range(len(differences))]
    judged = Hypothesis("a", ("b",), "1", **hypothesis)
    assert judged.verdict(found) == verdict
    if verdict == "supported":  # it must hold against each of several
        found += [line("c", "1", s, 1.0) for s in range(len(differences))]
        assert Hypothesis("a", ("b", "c"), "1", **hypothesis).verdict(found) == "refuted"


def test_every_hypothesis_is_about_arms_and_sizes_of_its_study():
    for registered in PROGRAMME.values():
        study = registered.study
        for hypothesis in registered.hypotheses:
            arms = {hypothesis.arm, *hypothesis.others}
            further = {arm for own in study.further.values() for arm in own}
            assert arms <= {study.reference, "uncorrected", *study.arms, *further}
            assert hypothesis.size in {*study.sizes, *study.further}


def test_a_study_in_the_background_goes_on_by_itself_at_low_priority(monkeypatch, tmp_path):
    started = []
    monkeypatch.setattr(evidence, "CLAIMS", tmp_path)
    monkeypatch.setattr(
        evidence.subprocess,
        "Popen",
        lambda command, **how: started.append((command, how)) or SimpleNamespace(pid=7),
    )
    monkeypatch.setattr("sys.argv", ["evidence.py", "floor_64", "--background", "--minutes", "9"])
    evidence.main()
    ((command, how),) = started
    assert command[:3] == ["nice", "-n", "19"] and command[-3:] == ["floor_64", "--minutes", "9"]
    assert how["start_new_session"] and "--background" not in command


def test_a_number_that_a_set_point_decides_is_that_of_the_first_seed():
    held = Held("p05", 0.86, 0.02, {}, {"64 on": "pages"}, "pages", "set-point")
    arms = {"set-point": (), "equal": (f"blocks={MOVED}",)}
    study = replace(TINY, swept=False, sizes={"2": ()}, arms=arms, further={}, held=held)
    assert {job.arm for job in evidence.missing(study, [])} == {"matched", "set-point"}
    watched = {"watched": {"pages": [4.0, 7.0]}}  # of steps 1, and 2 to 32
    later = line("set-point", "2", 1, 0.5) | {"watched": {"pages": [2.0, 2.0]}}
    found = [line("set-point", "2", 0, 0.5) | watched, later]
    due = {(job.arm, job.seed): job.words for job in evidence.missing(study, found)}
    assert due["equal", 0] == due["equal", 1] == ("blocks=7",)


@pytest.fixture
def side_by_side(monkeypatch, tmp_path):
    """Calls of `main` on the small study, each run of which first starts one more call."""
    ran = []
    finals = {"matched": 0.8, "uncorrected": 0.5, "tis": 0.7}

    def run(_, job):
        ran.append((job.arm, job.size, job.seed))
        if len(ran) in (1, 2):
            evidence.main()  # as another command would, while this run is under way
        return line(job.arm, job.size, job.seed, finals[job.arm])

    monkeypatch.setattr(evidence, "RESULTS", tmp_path)
    monkeypatch.setattr(evidence, "CLAIMS", tmp_path / "claims")
    monkeypatch.setattr(evidence, "WAIT_S", 0.0)
    monkeypatch.setattr(evidence, "write_page", lambda *_: None)
    monkeypatch.setattr(evidence, "run", run)
    monkeypatch.setattr("sys.argv", ["evidence.py", "jackpot", "--minutes", "0.02"])
    return ran


def test_commands_side_by_side_take_each_run_once(side_by_side, monkeypatch, tmp_path):
    monkeypatch.setitem(evidence.STUDIES, "jackpot", TINY)
    evidence.main()
    # the inner commands ended the sweep but for the two runs that were under way around them
    assert len(side_by_side) == len(set(side_by_side)) >= 6
    evidence.main()
    found = evidence.lines(tmp_path / "jackpot.jsonl")
    assert list(evidence.missing(TINY, found)) == []
    assert sum("chosen" in made for made in found) == 1
    assert len([r for r in found if "arm" in r]) == len(set(side_by_side)) == len(side_by_side)


def test_a_run_that_needs_the_machine_starts_beside_no_other(side_by_side, monkeypatch, tmp_path):
    alone = replace(TINY, alone=True)
    monkeypatch.setitem(evidence.STUDIES, "jackpot", alone)
    monkeypatch.setattr("sys.argv", ["evidence.py", "jackpot", "--minutes", "0.001"])
    with evidence.locked(tmp_path / "claims" / "machine", shared=True):  # another run's
        evidence.main()
    assert side_by_side == []
    evidence.main()  # each run starts a further command, which cannot run one beside it
    assert len(side_by_side) == len(evidence.lines(tmp_path / "jackpot.jsonl")) == 1


def test_a_run_that_needs_the_machine_waits_for_the_others_to_end(side_by_side, tmp_path):
    claims = tmp_path / "claims"
    with evidence.place(alone=False, stop=0.0) as given:
        assert given and evidence.is_free(claims / "queue")
        with evidence.place(alone=True, stop=time.monotonic() + 0.1) as whole:
            assert not whole and not evidence.is_free(claims / "queue", shared=True)
    with evidence.place(alone=True, stop=0.0) as whole:
        assert whole


def test_no_run_starts_while_one_waits_for_the_machine(side_by_side, monkeypatch, tmp_path):
    monkeypatch.setitem(evidence.STUDIES, "jackpot", TINY)
    monkeypatch.setattr("sys.argv", ["evidence.py", "jackpot", "--minutes", "0.001"])
    with evidence.locked(tmp_path / "claims" / "queue"):
        evidence.main()
    assert side_by_side == []


@pytest.mark.parametrize(
    ("values", "seeds", "met"),
    [((0.1, 0.11), 3, True), ((0.1, 0.2), 3, False), ((0.1, 0.11), 2, None)],
)
def test_a_gate_is_met_by_the_means_of_its_runs(values, seeds, met):
    runs = [
        line(arm, "1", seed, 0.5) | {"watched": {"kl": [value, 9.0]}}
        for arm, value in zip("ab", values)
        for seed in range(seeds)
    ]
    ratio = evidence_gates.ratio(
        *(evidence_gates.mean(a, "1", evidence_gates.first("kl")) for a in "ab")
    )
    gate = evidence_gates.Gate("near", (evidence_gates.Bound(ratio, 0.8, 1.2),))
    assert gate.met(runs) is met
    assert evidence_gates.Gate("on its page").met(runs) is None
