"""A rank's step on a plain torch engine: what the loss is made of, and which passes lead to it."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from learner_helpers import (
    disturb,
    make_batch,
    make_groups,
    make_update,
    small_model,
    with_rewards,
)

from rlcore.corrections.numerics import ONE_RANK
from rlcore.corrections.specs import CORRECTIONS, Shadow
from rlcore.learner.batch import PolicyScores, build_batch, sample_details
from rlcore.learner.update import Update
from rlcore.objectives.kl import RATIO_BOUND
from rlcore.objectives.specs import ObjectiveSpec
from rlcore.registry import load_object

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("model"))


def _update(model: str, corrections: dict[str, Any], **over: Any) -> Any:
    settings = {"temperature": 1.0, "advantage": "group_mean"} | over
    return make_update(model, corrections=corrections, **settings)


def _totals(gradient: Any) -> dict[str, float]:
    return gradient.sums.over_ranks(ONE_RANK, CPU)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_leaves_out_tokens_outside_either_policy_s_safe_set(model, estimator):
    update = _update(model, {"dvp": {"rho": 0.02}}, kl_coef=1.0, kl_estimator=estimator)
    batch = make_batch(with_rewards(make_groups(6), lambda e: 0.0))  # the KL alone
    update.prepare([batch], first=True)
    gradient = update.run(batch, 0, first=True)
    inside_new, inside_base, on = batch.ref.inside, batch.base.inside, batch.sent.mask
    assert (on & ~inside_new & inside_base).any() and (on & inside_new & ~inside_base).any()
    both = on & inside_new & inside_base
    d = (batch.base.logp - batch.ref.logp)[both].double().clamp(max=math.log(RATIO_BOUND))
    # the samples are the actor's: each carries its truncated ratio to p_new
    ratio = (batch.ref.logp - batch.sent.logp_inf)[both].double().exp()
    ratio = ratio.clamp(max=ObjectiveSpec().kl_ratio_cap)
    values = {"k1": -d, "k2": d * d / 2, "k3": torch.expm1(d) - d}[estimator]
    expected = float((ratio * values).sum()) / gradient.kept
    assert _totals(gradient)["loss/kl"] == pytest.approx(expected, rel=1e-5)
    assert max(float(g.abs().max()) for g in update.engine.gradients().values()) < 10.0


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "full"])
def test_a_token_of_weight_0_has_no_kl_either(model, estimator):
    nothing = {"mis": {"low": 1.0, "high": 1.0}}  # no ratio is exactly 1
    update = _update(model, nothing, kl_coef=1.0, kl_estimator=estimator)
    batch = make_batch(make_groups(4))
    update.prepare([batch], first=True)
    assert _totals(update.run(batch, 0, first=True))["loss/kl"] == 0.0
    assert all(float(g.abs().max()) == 0.0 for g in update.engine.gradients().values())


def test_rapid_takes_its_advantages_of_the_rewards_shaped_for_length(model):
    def gradients(share: float, reward: Any) -> list[torch.Tensor]:
        options = {"loss": "reinforce", "overlong_share": share, "overlong_penalty": 0.5}
        update = _update(model, {"rapid": {}}, **options)
        batch = make_batch(with_rewards(make_groups(4), reward))
        update.prepare([batch], first=True)
        update.run(batch, 0, first=True)
        return list(update.engine.gradients().values())

    def shaped_by_hand(e: Any) -> float:
        return e.score.reward - 0.5 * min(max((e.tokens - 5) / 5, 0.0), 1.0)

    shaped = gradients(0.5, lambda e: e.score.reward)
    by_hand = gradients(0.0, shaped_by_hand)
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(shaped, by_hand))
    plain = gradients(0.0, lambda e: e.score.reward)
    assert not all(torch.allclose(a, b, atol=1e-4) for a, b in zip(shaped, plain))


def test_a_micro_batch_is_corrected_without_measuring_it(model, monkeypatch):
    update = _update(model, {"tis": {}})
    batch = make_batch(make_groups(4), micro_batch_tokens=40)
    measured = []
    correct = update.pipeline.correct

    def spy(step: Any, reduce: Any, *, measure: bool = True) -> Any:
        measured.append(measure)
        return correct(step, reduce, measure=measure)

    monkeypatch.setattr(update.pipeline, "correct", spy)
    update.prepare([batch], first=True)
    metrics = update.run(batch, 0, first=True).metrics
    assert measured == [False] * len(batch.micro) + [True] and len(batch.micro) > 1
    assert "mismatch/kl_k3" in metrics


CENTRED = {"centre": {}, "tis": {}}
WHOLE_BATCH = {
    "none": {},
    "tis+veto": {"tis": {}, "veto": {"threshold": 0.01}},
    "tis.adjusted": {"tis": {"adjusted": True}},
    "ais": {"ais": {}},
    "rapid": {"rapid": {}},
    "dvp+mis+veto": {"dvp": {"rho": 0.02}, "mis": {}, "veto": {}},
    "opsm+tis": {"opsm": {"delta": 0.01}, "tis": {}},
    "dvp trajectory": {"dvp": {"rho": 0.02, "zero": "trajectory"}, "tis": {}},
    "centre+tis": {"centre": {}, "tis": {}},
    "centre+jackpot": {"centre": {}, "jackpot": {"mode": "expected"}},
    "jackpot": {"jackpot": {}},
    "jackpot new": {"jackpot": {"target": "new", "tail": "none"}},
}


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("name", WHOLE_BATCH)
def test_a_single_micro_batch_is_scored_and_differentiated_by_one_pass(model, name, later):
    results = []
    for ref_pass in ("auto", "always"):
        update = _update(model, WHOLE_BATCH[name], ref_pass=ref_pass, entropy_coef=0.01)
        batch = make_batch(make_groups(5))
        update.prepare([batch], first=not later)
        if later:
            disturb(update.engine.policy)
        gradient = update.run(batch, 0, first=not later)
        engine = update.engine
        results.append((gradient, engine.gradients(), engine.forwards, batch.ref.logp))
    (one, mine, passes, logp), (two, its, its_passes, its_logp) = results
    assert passes == 1 + later and its_passes == 2 + (later and update.pipeline.needs.new)
    assert one.kept == two.kept > 0 and one.metrics == two.metrics
    assert mine.keys() == its.keys() and all(torch.equal(mine[n], its[n]) for n in mine)
    assert max(float(g.abs().max()) for g in mine.values()) > 0
    assert torch.equal(logp, its_logp)


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("name", WHOLE_BATCH)
def test_kept_passes_of_several_micro_batches_give_what_a_pass_of_its_own_gives(model, name, later):
    results = []
    for settings in ({"activation_cache_mib": 64}, {"ref_pass": "always"}):
        update = _update(model, WHOLE_BATCH[name], entropy_coef=0.01, **settings)
        batch = make_batch(make_groups(5), 40)
        update.prepare([batch], first=not later)
        if later:
            disturb(update.engine.policy)
        gradient = update.run(batch, 0, first=not later)
        engine = update.engine
        results.append((gradient, engine.gradients(), engine.forwards, batch.ref.logp))
    (one, mine, passes, logp), (two, its, its_passes, its_logp) = results
    count = len(batch.micro)
    assert count > 2 and passes == (1 + later) * count
    assert its_passes == (2 + (later and update.pipeline.needs.new)) * count
    assert one.kept == two.kept > 0 and one.metrics == two.metrics
    assert mine.keys() == its.keys() and all(torch.equal(mine[n], its[n]) for n in mine)
    assert torch.equal(logp, its_logp)


@pytest.mark.parametrize("later", [False, True])
def test_a_centred_step_is_the_same_in_micro_batches_and_again(model, later):
    """A real model through the chunked head; the same steps twice are equal to the bit."""
    found = []
    for size, corrections in ((4096, CENTRED), (40, CENTRED), (40, CENTRED), (4096, {"tis": {}})):
        update = _update(model, corrections)
        batch = make_batch(make_groups(5), size)
        update.prepare([batch], first=not later, steps=1 + later)
        if later:
            disturb(update.engine.policy)
        metrics = update.run(batch, int(later), first=not later).metrics
        found.append((update.engine.gradients(), metrics))
    (whole, metrics), (parts, _), (again, _), (plain, _) = found
    assert 0 <= metrics["correction/centre/tail_mass"] <= 1
    assert all(torch.equal(parts[n], again[n]) for n in parts)
    largest = max(float(g.abs().max()) for g in whole.values())
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, atol=1e-5 * largest, rtol=1e-4)
    assert any(not torch.allclose(plain[n], whole[n], atol=1e-3 * largest) for n in whole)


def test_passes_that_do_not_fit_are_not_kept_and_tried_once(model):
    update = _update(model, {"ais": {}}, activation_cache_mib=1)
    forwards = []
    for _ in range(2):
        batch = make_batch(make_groups(30), 400)  # half a megabyte each
        begun = update.engine.forwards
        update.prepare([batch], first=True)
        assert update.run(batch, 0, first=True).kept > 0
        forwards.append(update.engine.forwards - begun)
    count = len(batch.micro)
    # the first step finds out with its first micro-batch, the second one knows
    assert count > 1 and forwards == [2 * count + 1, 2 * count]


def test_the_last_step_of_a_resumed_phase_keeps_the_p_ref_that_the_phase_began_with(model):
    update = _update(model, {"tis": {}})
    batch = make_batch(make_groups(4))
    update.prepare([batch], first=False)
    assert update.engine.forwards == 1
    logp = batch.ref.logp
    disturb(update.engine.policy)
    gradient = update.run(batch, 1, first=False)
    assert batch.ref.logp is logp
    assert abs(_totals(gradient)["policy/ratio"] / gradient.kept - 1.0) > 1e-4


@pytest.mark.parametrize("corrections", [{}, {"tis": {}}, {"jackpot": {"target": "new"}}])
def test_every_run_says_how_far_the_stored_top_k_reaches(model, corrections):
    rows = []
    for micro_batch_tokens, ref_pass in ((10_000, "auto"), (40, "auto"), (40, "always")):
        for later in (False, True):
            update = _update(model, corrections, ref_pass=ref_pass)
            batch = make_batch(make_groups(4), micro_batch_tokens)
            update.prepare([batch], first=not later)
            rows.append(update.run(batch, 0, first=not later).metrics)
    for row in rows:
        for key in ("z_approx", "kappa", "unknown_share"):
            assert row[f"mismatch/{key}"] == pytest.approx(rows[0][f"mismatch/{key}"], rel=1e-4)
    assert 0 < rows[0]["mismatch/unknown_share"] < 1


def cut_off(groups: list[Any]) -> list[Any]:
    """The first sample of every group ends at the length limit."""
    for g in groups:
        g.episodes[0].parts[-1].finish_reason = "length"
    return groups


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("tokens", [40, 10_000])
def test_overlong_filtering_leaves_the_loss_and_stays_in_the_baseline(model, mode, tokens):
    settings = {"aggregation": mode, "kl_coef": 0.1, "entropy_coef": 0.01, "advantage": "grpo"}
    found, by_hand, plain = [], [], []
    for out, on in ((found, True), (by_hand, False), (plain, False)):
        update = _update(model, {"tis": {}}, overlong_filter=on, **settings)
        batch = make_batch(cut_off(make_groups(4)), tokens)
        assert batch.sent.truncated.sum() == 4
        if out is by_hand:
            batch.sent.mask[::3] = False  # rewards, and so advantages, remain
        update.prepare([batch], first=True)
        gradient = update.run(batch, 0, first=True)
        out.extend([gradient, update.engine.gradients()])
    assert found[0].kept == by_hand[0].kept < plain[0].kept
    assert all(torch.allclose(found[1][n], g, atol=1e-8) for n, g in by_hand[1].items())
    assert not all(torch.allclose(found[1][n], g, atol=1e-5) for n, g in plain[1].items())
    assert found[0].metrics["train/overlong_filtered"] == 4
    assert "train/overlong_filtered" not in plain[0].metrics
    # the mismatch is measured before anything leaves
    assert found[0].metrics["mismatch/kl_k3"] == plain[0].metrics["mismatch/kl_k3"]


def test_a_step_of_truncated_responses_alone_has_no_gradient(model):
    update = _update(model, {"rapid": {}}, loss="reinforce", overlong_filter=True)
    groups = make_groups(2)
    for e in (e for g in groups for e in g.episodes):
        e.parts[-1].finish_reason = "length"
    batch = make_batch(groups)
    update.prepare([batch], first=True)
    gradient = update.run(batch, 0, first=True)
    assert gradient.kept == 0 and gradient.metrics["train/overlong_filtered"] == 6
    assert all(not g.any() for g in update.engine.gradients().values())


FLAT_STEPS = {
    "reinforce": {"loss": "reinforce"},
    "cispo": {"loss": "cispo"},
    "gspo": {"loss": "gspo"},
    "k3": {"kl_coef": 0.1, "kl_estimator": "k3"},
    "full kl": {"kl_coef": 0.1, "kl_estimator": "full"},
    "entropy": {"entropy_coef": 0.01},
}


@pytest.mark.parametrize("name", [*WHOLE_BATCH, *FLAT_STEPS])
@pytest.mark.parametrize("later", [False, True])
def test_a_step_without_an_advantage_goes_back_only_where_something_else_has_a_slope(
    model, monkeypatch, name, later
):
    results = []
    for flat in (Update._flat, lambda *_: False):
        monkeypatch.setattr(Update, "_flat", flat)
        update = _update(model, WHOLE_BATCH.get(name, {}), **FLAT_STEPS.get(name, {}))
        batch = make_batch(with_rewards(make_groups(4), lambda e: 1.0), 40)
        update.prepare([batch], first=not later)
        if later:
            disturb(update.engine.policy)
        gradient = update.run(batch, 0, first=not later)
        results.append((gradient, _totals(gradient), update.engine))
    (one, sums, engine), (two, its_sums, whole) = results
    assert one.metrics == two.metrics and one.step_scale == two.step_scale and len(batch.micro) > 2
    mine, its = engine.gradients(), whole.gradients()
    assert mine.keys() == its.keys() and all(torch.equal(mine[n], its[n]) for n in mine)
    left, none = sums.pop("train/flat_positions"), its_sums.pop("train/flat_positions")
    assert sums == its_sums and none == 0.0
    moves = any(bool(g.any()) for g in its.values())
    assert moves == (name in ("full kl", "k3", "entropy", "rapid"))  # rapid has its own advantages
    assert left == (0.0 if moves else sum(mb.tokens for mb in batch.micro))
    assert whole.backwards == len(batch.micro) == (engine.backwards if moves else whole.backwards)
    assert moves or engine.backwards == 1  # of a dummy, which ends the accumulation


def test_one_advantage_is_enough_for_every_backward_pass(model):
    update = _update(model, {})
    last = make_groups(4)[-1].group_id
    groups = make_groups(4)
    groups = with_rewards(groups[:-1], lambda e: 1.0) + groups[-1:]
    batch = make_batch(groups, 40)
    update.prepare([batch], first=True)
    assert _totals(update.run(batch, 0, first=True))["train/flat_positions"] == 0.0
    assert update.engine.backwards == len(batch.micro) > 2 and groups[-1].group_id == last


def test_the_ratios_and_advantages_of_single_samples():
    groups = make_groups(3)
    batch = build_batch(groups, with_topk=False, device=torch.device("cpu"))
    shape = batch.sent.mask.shape
    ref = PolicyScores(batch.sent.logp_inf + 0.5, torch.zeros(shape))
    row = int(batch.sent.mask.sum(dim=1).argmax())
    ref.logp[row, 0] = float("nan")
    ref.inside = torch.ones(shape, dtype=torch.bool)
    ref.inside[row, 1] = False
    longest = [(g.group_id, e) for g in groups for e in g.episodes][row]
    known = (longest[0], longest[1].sample_index)
    assert sample_details(batch, [known]) == {}  # p_ref is not known yet
    batch.ref = ref
    found = sample_details(batch, [known, (10_000, 0)])
    assert list(found) == [known] and "advantage" not in found[known]  # before the step
    ratios = found[known]["log_ratio"]
    assert ratios[:2] == [None, None]
    assert ratios[2:] == pytest.approx([0.5] * (longest[1].tokens - 2))
    batch.advantages = torch.where(batch.sent.mask, -1.25, torch.nan)
    assert sample_details(batch, [known])[known]["advantage"] == -1.25


def test_an_answer_at_the_mean_of_its_group_is_not_taken_for_a_bad_one(model):
    """Rewards 0.1, 0.2 and 0.3: the middle one's advantage is 0, though their sum is not exact."""
    for advantage in ("group_mean", "grpo", "rloo", "gpg", "reinforce"):
        groups = make_groups(3)
        for group in groups:
            for episode, reward in zip(group.episodes, (0.1, 0.2, 0.3)):
                episode.score = replace(episode.score, reward=reward)
        batch = make_batch(groups)
        update = _update(model, {"opsm": {"delta": 0.0}}, advantage=advantage)
        found = update.group_advantages(batch)
        assert (found[1::3] == 0).all() and (found[::3] < 0)[batch.sent.mask[::3]].all(), advantage


