"""Score centering: its identities by enumeration, its bounds, what it refuses and warns of."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

import grid_bandit
import pytest
import torch
from grid_bandit import INF, Policies, gradient
from grid_cells import Cell, lists, refusal
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlcore.config.checks import check
from rlcore.config.compose import load
from rlcore.corrections.centre import Centred, centring
from rlcore.corrections.functional import centre, mis, tis
from rlcore.corrections.specs import CORRECTIONS
from rlcore.errors import UserError
from rlcore.objectives.losses import Ppo
from rlcore.objectives.specs import ObjectiveSpec
from rlcore.registry import load_object

CENTRE: Any = ("centre", ())
# means in which every token counts alike, whatever its sequence
CONSTANT = ("token-mean", "seq-mean-token-sum-norm")
OTHERS = [
    (),
    (("tis", ()),),
    (("mis", ()),),
    (("icepop", ()),),
    (("ais", ()),),
    (("jackpot", (("mode", "expected"),)),),
    (("jackpot", (("mode", "expected"), ("target", "new"))),),
    (("tis", (("adjusted", True),)),),
    (("tis", (("normalised", True),)),),
]


def policy_gradient(chosen: Any, *, p: Tensor, loss: str = "ppo") -> Tensor:
    """Of a phase's first step; a cap does not bind."""
    case = Cell(chosen, loss, "seq-mean-token-sum-norm", False, "none").case()
    wide = {
        name: spec.model_copy(update={"cap": 1e9, "floor": 0.0} if name == "tis" else {})
        for name, spec in case.corrections.items()
    }
    return gradient(replace(case, corrections=wide, policies=Policies(ref=p)))[0]


def test_alone_it_is_the_actor_s_own_policy_gradient() -> None:
    own = policy_gradient((), p=INF)
    for loss in ("ppo", "cispo", "sapo", "reinforce"):
        found = policy_gradient((CENTRE,), p=grid_bandit.REF, loss=loss)
        torch.testing.assert_close(found, own, atol=1e-12, rtol=0)
    assert (policy_gradient((), p=grid_bandit.REF) - own).norm() > 0.05 * own.norm()


def test_untruncated_ratios_are_centred_already() -> None:
    for p in (grid_bandit.REF, grid_bandit.NEW):
        plain = policy_gradient((("tis", ()),), p=p)
        found = policy_gradient((CENTRE, ("tis", ())), p=p)
        torch.testing.assert_close(found, plain, atol=1e-12, rtol=0)


def test_equal_policies_are_left_as_they_are() -> None:
    assert torch.equal(policy_gradient((CENTRE,), p=INF), policy_gradient((), p=INF))


@pytest.mark.parametrize("chosen", OTHERS, ids=str)
def test_a_constant_advantage_moves_nothing(chosen: Any) -> None:
    """Drift is gone, whatever the weights, the loss, and the step of the phase."""
    rewards = dict.fromkeys(grid_bandit.REWARD, 1.0)
    moved = 0
    with patch.object(grid_bandit, "REWARD", rewards), fresh_batches():
        for loss in ("ppo", "ppo(dual_clip=1.2)", "cispo", "sapo", "reinforce"):
            for mean in CONSTANT:
                for later in (False, True):
                    cell = Cell((CENTRE, *chosen), loss, mean, later, "none")
                    if refusal(cell):
                        continue
                    assert gradient(cell.case())[0].abs().max() < 1e-12, cell
                    plain = Cell(chosen, loss, mean, later, "none")
                    moved += bool(gradient(plain.case())[0].abs().max() > 1e-3)
    assert moved, "without the term no advantage would move anything either"


def fresh_batches() -> Any:
    """Batches with other rewards than those of the grid."""
    return patch.object(grid_bandit.Batch, "of", staticmethod(grid_bandit.Batch))


def test_a_ratio_to_p_inf_has_no_drift_within_its_clip() -> None:
    also = (("ratio_to", "p_inf"), ("eps_low", 1e9), ("eps_high", 1e9))
    for later in (False, True):
        cell = Cell((CENTRE,), "ppo", "token-mean", later, "none", also=also)
        assert not refusal(cell)
        plain = replace(cell, chosen=())
        torch.testing.assert_close(
            gradient(cell.case())[0], gradient(plain.case())[0], atol=1e-7, rtol=0
        )


@pytest.mark.parametrize("layout", [{"ranks": 1, "parts": 3}, {"ranks": 2, "parts": 2}])
def test_micro_batches_and_ranks_change_nothing(layout: dict[str, int]) -> None:
    for chosen in OTHERS[:6]:
        for later in (False, True):
            case = Cell((CENTRE, *chosen), "ppo", "token-mean", later, "none").case()
            whole = gradient(case)[0]
            torch.testing.assert_close(gradient(case, **layout)[0], whole, atol=1e-12, rtol=1e-9)
            assert torch.equal(gradient(case, **layout)[0], gradient(case, **layout)[0])


