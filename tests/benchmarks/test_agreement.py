"""What the tables of actors and policy are made of: sums over the whole vocabulary, per token."""

import math

import numpy as np
import pytest
import torch

from benchmarks.evidence.agreement_tables import (
    agreement,
    capped,
    kept,
    normaliser,
    safe_set,
    winners,
    worst,
)
from benchmarks.evidence.drawn import LOG_ZERO, Sums, compare, load, padded, save, whole_vocabulary
from rlcore.testing.records import make_trajectory

VOCAB = 50


def rows(noise, lengths=(3, 5, 4, 2)):
    g = torch.Generator().manual_seed(0)
    out = []
    for n in lengths:
        ref = 3 * torch.randn(n, VOCAB, generator=g)
        inf = (ref + noise * torch.randn(n, VOCAB, generator=g)).log_softmax(-1)
        sampled = torch.multinomial(inf.exp(), 1, generator=g)[:, 0]
        out.append(compare(inf, ref.log_softmax(-1), sampled))
    return out


def drawn(noise):
    return padded(rows(noise), groups=[0, 0, 1, 1], rewards=[1.0, 0.0, 0.0, 1.0])


def test_sums_are_over_the_whole_vocabulary():
    inf, ref = (
        torch.tensor([[0.5, 0.3, 0.2], [1.0, 0.0, 0.0]]),
        torch.tensor([[0.2, 0.2, 0.6], [0.25, 0.25, 0.5]]),
    )
    log_inf = inf.log().clamp(min=LOG_ZERO)  # as an engine that cut tokens off
    found = compare(log_inf, ref.log(), torch.tensor([2, 0]), lam=2.0)
    kl = 0.5 * math.log(2.5) + 0.3 * math.log(1.5) + 0.2 * math.log(1 / 3)
    assert found["kl"].tolist() == pytest.approx([kl, math.log(4)])
    assert found["z"].tolist() == pytest.approx([0.1 + 0.1 + 0.2, 0.125])
    assert found["logp_ref"].exp().tolist() == pytest.approx([0.6, 0.25])


def test_mass_outside_the_learners_safe_set_is_the_actors():
    ref = torch.tensor([[20.0, 0.0, 19.0]]).log_softmax(-1)  # e^-20 is far below rho
    inf = torch.tensor([[0.5, 0.3, 0.2]]).log()
    found = compare(inf, ref, torch.tensor([1]))
    assert found["outside"].item() == pytest.approx(0.3)
    assert (found["inside_inf"].item(), found["inside_ref"].item()) == (True, False)


def test_the_same_distributions_need_no_correction(tmp_path):
    save(drawn(0.0), tmp_path / "x.pt")
    same = load(tmp_path / "x.pt")
    first = agreement("same", same)
    assert first["tokens"] == 14
    assert first["KL, exact"] == pytest.approx(0, abs=1e-6) and first["ESS"] == pytest.approx(1)
    assert set(kept("same", same).values()) == {"same", 1.0}
    row = capped("same", same)
    assert row["tis"] == row["rapid"] == 0 and row["ais alpha"] == pytest.approx(0, abs=1e-4)
    assert safe_set("same", same)["vetoed sequences, no DVP"] == 0


def test_a_mismatch_is_seen_by_every_table():
    far = drawn(2.0)
    row = agreement("far", far)
    assert row["KL, exact"] > 0.1 and row["ESS"] < 1 and row["acceptance, exact"] < 1
    assert kept("far", far)["jackpot"] < 1
    assert capped("far", far)["ais alpha_mis"] == 1


def test_the_whole_vocabulary_as_top_k_has_no_error_and_residual_is_closer_below():
    far = drawn(1.0)
    # K is as large as the vocabulary's top TOP: what is left is at most their sum
    small, large = normaliser(far, 5), normaliser(far, 40)
    assert large["none/zero"] < small["none/zero"]
    assert small["residual/zero"] < small["none/zero"]
    first = {r["estimate"]: r["closest in"] for r in winners([small, large])}
    assert first["none/zero"] == 0 and first["residual/zero"] + first["residual/bound"] >= 2


def test_the_worst_tokens_are_named():
    class Tokenizer:
        def decode(self, ids):
            return f"<{ids[0]}|"

    found = drawn(0.0)
    found.logp_ref[1, 4] -= 3.0
    named = worst(found, Tokenizer(), count=1)
    assert named.startswith(f"`'<{int(found.ids[1, 4])}\\|'`")
    found.logp_ref[0, 4] -= 9.0  # beyond the first response's three tokens
    assert worst(found, Tokenizer(), count=1) == named


def test_tokens_that_an_engine_did_not_return_have_no_probability():
    t = make_trajectory(
        turns=[([3], [5, 6])],
        topk_ids=np.array([[5, 1], [6, -1]], np.int32),
        topk_logp=np.array([[-0.5, -1.0], [0.0, -np.inf]], np.float32),
    )
    full = whole_vocabulary(t, 8)
    assert full[0, [5, 1]].tolist() == [-0.5, -1.0] and full[1, 6] == 0.0
    assert (full > LOG_ZERO / 2).sum() == 3


@pytest.mark.parametrize(
    "response, reward", [("5 + 4 is 9.", 1.0), ("I make it 8", 0.1), ("no number", 0.0)]
)
def test_sums_are_graded_by_their_last_number(response, reward):
    task = Sums()
    item = next(i for n in range(500) if (i := task.item("train", n)).answer == "9")
    assert task.grade(item, response).reward == pytest.approx(reward)
