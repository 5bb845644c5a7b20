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


def verdicts(found):
    return {p.said: p.verdict() for p in study.predictions(found)}


def test_every_run_is_planned_once_and_int3_before_the_rest():
    cells = [c.key for c in study.cells()]
    assert len(cells) == len(set(cells)) == 10 + 10 * 6 + 5 * 5 * 2
    assert {regime for _, regime, _ in cells[:70]} == {"", study.INT3}


def test_the_study_stops_where_nothing_drifts_after_five_seeds():
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