REWARD_KL: dict[str, Any] = {"kl_coef": 0.5, "kl_in": "reward"}


def test_a_kl_in_the_reward_is_taken_off_what_is_to_go_and_followed(model):
    adapted = {"kl_target": 1e-4, "kl_horizon": 100}
    update = _update(model, {"dvp": {"rho": 0.02}, "tis": {}}, **REWARD_KL, **adapted)
    batch = make_batch(make_groups(4))
    update.prepare([batch], first=True)
    gradient = update.run(batch, 0, first=True)
    plain = _update(model, {"tis": {}}).group_advantages(batch)
    on, ref, base = batch.sent.mask, batch.ref, batch.base
    k1 = torch.where(on & ref.inside & base.inside, ref.logp - base.logp, 0.0).clamp(-20, 20)
    to_go = torch.stack([k1[:, t:].sum(-1) for t in range(k1.shape[1])], 1)
    assert (on & ~(ref.inside & base.inside)).any() and to_go.abs().max() > 0.01
    expected = torch.where(on, plain - 0.5 * to_go, 0.0)
    torch.testing.assert_close(gradient.advantages, expected, atol=1e-5, rtol=1e-5)
    kl = gradient.metrics["train/answer_kl"]
    assert kl == pytest.approx(float(k1.sum(-1).mean()), rel=1e-4)
    assert gradient.metrics["train/kl_coef"] == 0.5 and "loss/kl" not in _totals(gradient)
    error = min(max(kl / 1e-4 - 1, -0.2), 0.2)
    assert update.kl.value == pytest.approx(0.5 * (1 + error * 12 / 100))


