"""The referee: verdicts on losses whose expected gradient is known, and the forms of others."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from timing import deadline

from rlcore.cli import main
from rlcore.corrections.numerics import ONE_RANK
from rlcore.errors import UserError
from rlcore.objectives.losses import coefficients, counts, policy_loss
from rlcore.objectives.protocols import LossTensors
from rlcore.objectives.specs import ObjectiveSpec, make_loss
from rlcore.referee import WORLDS, LossBatch, World, extent, form_of, judge, lines

ROOT = Path(__file__).resolve().parents[1]


def reinforce(batch):
    """Summed over tokens, with a constant divisor."""
    weights = 1.0 if batch.weights is None else batch.weights
    ratio = (batch.logp_new - batch.logp_ref).exp()
    return -(weights * ratio * batch.advantages * batch.mask).sum(1).mean()


def first_steps(actor):
    return [w for w in WORLDS if w.actor == actor and not w.later_step]


def test_the_policy_gradient_is_found_exact_and_only_where_it_is():
    for verdict in judge(reinforce, first_steps("matched")):
        biased = verdict.world.advantage == "normalised"
        assert verdict.exact != biased, verdict
    for verdict in judge(reinforce, first_steps("mismatch")):
        assert verdict.exact == (verdict.weights == "sequence"), verdict
    # no weight brings back what is never sampled
    assert not any(verdict.exact for verdict in judge(reinforce, first_steps("truncated")))


def test_the_scale_is_that_of_a_mean_which_includes_the_answer():
    for world in (World(), World(group=3), World(groups=2)):
        (verdict,) = judge(reinforce, [world])
        assert verdict.scale == pytest.approx((world.group - 1) / world.group, rel=1e-12)
    (verdict,) = judge(reinforce, [World(advantage="reward")])
    assert verdict.scale == pytest.approx(1.0, rel=1e-12)


def whole(batch, tokens=None, cap=1e30):
    """A policy gradient with a sequence's ratio of its own; of its first `tokens` alone, capped."""
    logs = ((batch.logp_new.detach() - batch.logp_inf) * batch.mask)[:, :tokens]
    weight = logs.sum(1, keepdim=True).exp().clamp(max=cap)
    return -(weight * batch.advantages * batch.logp_new * batch.mask).sum(1).mean()


def first_two(batch):
    """A loss that ignores the third token."""
    names = ("logp_new", "logp_ref", "logp_inf", "advantages", "mask")
    cut = {name: getattr(batch, name)[:, :2] for name in names}
    return whole(LossBatch(**cut, rewards=batch.rewards, group_ids=batch.group_ids, weights=None))


LARGER = [w for w in WORLDS if w.tokens > 2 or w.actor == "far"]


@pytest.mark.parametrize(
    ("wrong", "caught"),
    [
        (functools.partial(whole, cap=5.0), "far"),
        (functools.partial(whole, tokens=4), "5 tokens"),
        (functools.partial(whole, tokens=2), "3 tokens"),
        (first_two, "3 tokens"),
    ],
)
def test_what_shows_in_larger_worlds_alone_is_caught(wrong, caught):
    def named(batch):
        return wrong(batch)

    (small,) = judge(named, [World("mismatch")], ["none"])
    found = list(judge(named, [w for w in LARGER if caught in str(w)], ["none"]))
    assert small.exact and found and not all(v.exact for v in found)


def test_a_verdict_says_how_far_it_reaches():
    found = list(judge(lambda batch: whole(batch), LARGER, ["none"]))
    assert all(v.exact for v in found)
    assert max(v.world.tokens for v in found) == 5 and max(v.ratio for v in found) > 10
    (near,) = judge(lambda batch: whole(batch), [World("mismatch")], ["none"])
    assert "exact up to ratios of 4.07, answers of 2 tokens, groups of 2" in str(near)
    assert extent([near, *found]).endswith("answers of 5 tokens, groups of 2")


def test_a_batch_that_is_answered_in_two_ways_is_not_deterministic():
    calls = []

    def stateful(batch):
        calls.append(batch)
        return whole(batch) * (1 + len(calls) % 2)

    def random(batch):
        return (torch.rand_like(batch.logp_new) * batch.logp_new * batch.advantages).sum()

    def in_place(batch):
        batch.advantages.mul_(2.0)
        return whole(batch)

    for loss in (stateful, random):
        (verdict,) = judge(loss, [World()])
        assert not verdict.deterministic and not verdict.exact and "not determ" in str(verdict)
        assert "not deterministic" in lines([verdict])[-1]
    assert len(calls) == 2 * 81
    (verdict,) = judge(in_place, [World()])  # each call has a batch of its own
    assert verdict.exact and verdict.scale == pytest.approx(1.0)


def test_a_wrong_sign_is_not_exact():
    (verdict,) = judge(lambda batch: -reinforce(batch), [World()])
    assert verdict.cosine == pytest.approx(-1.0) and not verdict.exact
    assert "wrong sign (-0.50)" in lines([verdict])[-1] and "wrong sign" in str(verdict)


