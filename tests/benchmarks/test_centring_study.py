"""The study of centring: its runs, its gate, and its statements."""

import pytest
import torch

from benchmarks.evidence import centring_study as study
from rlcore.models.fresh import build_fresh_model
from rlcore.models.specs import FreshModelSpec


def line(cell, entropy=1.0, accuracy=0.6):
    same = {"kl": 0.1, "actor": accuracy, "mismatch": 0.01, "drift": None}
    course = {"lowest": 0.5, "highest": 0.7, "start": "a", "sources": "", "curve": []}
    return {**vars(cell), "entropy": entropy, "accuracy": accuracy, **same, **course}


def ended(**entropies):
    """Lines of every cell; `entropies` by arm, else 1."""
    return [line(c, entropies.get(c.arm, 1.0) * (1 + 0.001 * (c.seed % 3))) for c in study.cells()]


def pilot(rate, seed, highest=0.7):
    return {"rate": rate, "seed": seed, "lowest": 0.45, "highest": highest, "curve": [(0, 0.45)]}


def left(found):
    return [p.key for p in study.next_pilots(found)]


def test_the_pilot_takes_the_largest_rate_at_which_both_seeds_hold():
    first, second, third = study.RATES[:3]
    assert left([]) == [(first, 100), (first, 101)] and study.chosen([]) is None
    # one seed that leaves the gate decides about its rate
    out = [pilot(first, 100, highest=0.9)]
    assert left(out) == [(second, 100), (second, 101)] and study.chosen(out) is None
    half = [*out, pilot(second, 101)]
    assert left(half) == [(second, 100)] and study.chosen(half) is None
    both = [*half, pilot(second, 100)]
    assert left(both) == [] and study.chosen(both) == second
    assert study.chosen([*both, pilot(third, 100), pilot(third, 101)]) == second
    assert study.pilot_table(both)[-1] == f"The pilot chose a rate of {second:g}."


def test_where_no_rate_holds_the_study_does_not_start(monkeypatch):
    out = [pilot(rate, 101, highest=0.81) for rate in study.RATES]
    assert left(out) == [] and study.chosen(out) is None
    assert study.pilot_table(out)[-1] == "Of the pilot: no rate holds."
    monkeypatch.setattr(study, "pilots", lambda: out)
    assert study.STUDY.stopped([])
    with pytest.raises(RuntimeError, match="chosen no rate"):
        study.run(next(study.cells()), None)


def test_a_study_begins_with_its_pilot(monkeypatch):
    begun = []
    monkeypatch.setattr(type(study.STUDY), "_begun", lambda own: begun.append(own.name) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        study.STUDY.run_first_free()
    assert begun == ["centring_pilot"]


@pytest.fixture
def settled(monkeypatch):
    """A pilot that has chosen a rate."""
    found = [pilot(study.RATES[0], seed) for seed in study.PILOT_SEEDS]
    monkeypatch.setattr(study, "pilots", lambda: found)


def verdicts(found):
    return {p.said: p.verdict() for p in study.predictions(found)}


def test_every_run_is_planned_once_and_int3_before_the_rest():
    cells = [c.key for c in study.cells()]
    assert len(cells) == len(set(cells)) == 10 + 10 * 6 + 5 * 5 * 2
    assert {regime for _, regime, _ in cells[:70]} == {"", study.INT3}


def test_the_study_stops_where_nothing_drifts_after_five_seeds(settled):
    flat = [r for r in ended() if r["seed"] < 5]
    assert study.refuted(flat)
    assert not study.refuted([r for r in flat if r["seed"] < 4])
    assert not study.refuted(ended(none=0.5))


def test_a_statement_is_judged_by_its_interval_over_all_seeds():
    said = "INT3: entropy of none over matched's in [0, 0.7]"
    assert verdicts(ended(none=0.4))[said].startswith("supported")
    assert verdicts(ended(none=0.9))[said].startswith("refuted")
    few = [r for r in ended(none=0.4) if r["seed"] < 9]
    assert verdicts(few)[said] == "not judged (9 of 10 seeds)"


def test_an_int3_actor_is_a_rounded_copy_and_the_policy_stays(tmp_path):
    shape = FreshModelSpec(hidden_size=32, heads=2, intermediate_size=32, vocab_size=64, layers=1)
    build_fresh_model(tmp_path / "m", study.late.ALPHABET, shape, seed=0, max_len=64)
    lm = torch.nn.Module.eval(load(tmp_path / "m"))
    before = {n: p.clone() for n, p in lm.named_parameters()}
    actor = study.rounded(lm)
    moved = [n for n, p in actor.named_parameters() if not torch.equal(p, before[n])]
    assert moved and all("proj" in n for n in moved)
    assert all(torch.equal(p, before[n]) for n, p in lm.named_parameters())
    looked = study.look(lm, lm)
    assert looked.kl == pytest.approx(0.0, abs=1e-6) and looked.entropy > 0


def load(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)