@pytest.mark.parametrize("cache", [0, 64])
@pytest.mark.parametrize("whitening", ["tokens", "episodes"])
def test_a_kl_in_the_reward_does_not_depend_on_micro_batches(model, whitening, cache):
    results = []
    settings = REWARD_KL | {"advantage": "reinforce_pp", "whitening": whitening}
    for tokens, own in ((10_000, {}), (40, {"activation_cache_mib": cache})):
        update = _update(model, {"tis": {}}, **settings, **own)
        batch = make_batch(make_groups(5), tokens)
        update.prepare([batch], first=True)
        results.append((update.run(batch, 0, first=True), update.engine))
        count = len(batch.micro)
    (one, whole), (several, parts) = results
    # p_ref comes before the advantages: by a pass of its own unless the differentiated ones stay
    assert whole.forwards == 1 and parts.forwards == (count if cache else 2 * count)
    assert one.metrics == pytest.approx(several.metrics, rel=1e-5, abs=1e-7)
    mine, theirs = whole.gradients(), parts.gradients()
    assert all(torch.allclose(mine[n], theirs[n], atol=1e-6) for n in mine)


def test_a_ratio_to_p_inf_needs_no_p_ref_and_is_tis_and_ppo_in_one(model):
    free: dict[str, Any] = {"eps_low": 1e9, "eps_high": 1e9}
    apart = _update(model, {"tis": {"cap": 1e9}}, **free)
    one = _update(model, {}, ratio_to="p_inf", **free)
    batches = {u: make_batch(make_groups(5), 40) for u in (apart, one)}
    for update, batch in batches.items():
        update.prepare([batch], first=True, steps=2)
    for step in range(2):
        found = {u: u.run(batch, step, first=step == 0) for u, batch in batches.items()}
        ratio = _totals(found[one])["policy/ratio"] / found[one].kept
        on = batches[one].sent.mask
        now = (batches[one].ref.logp - batches[one].sent.logp_inf)[on].exp()
        assert ratio == pytest.approx(float(now.mean()), rel=1e-5)
        mine, theirs = one.engine.gradients(), apart.engine.gradients()
        assert all(torch.allclose(mine[n], theirs[n], atol=1e-6) for n in mine)
        for update in batches:
            disturb(update.engine.policy)
    # of two steps on one batch, the other needs a pass for the p_ref that it holds
    count = len(batches[one].micro)
    assert one.engine.forwards == 2 * count and apart.engine.forwards == 3 * count
    assert not torch.equal(batches[one].ref.logp, batches[apart].ref.logp)