def test_a_kind_of_actors_is_centred_by_its_own_list() -> None:
    """The second kind's gradient is as without the first kind's term."""
    actors = ("first", "second")
    cell = Cell((CENTRE,), "ppo", "token-mean", False, "none", (("tis", ()),))
    both = replace(cell.case(), policies=Policies(actors=actors))
    neither = replace(cell, chosen=()).case()
    neither = replace(neither, policies=Policies(actors=actors))
    added = gradient(both)[0] - gradient(neither)[0]
    alone = Cell((CENTRE,), "ppo", "token-mean", False, "none").case()
    plain = Cell((), "ppo", "token-mean", False, "none").case()
    kept = both.batch.mask[both.batch.kinds == 0].sum() / both.batch.mask.sum()
    expected = (gradient(alone)[0] - gradient(plain)[0]) * kept
    torch.testing.assert_close(added, expected, atol=1e-7, rtol=1e-6)


# ----- the formula, of one state -----


def state(seed: int, n: int = 24, sd: float = 1.0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    z = 2.0 * torch.randn(n, generator=g, dtype=torch.float64)
    error = sd * torch.randn(n, generator=g, dtype=torch.float64)
    return z.softmax(0), (z + error).softmax(0)


def stored(p: Tensor, q: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    ids = q.topk(k).indices
    return ids, q[ids].log(), p[ids].log()


def in_logits(p: Tensor, ids: Tensor, c: Tensor, s: Tensor) -> Tensor:
    """[V]: what leaves the gradient of a token of advantage 1."""
    return torch.zeros_like(p).index_add(0, ids, c) - s * p


@given(st.integers(0, 10_000), st.integers(1, 24), st.floats(0.05, 1.5))
@settings(max_examples=60, deadline=None)
def test_k_tokens_are_off_by_at_most_twice_the_tail(seed: int, k: int, sd: float) -> None:
    p, q = state(seed, sd=sd)
    ids, inf, at = stored(p, q, k)
    found = in_logits(p, ids, *centre(ids, inf, at))
    tail = max(1.0 - float(q[ids].sum()), 0.0)
    assert (found - (q - p)).abs().sum() <= 2 * tail + 5e-6


@given(st.integers(0, 10_000), st.sampled_from(["none", "tis", "mis", "ais"]))
@settings(max_examples=40, deadline=None)
def test_all_tokens_give_the_whole_mean(seed: int, name: str) -> None:
    p, q = state(seed, n=12)

    def weigh(new: Tensor, ref: Tensor, inf: Tensor) -> Tensor:
        if name == "tis":
            return tis(ref, inf, torch.ones_like(inf), cap=1.5)
        if name == "mis":
            return mis(ref, inf, torch.ones_like(inf), low=0.5, high=2.0)
        alpha = 0.3 if name == "ais" else 0.0
        return 1 + alpha * ((ref - inf).exp().clamp(max=1.5) - 1)

    ids, inf, at = stored(p, q, 12)
    m = q * weigh(p.log(), p.log(), q.log())
    found = in_logits(p, ids, *centre(ids, inf, at, weigh=weigh))
    torch.testing.assert_close(found, m - m.sum() * p, atol=1e-12, rtol=0)


def test_no_ratio_above_the_cap_leaves_nothing_to_take_away() -> None:
    p, q = state(3, sd=0.1)
    for k in (4, 12, 24):
        ids, inf, at = stored(p, q, k)
        weigh = lambda new, ref, inf: tis(ref, inf, torch.ones_like(inf), cap=2.0)  # noqa: E731
        c, s = centre(ids, inf, at, weigh=weigh)
        assert c.abs().max() < 1e-12 and abs(s) < 1e-12


def test_the_first_of_repeated_ids_counts_and_pads_do_not() -> None:
    p, q = state(5)
    ids, inf, at = stored(p, q, 6)
    c, s = centre(ids, inf, at)
    again = torch.cat([ids, ids[:2], torch.tensor([-1])])
    more = [torch.cat([v, v[:2] - 0.3, torch.tensor([0.0])]) for v in (inf, at)]
    c2, s2 = centre(again, *more)
    torch.testing.assert_close(c2, torch.cat([c, c.new_zeros(3)]), atol=1e-14, rtol=0)
    assert abs(s - s2) < 1e-14 and not c2[6:].any()


def test_without_the_tail_s_factor_it_is_worse_than_nothing() -> None:
    """METHODS.md: with rho 0.04, without the term 0.10, without rho 0.59 (an error of 0.1)."""
    errors = []
    for seed in range(40):
        p, q = state(seed, n=64, sd=0.1)
        ids, inf, at = stored(p, q, 4)
        known = torch.zeros_like(p).index_add(0, ids, q[ids])
        none, without = torch.zeros_like(p), known - known.sum() * p
        found = in_logits(p, ids, *centre(ids, inf, at))
        errors.append([(v - (q - p)).norm() for v in (found, none, without)])
    ours, nothing, dropped = torch.tensor(errors).mean(0).tolist()
    assert ours < 0.6 * nothing < nothing < dropped


def test_kept_sets_are_exact() -> None:
    p, q = state(7)
    ids = q.topk(5).indices
    inf, at = (v[ids].log() - v[ids].sum().log() for v in (q, p))
    c, s = centre(ids, inf, at)
    conditioned = at.exp()
    torch.testing.assert_close(c - s * conditioned, inf.exp() - conditioned, atol=1e-12, rtol=0)


def test_a_three_step_world_has_no_drift() -> None:
    """All answers of three tokens of four: what moves every state's logits beyond the actor's own
    policy gradient, the drift E[A | state](q - p), is 0 with the term and all tokens stored."""
    width, steps = 4, 3
    g = torch.Generator().manual_seed(0)
    reward = torch.rand((width,) * steps, generator=g, dtype=torch.float64)
    prefixes = [x for t in range(steps) for x in product(range(width), repeat=t)]
    policies = {x: state(10 + i, n=width) for i, x in enumerate(prefixes)}
    answers = list(product(range(width), repeat=steps))

    def chance(answer: tuple[int, ...]) -> float:
        own = (policies[answer[:t]][1][x] for t, x in enumerate(answer))
        return float(torch.stack(list(own)).prod())

    mean = sum(chance(x) * float(reward[x]) for x in answers)
    drift = {False: 0.0, True: 0.0}
    for prefix in prefixes:
        p, q = policies[prefix]
        below = [x for x in answers if x[: len(prefix)] == prefix]
        for centred in drift:
            ids, inf, at = stored(p, q, width)
            term = in_logits(p, ids, *centre(ids, inf, at)) if centred else torch.zeros_like(p)
            moved, own = torch.zeros_like(p), torch.zeros_like(p)
            for x in below:
                gain = chance(x) * (float(reward[x]) - mean)
                drawn = torch.eye(width, dtype=torch.float64)[x[len(prefix)]]
                moved += gain * (drawn - p - term)
                own += gain * (drawn - q)
            drift[centred] += float((moved - own).norm())
    assert drift[True] < 1e-12 and drift[False] > 0.01


# ----- the term of a loss -----


def test_the_term_s_gradient_is_that_of_the_formula() -> None:
    p, q = state(11)
    ids, inf, at = stored(p, q, 8)
    z = p.log().clone().requires_grad_()
    logp = z.log_softmax(0)[ids]
    mass = torch.cat([q[ids], (1 - q[ids].sum())[None]])
    term = Centred(mass[None, None], torch.ones(1, 1, 8, dtype=torch.bool), logp[None, None], None)
    on = torch.ones(1, 1, dtype=torch.bool)
    value = centring(Ppo(ObjectiveSpec()), term, torch.full((1, 1), -1.5), on)
    assert value.item() == 0.0
    (slope,) = torch.autograd.grad(value.sum(), z)
    expected = -1.5 * in_logits(p, ids, *centre(ids, inf, at))
    torch.testing.assert_close(slope, expected, atol=1e-12, rtol=0)
    assert not centring(Ppo(ObjectiveSpec()), term, torch.ones(1, 1), ~on).any()


# ----- what is refused, and warned of -----

ACCEPTED = {"tis", "mis", "icepop", "ais", "vcpo", "centre"}


def test_every_list_is_accepted_or_refused_in_a_sentence() -> None:
    for name in CORRECTIONS:
        cell = Cell((CENTRE, (name, ())), "ppo", "token-mean", False, "none")
        if name != "centre":
            said = refusal(cell)
            assert bool(said) == (name not in ACCEPTED), (name, said)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("correction=[centre,tis] correction.tis.level=sequence", "tis as it is set weighs"),
        ("correction=[centre,tis] correction.tis.widen_clip=true", "tis as it is set weighs"),
        ("correction=[centre,mis] correction.mis.level=geometric", "mis as it is set weighs"),
        ("correction=[centre,jackpot]", "jackpot with mode=expected"),
        (
            "correction=[centre,jackpot] correction.jackpot.mode=expected "
            "correction.jackpot.tail=none",
            "weighs by more",
        ),
        ("correction=[centre,dvp]", "dvp as it is set weighs"),
        ("correction=[centre] rollout.logprobs_k=0", "rollout.logprobs_k=0"),
        ("correction=[centre] algorithm=gspo", "algorithm.loss=gspo"),
    ],
)
def test_it_refuses(words: str, says: str) -> None:
    with pytest.raises(UserError, match=says.replace("[", r"\[")):
        check(load(["run_dir=x", *words.split()]))
    check(load(["run_dir=x", "correction=[centre]"]))


def test_it_warns_of_a_critic_of_few_tokens_and_of_a_floor() -> None:
    spec = load_object(CORRECTIONS["centre"])()
    usual = {"critic": False, "stored": 20, "floor": 0.0}
    assert not list(spec.cautions(**usual))
    for name, value in (("critic", True), ("stored", 7), ("floor", 1e-5)):
        assert len(list(spec.cautions(**{**usual, name: value}))) == 1
    other = load_object(CORRECTIONS["tis"])()
    assert not list(other.cautions(critic=True, stored=1, floor=1.0))


def test_the_grid_has_lists_with_it() -> None:
    assert sum("centre" in dict(chosen) for chosen in lists()) > 10