def test_a_loss_without_a_gradient_has_no_departure_to_be_read():
    def emptied(batch):
        batch.mask.zero_()
        return reinforce(batch)

    for wrong in (emptied, lambda batch: batch.logp_new.detach().sum()):
        with pytest.raises(UserError, match=r"no gradient by .* of p_new \(actor matched"):
            list(judge(wrong, [World()]))

    def unmatched(batch):
        return reinforce(batch) * float(torch.equal(batch.logp_inf, batch.logp_ref))

    *_, verdict = judge(unmatched, [World(), World("mismatch")], ["none"])
    assert "no gradient |" in lines([verdict])[-1] and not verdict.exact


@pytest.mark.parametrize("name", ["ppo", "reinforce", "cispo"])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum-norm"])
def test_our_own_losses_depart_only_by_their_aggregation(name, mode):
    objective = ObjectiveSpec(loss=name, aggregation=mode)

    def loss(batch):
        weights = torch.ones_like(batch.logp_ref) if batch.weights is None else batch.weights
        tokens = LossTensors(
            *(batch.logp_new, batch.logp_ref, batch.advantages, weights, batch.mask, batch.mask)
        )
        value, _ = policy_loss(make_loss(objective), tokens, short_circuit=False)
        coefs = coefficients(mode, batch.mask, *counts(batch.mask, ONE_RANK), max_len=2)
        return (value * coefs).where(batch.mask, 0.0).sum()

    equal, mixed = World(), World(lengths="mixed")
    assert next(judge(loss, [equal])).exact
    assert next(judge(loss, [mixed])).exact == (mode != "token-mean")
    sequence = next(judge(loss, [World("mismatch")], ["sequence"]))
    assert sequence.exact


def verl(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config=None):
    assert loss_agg_mode
    return -((log_prob - old_log_prob).exp() * advantages * response_mask).sum() / 4, {}


def skyrl(log_probs, old_log_probs, advantages, config, loss_mask, rollout_logprobs=None):
    weight = (old_log_probs - rollout_logprobs).exp()
    ratio = (log_probs - old_log_probs).exp()
    return -(weight * ratio * advantages * loss_mask).sum() * config


class OpenRlhf(torch.nn.Module):
    def forward(self, log_probs, old_log_probs, advantages, action_mask, rollout_log_probs):
        return -((log_probs - old_log_probs).exp() * advantages * action_mask).sum()


@pytest.mark.parametrize(
    ("loss", "name", "columns"),
    [
        (verl, "verl", 4),
        (functools.partial(verl, loss_agg_mode="token-mean"), "verl", 1),
        (functools.partial(skyrl, config=0.5), "SkyRL", 1),
        (OpenRlhf(), "OpenRLHF", 1),
        (reinforce, "rlcore", 1),
    ],
)
def test_a_form_is_known_by_its_parameters(loss, name, columns):
    assert form_of(loss).name == name
    verdicts = list(judge(loss, [World()]))
    assert len(verdicts) == columns and all(v.exact for v in verdicts)


def test_what_is_no_loss_is_refused_in_a_sentence():
    with pytest.raises(UserError, match=r"parameters are a, b, and .* are rlcore: batch; TRL"):
        form_of(lambda a, b: a)
    with pytest.raises(UserError, match="not a callable object"):
        form_of(3.5)
    with pytest.raises(UserError, match=r"failed with actor matched: AttributeError: .*nothing"):
        list(judge(lambda batch: batch.nothing, [World()]))
    with pytest.raises(UserError, match="no finite scalar"):
        list(judge(lambda batch: batch.logp_new, [World()]))
    with pytest.raises(UserError, match="no finite scalar"):
        list(judge(lambda batch: batch.logp_new.sum() / 0.0, [World()]))


def test_the_command_prints_a_table_or_json(tmp_path, capsys, monkeypatch):
    few = [World(), World("mismatch"), World("mismatch", tokens=3)]
    monkeypatch.setattr("rlcore.referee.judge", functools.partial(judge, worlds=few))
    source = (
        "def loss(batch):\n    return -(batch.logp_new * batch.advantages * batch.mask).sum()\n"
    )
    (tmp_path / "own.py").write_text(source)
    word = f"{tmp_path / 'own.py'}:loss"
    assert main(["referee", word]) == 0
    text = capsys.readouterr().out
    assert "the form of rlcore" in text and "| actor matched | none | exact (1.00) |" in text
    assert "What is exact is so up to ratios of 1, answers of 2 tokens, groups of 2: lar" in text
    assert main(["referee", word, "json=true"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows[0]["exact"] and {row["weights"] for row in rows} > {"none", "sequence"}
    assert main(["referee", f"{tmp_path / 'own.py'}:other"]) == 2


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(1300)  # installs packages
def test_the_page_has_the_verdicts_on_published_losses():
    script = [sys.executable, "-m", "benchmarks.peers.referee_peers"]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, timeout=deadline(1200))
    if "No matching distribution" in done.stderr or "Connection" in done.stderr:
        pytest.skip("the packages cannot be installed here")
    assert done.returncode == 0, done.stderr
    page = (ROOT / "docs" / "referee.md").read_text(encoding="utf-8")
    assert done.stdout.strip() in page


def test_lines_have_a_cell_for_every_verdict():
    verdicts = list(judge(verl, [World(), World(lengths="mixed")]))
    rows = lines(verdicts)
    assert len(rows) == 4 and all(row.count("|") == 7 for row in rows)