BESIDE = {name: {name: load_object(CORRECTIONS[name])()} for name in ("jackpot", "ais")}


@pytest.mark.parametrize("corrections", [{"tis": {}}, {"jackpot": {}}])
@pytest.mark.parametrize("first", [True, False])
def test_lists_measured_beside_leave_the_gradient_as_it_is(model, corrections, first):
    found = []
    for shadow in (Shadow(), Shadow(BESIDE, every=2)):
        update = _update(model, corrections, shadow=shadow)
        batch = make_batch(make_groups(6), micro_batch_tokens=40)
        update.prepare([batch], first=first)
        gradients = []
        for step in (1, 2):
            gradient = update.run(batch, step, first=first)
            gradients.append((update.engine.gradients(), gradient.metrics, gradient.step_scale))
        found.append(gradients)
    for (plain, metrics, scale), (its, own, its_scale) in zip(*found, strict=True):
        assert plain.keys() == its.keys() and all(torch.equal(plain[n], its[n]) for n in plain)
        assert scale == its_scale
        assert {n: v for n, v in own.items() if n in metrics} == metrics
    assert not any(name.startswith("shadow/") for _, metrics, _ in found[0] for name in metrics)
    (_, measured, _), (_, unmeasured, _) = found[1]  # each second batch
    assert {"shadow/jackpot/kept_share", "shadow/ais/cosine"} < measured.keys() - unmeasured.keys()
